// Names: publishing, directories, listing, removing, and paths that are none.
#include <gtest/gtest.h>

#include "base/bytes.h"
#include "conformance/places.h"
#include "store/path.h"

namespace unbroken::conformance {
namespace {

class Names : public StoreTest {
 protected:
  using Call = std::function<Status(Store&, std::string_view)>;
  struct Method {
    std::string name;
    bool takes_root;
    Call call;
  };

  // Every method that takes a path.
  static std::vector<Method> methods() {
    const auto status = [](auto result) -> Status {
      if (!result) return std::move(result).error();
      return {};
    };
    return {
        {"create", false, [=](Store& s, std::string_view p) { return status(s.create(p, 1)); }},
        {"publish", false, [](Store& s, std::string_view p) { return s.publish(p, bytes_of("x")); }},
        {"create_whole", false, [](Store& s, std::string_view p) { return s.create_whole(p, bytes_of("x")); }},
        {"open", false, [=](Store& s, std::string_view p) { return status(s.open(p, {})); }},
        {"read", false, [=](Store& s, std::string_view p) { return status(s.read(p, 100)); }},
        {"remove", false, [](Store& s, std::string_view p) { return s.remove(p); }},
        {"remove_directory", false, [](Store& s, std::string_view p) { return s.remove_directory(p); }},
        {"stat", true, [=](Store& s, std::string_view p) { return status(s.stat(p)); }},
        {"list", true, [=](Store& s, std::string_view p) { return status(s.list(p)); }},
        {"make_directory", true, [](Store& s, std::string_view p) { return s.make_directory(p); }},
        {"sync_directory", true, [](Store& s, std::string_view p) { return s.sync_directory(p); }},
    };
  }
};
INSTANTIATE_TEST_SUITE_P(Stores, Names, testing::ValuesIn(all_places()), place_name);

TEST_P(Names, PathsThatLeadOutOrAreMalformedAreRefusedByEveryMethod) {
  make("d");
  using namespace std::string_view_literals;
  const std::string_view bad[] = {"/",      "/etc/passwd", "..",      "../x",   "d/..",     "d/../../x",
                                  ".",      "./d",         "d/./x",   "d/",     "d//x",     "//",
                                  "a\0b"sv, "\0"sv,        "d/x\0"sv, ".tmp-1", "d/.tmp-x", ".tmp-d/x"};
  for (const Method& method : methods()) {
    for (const std::string_view path : bad) {
      EXPECT_TRUE(has_code(method.call(store(), path), Code::kInvalidArgument)) << method.name << " \"" << path << '"';
    }
  }
  EXPECT_EQ(names(""), std::vector<std::string>{"d"});
}

TEST_P(Names, TheRootIsADirectoryAndNoObject) {
  for (const Method& method : methods()) {
    const Status done = method.call(store(), "");
    if (method.takes_root) {
      EXPECT_TRUE(is_ok(done)) << method.name;
    } else {
      EXPECT_TRUE(has_code(done, Code::kInvalidArgument)) << method.name;
    }
  }
}

TEST_P(Names, OddButLegalNamesWork) {
  for (const std::string name : {"...", "..a", ".hidden", "a b", "ä", "new\nline", "-x", "tmp-", "%2e%2e", "\\", "~"}) {
    publish(name, name);
    EXPECT_EQ(content(name), name);
  }
  const std::string longest(255, 'n');
  publish(longest, "x");
  EXPECT_EQ(content(longest), "x");
}

TEST_P(Names, EveryErrorNamesThePath) {
  for (const Method& method : methods()) {
    const Status failed = method.call(store(), "some/absent/place");
    if (failed) continue;  // make_directory, remove_directory
    EXPECT_NE(failed.error().message.find("some/absent/place"), std::string::npos)
        << method.name << ": " << failed.error().message;
  }
}

TEST_P(Names, PublishPutsAndReplacesWholeObjects) {
  publish("m", "first");
  EXPECT_EQ(content("m"), "first");
  publish("m", "");
  EXPECT_EQ(content("m"), "");
  const std::string large = random_bytes((5 << 20) + 3, 1);
  publish("m", large);
  EXPECT_EQ(content("m"), large);
  EXPECT_EQ(names(""), std::vector<std::string>{"m"}) << "no temporary name is seen";
}

TEST_P(Names, PublishNeedsADirectoryAndReplacesNone) {
  make("d");
  publish("o", "x");
  EXPECT_TRUE(has_code(store().publish("absent/m", bytes_of("x")), Code::kNotFound));
  EXPECT_TRUE(has_code(store().publish("o/m", bytes_of("x")), Code::kInvalidArgument));
  EXPECT_TRUE(has_code(store().publish("d", bytes_of("x")), Code::kInvalidArgument));
  EXPECT_TRUE(store().stat("d")->is_directory);
}

TEST_P(Names, CreateWholeLetsTheFirstWin) {
  ASSERT_TRUE(is_ok(store().create_whole("g", bytes_of("first"))));
  const Status second = store().create_whole("g", bytes_of("second"));
  if (store().abilities().create_if_absent) {
    EXPECT_TRUE(has_code(second, Code::kAlreadyExists));
    EXPECT_EQ(content("g"), "first");
  }
  EXPECT_EQ(names(""), std::vector<std::string>{"g"}) << "no temporary name is seen";
}

TEST_P(Names, CreateWholeNeedsADirectoryAndAFreeName) {
  make("d");
  publish("o", "x");
  EXPECT_TRUE(has_code(store().create_whole("absent/g", bytes_of("x")), Code::kNotFound));
  EXPECT_TRUE(has_code(store().create_whole("o/g", bytes_of("x")), Code::kInvalidArgument));
  if (store().abilities().create_if_absent) {
    EXPECT_TRUE(has_code(store().create_whole("d", bytes_of("x")), Code::kAlreadyExists));
    EXPECT_TRUE(has_code(store().create_whole("o", bytes_of("y")), Code::kAlreadyExists));
  }
  EXPECT_EQ(content("o"), "x");
}

TEST_P(Names, CreateWholeWorksAgainAfterARemoval) {
  ASSERT_TRUE(is_ok(store().create_whole("g", bytes_of("first"))));
  ASSERT_TRUE(is_ok(store().remove("g")));
  ASSERT_TRUE(is_ok(store().create_whole("g", bytes_of("second"))));
  EXPECT_EQ(content("g"), "second");
}

TEST_P(Names, StatTellsKindNameAndSize) {
  make("d/e");
  publish("d/o", "12345");
  const auto object = store().stat("d/o");
  ASSERT_TRUE(is_ok(object));
  EXPECT_EQ(object->name, "o");
  EXPECT_EQ(object->size, 5U);
  EXPECT_FALSE(object->is_directory);
  const auto directory = store().stat("d/e");
  ASSERT_TRUE(is_ok(directory));
  EXPECT_EQ(directory->name, "e");
  EXPECT_EQ(directory->size, 0U);
  EXPECT_TRUE(directory->is_directory);
  EXPECT_TRUE(store().stat("")->is_directory);
  EXPECT_TRUE(has_code(store().stat("absent"), Code::kNotFound));
  EXPECT_TRUE(has_code(store().stat("absent/x"), Code::kNotFound));
  EXPECT_TRUE(has_code(store().stat("d/o/x"), Code::kInvalidArgument));
}

TEST_P(Names, ListGivesTheEntriesSortedByName) {
  EXPECT_TRUE(names("").empty());
  make("d/sub");
  for (const char* name : {"d/z", "d/a10", "d/a9", "d/B", "d/.metadata", "d/sub/below", "other"}) publish(name, name);
  const auto entries = store().list("d");
  ASSERT_TRUE(is_ok(entries));
  EXPECT_EQ(names("d"), (std::vector<std::string>{".metadata", "B", "a10", "a9", "sub", "z"}));
  for (const ObjectInfo& entry : *entries) {
    EXPECT_EQ(entry.is_directory, entry.name == "sub");
    EXPECT_EQ(entry.size, entry.is_directory ? 0 : entry.name.size() + 2);
  }
  EXPECT_EQ(names(""), (std::vector<std::string>{"d", "other"}));
  EXPECT_EQ(names("d/sub"), std::vector<std::string>{"below"});
}

TEST_P(Names, ListHoldsManyEntries) {
  make("d");
  for (int i = 0; i < 1500; ++i) {
    auto writer = store().create("d/" + std::to_string(i), 0);
    ASSERT_TRUE(is_ok(writer));
  }
  EXPECT_EQ(names("d").size(), 1500U);
  ASSERT_TRUE(is_ok(store().remove_directory("d")));
  EXPECT_TRUE(names("").empty());
}

TEST_P(Names, ListSaysWhatIsMissingOrNoDirectory) {
  publish("o", "x");
  EXPECT_TRUE(has_code(store().list("absent"), Code::kNotFound));
  EXPECT_TRUE(has_code(store().list("absent/deeper"), Code::kNotFound));
  EXPECT_TRUE(has_code(store().list("o"), Code::kInvalidArgument));
  EXPECT_TRUE(has_code(store().list("o/x"), Code::kInvalidArgument));
}

TEST_P(Names, RemoveTakesObjectsOnly) {
  make("d");
  publish("d/o", "x");
  EXPECT_TRUE(has_code(store().remove("absent"), Code::kNotFound));
  EXPECT_TRUE(has_code(store().remove("absent/x"), Code::kNotFound));
  EXPECT_TRUE(has_code(store().remove("d"), Code::kInvalidArgument));
  ASSERT_TRUE(is_ok(store().remove("d/o")));
  EXPECT_TRUE(has_code(store().remove("d/o"), Code::kNotFound));
  EXPECT_TRUE(names("d").empty());
}

TEST_P(Names, RemoveDirectoryTakesAllThatIsInItAndNothingElse) {
  make("d/e/f");
  make("dd");
  for (const char* name : {"d/1", "d/e/2", "d/e/f/3", "dd/4", "d-5"}) publish(name, "x");
  ASSERT_TRUE(is_ok(store().remove_directory("d")));
  EXPECT_EQ(names(""), (std::vector<std::string>{"d-5", "dd"}));
  EXPECT_EQ(names("dd"), std::vector<std::string>{"4"});
  EXPECT_TRUE(has_code(store().stat("d/e/f/3"), Code::kNotFound));
}

TEST_P(Names, RemoveDirectoryOfNothingIsNoErrorAndOfAnObjectIs) {
  publish("o", "x");
  EXPECT_TRUE(is_ok(store().remove_directory("absent")));
  EXPECT_TRUE(is_ok(store().remove_directory("absent/deeper")));
  EXPECT_TRUE(has_code(store().remove_directory("o"), Code::kInvalidArgument));
  EXPECT_TRUE(has_code(store().remove_directory("o/x"), Code::kInvalidArgument));
  EXPECT_EQ(content("o"), "x");
}

TEST_P(Names, MakeDirectoryMakesParentsAndMindsNoExistingOne) {
  make("a/b/c");
  EXPECT_TRUE(store().stat("a/b/c")->is_directory);
  publish("a/b/o", "x");
  make("a/b");
  make("a/b/c/d");
  EXPECT_EQ(content("a/b/o"), "x");
}

TEST_P(Names, MakeDirectoryNamesTheFileThatIsInTheWay) {
  make("a");
  publish("a/file", "x");
  for (const char* path : {"a/file", "a/file/below", "a/file/below/deep"}) {
    const Status failed = store().make_directory(path);
    ASSERT_TRUE(has_code(failed, Code::kInvalidArgument));
    EXPECT_NE(failed.error().message.find("a/file"), std::string::npos) << failed.error().message;
  }
  EXPECT_EQ(content("a/file"), "x");
}

TEST_P(Names, SyncDirectoryTakesDirectoriesOnly) {
  make("d");
  publish("d/o", "x");
  EXPECT_TRUE(is_ok(store().sync_directory("d")));
  EXPECT_TRUE(is_ok(store().sync_directory("")));
  EXPECT_TRUE(has_code(store().sync_directory("absent"), Code::kNotFound));
  EXPECT_TRUE(has_code(store().sync_directory("d/o"), Code::kInvalidArgument));
}

TEST_P(Names, TheStoreKnowsItselfAndItsPlace) {
  EXPECT_FALSE(store().url().empty());
  EXPECT_EQ(store().abilities().create_if_absent, GetParam().abilities.create_if_absent);
  EXPECT_EQ(store().abilities().atomic_publish, GetParam().abilities.atomic_publish);
  EXPECT_EQ(store().abilities().directories, GetParam().abilities.directories);
  const auto free = store().free_bytes();
  ASSERT_TRUE(is_ok(free));
  EXPECT_GT(*free, 0U);
  EXPECT_TRUE(names("").empty()) << "finding out abilities leaves nothing behind";
}

}  // namespace
}  // namespace unbroken::conformance
