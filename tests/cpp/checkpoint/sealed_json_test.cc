#include "checkpoint/sealed_json.h"

#include <gtest/gtest.h>

#include <random>

#include "testing/seed.h"

namespace unbroken {
namespace {

constexpr std::string_view kBody = R"({"format":1,"name":"a \"quoted\" name","numbers":[1,2,3],"nested":{"x":-5}})";

TEST(SealedJson, GivesTheBodyBack) {
  const std::string document = seal_json(kBody);
  EXPECT_TRUE(document.ends_with("\n"));
  EXPECT_EQ(unseal_json(document, "f").value(), kBody);
  EXPECT_EQ(unseal_json(seal_json("{}"), "f").value(), "{}");
}

TEST(SealedJson, IsItselfJson) {
  const auto parsed = nlohmann::json::parse(seal_json(kBody));
  EXPECT_EQ(parsed["body"]["nested"]["x"], -5);
  EXPECT_EQ(parsed["crc32c"].get<std::string>().size(), 8u);
}

TEST(SealedJson, EveryFlippedBitIsDamage) {
  const std::string document = seal_json(kBody);
  for (std::size_t bit = 0; bit < document.size() * 8; ++bit) {
    std::string damaged = document;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << (bit % 8)));
    const auto body = unseal_json(damaged, "dir/f.json");
    ASSERT_FALSE(body) << "bit " << bit;
    ASSERT_EQ(body.error().code, Code::kDamaged);
    ASSERT_NE(body.error().message.find("dir/f.json"), std::string::npos);
  }
}

TEST(SealedJson, EveryTruncationAndEveryTailIsDamage) {
  const std::string document = seal_json(kBody);
  for (std::size_t length = 0; length < document.size(); ++length) {
    ASSERT_FALSE(unseal_json(document.substr(0, length), "f")) << length;
    ASSERT_FALSE(unseal_json(document.substr(length + 1), "f")) << length;
  }
  for (const char* tail : {"\n", " ", "}", "}\n"}) ASSERT_FALSE(unseal_json(document + tail, "f"));
  ASSERT_FALSE(unseal_json(document + std::string(1, '\0'), "f"));
  ASSERT_FALSE(unseal_json(document + document, "f"));
}

TEST(SealedJson, ZerosInsteadOfBlocksAreDamage) {
  std::string body = R"({"text":")";
  body.append(20'000, 'x');
  body += "\"}";
  const std::string document = seal_json(body);
  for (std::size_t at = 0; at < document.size(); at += 4096) {
    std::string damaged = document;
    for (std::size_t i = at; i < std::min(document.size(), at + 4096); ++i) damaged[i] = '\0';
    EXPECT_FALSE(unseal_json(damaged, "f")) << at;
  }
}

TEST(SealedJson, RandomBytesAreDamage) {
  std::mt19937_64 random(test_seed());
  for (int i = 0; i < 2000; ++i) {
    std::string bytes(random() % 200, '\0');
    for (auto& c : bytes) c = static_cast<char>(random());
    EXPECT_FALSE(unseal_json(bytes, "f"));
  }
}

TEST(JsonFields, NamesTheFirstFieldThatIsWrong) {
  const nlohmann::json object = {{"number", 5u}, {"text", "t"}, {"negative", -1}, {"float", 1.5}, {"list", {1}}};
  JsonFields good(object, "f");
  EXPECT_EQ(good.u64("number"), 5u);
  EXPECT_EQ(good.text("text"), "t");
  EXPECT_EQ(good.i64("negative"), -1);
  EXPECT_EQ(good.array("list").size(), 1u);
  EXPECT_TRUE(good.finish());
  const auto first_error = [&](auto&& use) {
    JsonFields fields(object, "f");
    use(fields);
    const Status status = fields.finish();
    return status ? std::string() : status.error().message;
  };
  EXPECT_NE(first_error([](auto& f) {
              f.u64("absent");
              f.u64("text");
            }).find("absent"),
            std::string::npos);
  for (const char* key : {"text", "negative", "float", "list"}) {
    EXPECT_NE(first_error([&](auto& f) { f.u64(key); }).find(key), std::string::npos);
  }
  EXPECT_NE(first_error([](auto& f) { f.text("number"); }).find("number"), std::string::npos);
  EXPECT_NE(first_error([](auto& f) { f.array("text"); }).find("text"), std::string::npos);
  EXPECT_NE(first_error([](auto& f) { f.object("list"); }).find("list"), std::string::npos);
  EXPECT_NE(first_error([](auto& f) { f.hex32("text"); }).find("text"), std::string::npos);
}

TEST(JsonFields, AValueThatIsNoObjectIsAnErrorAndNothingElse) {
  for (const char* text : {"[]", "5", "null", "\"text\"", "true"}) {
    const auto value = nlohmann::json::parse(text);
    JsonFields fields(value, "f");
    EXPECT_EQ(fields.u64("a"), 0u);
    EXPECT_EQ(fields.text("a"), "");
    EXPECT_TRUE(fields.array("a").empty());
    EXPECT_EQ(fields.raw("a"), "null");
    EXPECT_FALSE(fields.finish());
  }
}

TEST(ParseJsonObject, RefusesWhatIsNotAnObject) {
  for (const char* text : {"", "[]", "1", "{", "{}}", "{\"a\":1e999}", "{\"a\":\"\xff\"}", "nul"}) {
    EXPECT_FALSE(parse_json_object(text, "f")) << text;
  }
  EXPECT_TRUE(parse_json_object("{\"a\":[1]}", "f"));
}

// A document comes from outside: the recursion of a printer must not be driven by it.
TEST(ParseJsonObject, RefusesDeepNesting) {
  const std::size_t depth = 1'000'000;
  std::string lists = "{\"mesh\":" + std::string(depth, '[') + std::string(depth, ']') + "}";
  EXPECT_FALSE(parse_json_object(lists, "f"));
  std::string objects = "{\"mesh\":";
  for (std::size_t i = 0; i < depth; ++i) objects += "{\"a\":";
  objects += "1" + std::string(depth + 1, '}');
  EXPECT_FALSE(parse_json_object(objects, "f"));
  // Brackets within a text are no nesting.
  EXPECT_TRUE(
      parse_json_object("{\"mesh\":\"" + std::string(depth, '[') + "\\\"" + std::string(depth, '{') + "\"}", "f"));
}

}  // namespace
}  // namespace unbroken
