#include "store/path.h"

#include <gtest/gtest.h>

#include <set>

namespace unbroken {
namespace {

TEST(Path, TheRootIsAPathButNothingBelowIt) {
  EXPECT_TRUE(check_path("stat", ""));
  EXPECT_FALSE(check_path_below_root("open", ""));
  EXPECT_TRUE(check_path_below_root("open", "a"));
}

TEST(Path, LeadingTrailingAndDoubledSlashesAreEmptyComponents) {
  for (const char* path : {"/", "/a", "a/", "a//b", "//"}) {
    const Status checked = check_path("open", path);
    ASSERT_FALSE(checked) << path;
    EXPECT_EQ(checked.error().code, Code::kInvalidArgument);
    EXPECT_NE(checked.error().message.find("empty component"), std::string::npos) << checked.error().message;
  }
}

TEST(Path, DotsAloneAreRefusedAndDotsInNamesAreNot) {
  for (const char* path : {".", "..", "a/..", "../a", "a/./b"}) EXPECT_FALSE(check_path("open", path)) << path;
  for (const char* path : {"...", ".a", "a.", "a..b", ".metadata", "a/.b"})
    EXPECT_TRUE(check_path("open", path)) << path;
}

TEST(Path, TheMessageNamesActionAndPathAndShowsControlCharacters) {
  const Status checked = check_path("open", std::string_view("a\0b\n", 4));
  ASSERT_FALSE(checked);
  EXPECT_NE(checked.error().message.find("open \"a\\x00b\\x0a\""), std::string::npos) << checked.error().message;
}

TEST(Path, TemporaryNamesAreReservedAndUnique) {
  std::set<std::string> names;
  for (int i = 0; i < 1000; ++i) {
    const std::string name = temporary_name();
    EXPECT_TRUE(is_temporary(name));
    EXPECT_EQ(name.find('/'), std::string::npos);
    EXPECT_TRUE(names.insert(name).second);
  }
  EXPECT_FALSE(check_path("open", ".tmp-x"));
  EXPECT_FALSE(check_path("open", "d/.tmp-x/y"));
  EXPECT_TRUE(check_path("open", "x.tmp-"));
  EXPECT_TRUE(check_path("open", ".tmp"));
}

TEST(Path, SplittingAndJoiningAreInverse) {
  for (const std::string path : {"a", "a/b", "a/b/c"}) {
    const SplitPath split = split_path(path);
    EXPECT_EQ(join_path(split.directory, split.name), path);
  }
  EXPECT_EQ(split_path("a").directory, "");
  EXPECT_EQ(split_path("a/b/c").directory, "a/b");
  EXPECT_EQ(split_path("a/b/c").name, "c");
}

}  // namespace
}  // namespace unbroken
