#include "checkpoint/manifest.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>

#include "checkpoint/sealed_json.h"
#include "testing/seed.h"

namespace unbroken {
namespace {

using nlohmann::json;

Manifest some_manifest() {
  return {.run_id = "0123456789abcdef",
          .life_id = "fedcba9876543210",
          .key = {.step = 1200, .generation = 7, .sequence = 3},
          .attempt = "4f1c9a2e",
          .parent = "step-1100-g7-00000001",
          .time_ms = 1'700'000'000'123,
          .metadata_length = 345,
          .metadata_crc = 0xdeadbeef,
          .parts = {{.length = 10, .crc = 1, .data_bytes = 4096}, {.length = 20, .crc = 0xffffffff, .data_bytes = 0}},
          .mesh = R"({"dp":2})",
          .loader = R"({"epoch":1,"place":[5,null]})",
          .versions = R"({"torch":"2"})"};
}

RankPart some_part() {
  return {.rank = 3,
          .files = {{.name = "__3_0.distcp",
                     .length = kChunkBytes + 5,
                     .chunk_crcs = {1, 0xabcdef01},
                     .slots = {{.offset = 0, .length = 100, .data_offset = 64, .data_length = 30},
                               {.offset = 128, .length = kChunkBytes - 200, .data_offset = 64, .data_length = 0}}},
                    {.name = "__3_1.distcp", .length = 0, .chunk_crcs = {}, .slots = {}}}};
}

TEST(Manifest, RoundTrip) {
  const Manifest manifest = some_manifest();
  const auto read = decode_manifest(encode(manifest), "f");
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(manifest_body(*read), manifest_body(manifest));
  EXPECT_EQ(read->run_id, manifest.run_id);
  EXPECT_EQ(read->life_id, manifest.life_id);
  EXPECT_EQ(read->key, manifest.key);
  EXPECT_EQ(read->attempt, manifest.attempt);
  EXPECT_EQ(read->parent, manifest.parent);
  EXPECT_EQ(read->time_ms, manifest.time_ms);
  EXPECT_EQ(read->metadata_length, manifest.metadata_length);
  EXPECT_EQ(read->metadata_crc, manifest.metadata_crc);
  ASSERT_EQ(read->parts.size(), 2u);
  EXPECT_EQ(read->parts[1].crc, 0xffffffffu);
  EXPECT_EQ(read->parts[0].data_bytes, 4096u);
  EXPECT_EQ(json::parse(read->loader), json::parse(manifest.loader));
}

TEST(Manifest, PartRoundTrip) {
  const RankPart part = some_part();
  const auto read = decode_part(encode(part), "f");
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(encode(*read), encode(part));
  EXPECT_EQ(read->rank, 3u);
  ASSERT_EQ(read->files.size(), 2u);
  EXPECT_EQ(read->files[0].chunk_crcs, part.files[0].chunk_crcs);
  EXPECT_EQ(read->files[0].slots[1].length, kChunkBytes - 200);
}

TEST(Manifest, LargestNumbersSurvive) {
  Manifest manifest = some_manifest();
  constexpr auto kMost = std::numeric_limits<std::uint64_t>::max();
  manifest.key = {.step = kMost, .generation = kMost, .sequence = kMost};
  manifest.metadata_length = kMost;
  EXPECT_EQ(decode_manifest(encode(manifest), "f").value().key, manifest.key);
}

TEST(Manifest, ANewerFormatIsUnsupportedAndSaysSo) {
  auto body = json::parse(manifest_body(some_manifest()));
  body["format"] = kFormatVersion + 1;
  body.erase("run_id");  // a newer format may lack anything
  const auto read = decode_manifest(seal_json(body.dump()), "dir/manifest.json");
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().code, Code::kUnsupported);
  EXPECT_NE(read.error().message.find("dir/manifest.json"), std::string::npos);
  EXPECT_NE(read.error().message.find("upgrade"), std::string::npos);
}

// Calls `visit` with the document after each change: every value removed, and replaced by values of every other kind.
void with_every_change(const json& document, const std::function<void(const json&)>& visit) {
  const std::vector<json> strange = {nullptr,
                                     true,
                                     -1,
                                     0,
                                     1.5,
                                     18446744073709551615u,
                                     "",
                                     "text",
                                     "../x",
                                     "a/b",
                                     json::array(),
                                     json::object(),
                                     json::array({json::array({-1})}),
                                     json::array({{{"name", 5}}})};
  const json flat = document.flatten();
  for (const auto& [path, value] : flat.items()) {
    for (json::json_pointer at(path); !at.empty(); at.pop_back()) {
      for (const auto& replacement : strange) {
        json changed = document;
        changed[at] = replacement;
        visit(changed);
      }
      json changed = document;
      json& parent = changed[at.parent_pointer()];
      if (parent.is_object()) parent.erase(at.back());
      if (parent.is_array()) parent.erase(static_cast<std::size_t>(std::stoul(at.back())));
      visit(changed);
    }
  }
}

bool is_clean_error(const Error& error) {
  return (error.code == Code::kDamaged || error.code == Code::kUnsupported) && !error.message.empty();
}

TEST(Manifest, HostileRootsAreErrorsOrConsistent) {
  with_every_change(json::parse(manifest_body(some_manifest())), [](const json& body) {
    const auto read = decode_manifest(seal_json(body.dump()), "f");
    if (!read) {
      EXPECT_TRUE(is_clean_error(read.error())) << body;
    } else {
      EXPECT_EQ(read->parts.size(), body["world_size"].get<std::uint64_t>());
      EXPECT_FALSE(read->parts.empty());
    }
  });
}

TEST(Manifest, HostilePartsAreErrorsOrConsistent) {
  with_every_change(json::parse(unseal_json(encode(some_part()), "f").value()), [](const json& body) {
    const auto read = decode_part(seal_json(body.dump()), "f");
    if (!read) {
      EXPECT_TRUE(is_clean_error(read.error())) << body;
      return;
    }
    for (const auto& file : read->files) {
      EXPECT_EQ(file.name.find('/'), std::string::npos);
      EXPECT_FALSE(file.name.empty());
      EXPECT_LE(file.length, std::numeric_limits<std::uint64_t>::max() / 2);
      EXPECT_EQ(file.chunk_crcs.size(), (file.length + kChunkBytes - 1) / kChunkBytes);
      for (const auto& slot : file.slots) {
        EXPECT_LE(slot.offset + slot.length, file.length);
        EXPECT_LE(slot.data_offset + slot.data_length, slot.length);
      }
    }
  });
}

TEST(Manifest, NamesThatLeadOutOfTheDirectoryAreRefused) {
  const std::vector<std::string> names = {
      "", ".", "..", "/etc/passwd", "../__3_0.distcp", "a/b", "x/", std::string("a\0b", 3), std::string(300, 'a')};
  for (const auto& name : names) {
    RankPart part = some_part();
    part.files[0].name = name;
    EXPECT_FALSE(decode_part(encode(part), "f")) << name;
  }
}

TEST(Manifest, AFileLongerThanAnyDiskIsRefused) {
  RankPart part = some_part();
  part.files = {
      {.name = "__3_0.distcp", .length = std::numeric_limits<std::uint64_t>::max(), .chunk_crcs = {}, .slots = {}}};
  const auto read = decode_part(encode(part), "f");
  ASSERT_FALSE(read) << "its number of chunks would overflow";
  EXPECT_EQ(read.error().code, Code::kDamaged);
}

TEST(Manifest, RandomJsonNeverThrows) {
  std::mt19937_64 random(test_seed());
  const std::string body = manifest_body(some_manifest());
  const std::string part = unseal_json(encode(some_part()), "f").value();
  for (int i = 0; i < 5000; ++i) {
    std::string text = i % 2 == 0 ? body : part;
    for (std::uint64_t edits = 1 + random() % 4; edits > 0; --edits) {
      const std::size_t at = random() % text.size();
      switch (random() % 4) {
        case 0: text[at] = static_cast<char>(random()); break;
        case 1: text.erase(at, 1 + random() % 10); break;
        case 2: text.insert(at, std::string("[]{}\",:-0129eE.ntf").substr(random() % 17, 1)); break;
        default: text.insert(at, text.substr(random() % text.size(), random() % 20)); break;
      }
      if (text.empty()) text = "{";
    }
    const auto manifest = decode_manifest(seal_json(text), "f");
    ASSERT_TRUE(manifest || is_clean_error(manifest.error())) << text;
    const auto read_part = decode_part(seal_json(text), "f");
    ASSERT_TRUE(read_part || is_clean_error(read_part.error())) << text;
  }
}

TEST(AttemptName, RoundTrip) {
  const std::vector<std::uint64_t> numbers = {
      0, 1, 9, 10, 1200, 1'000'000'000'000, std::numeric_limits<std::uint64_t>::max()};
  for (const auto step : numbers) {
    for (const auto generation : numbers) {
      const AttemptKey key{.step = step, .generation = generation, .sequence = 0};
      const auto parsed = parse_attempt_directory(attempt_directory(key, "00ff9a2e"));
      ASSERT_TRUE(parsed);
      EXPECT_EQ(parsed->step, step);
      EXPECT_EQ(parsed->generation, generation);
      EXPECT_EQ(parsed->attempt, "00ff9a2e");
    }
  }
}

TEST(AttemptName, OnlyTheExactFormIsOne) {
  for (const char* name : {"",
                           "step",
                           "step-",
                           "step-1",
                           "step-1-g1",
                           "step-1-g1-",
                           "step-1-g1-4f1c9a2",
                           "step-1-g1-4f1c9a2e0",
                           "step-1-g1-4F1C9A2E",
                           "step-1-g1-4f1c9a2x",
                           "step-01-g1-4f1c9a2e",
                           "step-1-g01-4f1c9a2e",
                           "step--1-g1-4f1c9a2e",
                           "step-+1-g1-4f1c9a2e",
                           "step-1-1-4f1c9a2e",
                           "step-1-g-4f1c9a2e",
                           "step-1-gg1-4f1c9a2e",
                           "Step-1-g1-4f1c9a2e",
                           " step-1-g1-4f1c9a2e",
                           "step-1-g1-4f1c9a2e ",
                           "step-1-g1-4f1c9a2e-x",
                           "step-18446744073709551616-g1-4f1c9a2e",
                           "step-1 -g1-4f1c9a2e",
                           "generations",
                           "step-0x1-g1-4f1c9a2e",
                           "step-1e3-g1-4f1c9a2e",
                           "step-1-g1--4f1c9a2"}) {
    EXPECT_FALSE(parse_attempt_directory(name)) << name;
  }
  EXPECT_FALSE(parse_attempt_directory(std::string_view("step-1-g1-4f1c9a2\0", 18)));
}

TEST(AttemptName, FilesOfARankAreNamedByRankAndNumber) {
  EXPECT_EQ(shard_file_name(3, 0), "__3_0.distcp");
  EXPECT_EQ(part_name(12), "__12.json");
}

TEST(AttemptKey, IsOrderedByStepThenGenerationThenSequence) {
  const AttemptKey key{.step = 5, .generation = 5, .sequence = 5};
  EXPECT_LT(key, (AttemptKey{.step = 6, .generation = 0, .sequence = 0}));
  EXPECT_LT(key, (AttemptKey{.step = 5, .generation = 6, .sequence = 0}));
  EXPECT_LT(key, (AttemptKey{.step = 5, .generation = 5, .sequence = 6}));
  EXPECT_GT(key, (AttemptKey{.step = 4, .generation = 9, .sequence = 9}));
}

}  // namespace
}  // namespace unbroken
