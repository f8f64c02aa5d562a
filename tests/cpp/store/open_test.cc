// URLs of stores.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "base/bytes.h"
#include "store/store.h"

namespace unbroken {
namespace {

namespace fs = std::filesystem;

class OpenStore : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = fs::temp_directory_path() / "unbroken-open-XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
  }
  void TearDown() override { fs::remove_all(root_); }

  fs::path root_;
};

TEST_F(OpenStore, APathAndAFileUrlAreTheSamePlace) {
  auto by_path = open_store(root_.string(), {});
  ASSERT_TRUE(by_path) << by_path.error().message;
  ASSERT_TRUE((*by_path)->publish("o", bytes_of("x")));
  auto by_url = open_store("file://" + root_.string(), {});
  ASSERT_TRUE(by_url) << by_url.error().message;
  EXPECT_EQ(*(*by_url)->read("o", 10), "x");
  EXPECT_EQ((*by_path)->url(), (*by_url)->url());
}

TEST_F(OpenStore, ARelativePathIsTakenFromHereAndNamedInFull) {
  const fs::path here = fs::current_path();
  fs::current_path(root_);
  auto store = open_store("./runs//7/", {.create = true});
  fs::current_path(here);
  ASSERT_TRUE(store) << store.error().message;
  EXPECT_EQ((*store)->url(), (root_ / "runs/7").string());
  EXPECT_TRUE(fs::is_directory(root_ / "runs/7"));
  EXPECT_TRUE((*store)->publish("o", bytes_of("x"))) << "it works from elsewhere, too";
}

TEST_F(OpenStore, OtherSchemesAreRefusedWithThoseThatAreKnown) {
  for (const char* url : {"s3://bucket/run", "http://host/x", "memory://", "FILE:///x"}) {
    const auto failed = open_store(url, {.create = true});
    ASSERT_FALSE(failed) << url;
    EXPECT_EQ(failed.error().code, Code::kUnsupported);
    EXPECT_NE(failed.error().message.find("file:///path"), std::string::npos) << failed.error().message;
  }
}

TEST_F(OpenStore, AFileUrlWithAHostIsRefused) {
  for (const char* url : {"file://host/path", "file://relative", "file://"}) {
    const auto failed = open_store(url, {.create = true});
    ASSERT_FALSE(failed) << url;
    EXPECT_EQ(failed.error().code, Code::kInvalidArgument);
  }
}

TEST_F(OpenStore, EmptyAndBrokenPathsAreRefused) {
  EXPECT_EQ(open_store("", {.create = true}).error().code, Code::kInvalidArgument);
  EXPECT_EQ(open_store(std::string_view("a\0b", 3), {.create = true}).error().code, Code::kInvalidArgument);
}

TEST_F(OpenStore, AnAbsentRootIsNotFoundAndSaysWhere) {
  const auto failed = open_store((root_ / "absent").string(), {});
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().code, Code::kNotFound);
  EXPECT_NE(failed.error().message.find("absent"), std::string::npos) << failed.error().message;
}

TEST_F(OpenStore, ManyStoresMayStandOnOneRoot) {
  auto one = open_store(root_.string(), {.create = true});
  auto two = open_store(root_.string(), {.create = true});
  ASSERT_TRUE(one && two);
  ASSERT_TRUE((*one)->create_whole("g", bytes_of("one")));
  EXPECT_EQ((*two)->create_whole("g", bytes_of("two")).error().code, Code::kAlreadyExists);
  EXPECT_EQ(*(*two)->read("g", 10), "one");
}

}  // namespace
}  // namespace unbroken
