// What only a directory of a POSIX file system has: links, users, modes, descriptors, and roots in odd states.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/magic.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <array>
#include <fstream>

#include "base/bytes.h"
#include "conformance/places.h"
#include "conformance/posix_system.h"
#include "store/posix/posix_store.h"

namespace unbroken::conformance {
namespace {

namespace fs = std::filesystem;

std::string slurp(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void spit(const fs::path& path, std::string_view content) { std::ofstream(path, std::ios::binary) << content; }

// With and without openat2: both must keep the same promises.
class Posix : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override { store_ = open(directory_.path(), {.create = true}); }

  std::unique_ptr<Store> open(const fs::path& path, StoreOptions options) {
    auto store = open_posix_store(path, options, {.openat2 = GetParam()});
    EXPECT_TRUE(is_ok(store));
    return store ? std::move(*store) : nullptr;
  }
  Store& store() { return *store_; }
  const fs::path& path() const { return directory_.path(); }

  TemporaryDirectory directory_;
  TemporaryDirectory outside_;
  std::unique_ptr<Store> store_;
};
INSTANTIATE_TEST_SUITE_P(Stores, Posix, testing::Bool(),
                         [](const auto& info) { return std::string(info.param ? "openat2" : "walk"); });

// --- The page cache ---

TEST_P(Posix, WhatWasReadIsKnownToBeCachedAndWhatWasDroppedIsNot) {
  constexpr std::uint64_t kBytes = 3 * kMiB + 5;
  const std::string content(kBytes, 'x');
  spit(path() / "object", content);
  const auto reader = store().open("object", {});
  ASSERT_TRUE(is_ok(reader));
  EXPECT_TRUE((*reader)->is_cached(0, kBytes));
  EXPECT_TRUE((*reader)->is_cached(kBytes - 1, 100)) << "only what is there of a range counts";
  EXPECT_TRUE((*reader)->is_cached(2 * kBytes, 100));
  struct statfs info{};
  ASSERT_EQ(::statfs(path().c_str(), &info), 0);
  if (info.f_type == TMPFS_MAGIC) GTEST_SKIP() << "here everything is in memory always";
  const int file = ::open((path() / "object").c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_EQ(::fsync(file), 0);
  ASSERT_EQ(::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED), 0);
  EXPECT_FALSE((*reader)->is_cached(0, kBytes));
  EXPECT_FALSE((*reader)->is_cached(5, kMiB)) << "from anywhere";
  // Direct reads leave it so, and bring what is there.
  const auto direct = store().open("object", {.direct = true});
  ASSERT_TRUE(is_ok(direct));
  alignas(kDirectAlignment) static std::array<std::byte, kMiB> block;
  ASSERT_TRUE(is_ok((*direct)->read_at(kMiB, block)));
  EXPECT_EQ(block.back(), std::byte{'x'});
  std::string read(kMiB, 'y');
  ASSERT_TRUE(is_ok((*reader)->read_at(2 * kMiB, std::as_writable_bytes(std::span(read)))));
  EXPECT_TRUE((*reader)->is_cached(2 * kMiB, kMiB));
  ::close(file);
}

// --- Links ---

TEST_P(Posix, ALinkToAFileOutsideIsNotFollowed) {
  spit(outside_.path() / "secret", "secret");
  fs::create_symlink(outside_.path() / "secret", path() / "link");
  EXPECT_TRUE(has_code(store().open("link", {}), Code::kInvalidArgument));
  EXPECT_TRUE(has_code(store().open("link", {.direct = true}), Code::kInvalidArgument));
  EXPECT_TRUE(has_code(store().read("link", 100), Code::kInvalidArgument));
  EXPECT_TRUE(has_code(store().stat("link"), Code::kInvalidArgument));
  EXPECT_TRUE(has_code(store().create("link", 1), Code::kAlreadyExists));
  EXPECT_TRUE(has_code(store().create_whole("link", bytes_of("x")), Code::kAlreadyExists));
  EXPECT_TRUE(has_code(store().make_directory("link"), Code::kInvalidArgument));
  EXPECT_TRUE(has_code(store().make_directory("link/below"), Code::kInvalidArgument));
  EXPECT_EQ(store().list("")->size(), 1U) << "it is seen, so that a directory that cannot be removed is understood";
  ASSERT_TRUE(is_ok(store().publish("link", bytes_of("ours"))));
  EXPECT_EQ(slurp(outside_.path() / "secret"), "secret");
  EXPECT_EQ(*store().read("link", 100), "ours");
}

TEST_P(Posix, ALinkWithinTheRootIsNotFollowedEither) {
  ASSERT_TRUE(is_ok(store().make_directory("d")));
  ASSERT_TRUE(is_ok(store().publish("d/o", bytes_of("x"))));
  fs::create_symlink("d", path() / "link");
  EXPECT_TRUE(has_code(store().read("link/o", 100), Code::kInvalidArgument));
}

TEST_P(Posix, NothingIsReachedThroughALinkedDirectory) {
  spit(outside_.path() / "file", "file");
  fs::create_directory_symlink(outside_.path(), path() / "link");
  EXPECT_TRUE(has_code(store().create("link/new", 1), Code::kInvalidArgument));
  EXPECT_TRUE(has_code(store().publish("link/file", bytes_of("x")), Code::kInvalidArgument));
  EXPECT_TRUE(has_code(store().create_whole("link/new", bytes_of("x")), Code::kInvalidArgument));
  EXPECT_TRUE(has_code(store().open("link/file", {}), Code::kInvalidArgument));
  EXPECT_TRUE(has_code(store().stat("link/file"), Code::kInvalidArgument));
  EXPECT_TRUE(has_code(store().list("link"), Code::kInvalidArgument));
  EXPECT_TRUE(has_code(store().remove("link/file"), Code::kInvalidArgument));
  EXPECT_TRUE(has_code(store().remove_directory("link"), Code::kInvalidArgument));
  EXPECT_TRUE(has_code(store().make_directory("link/new"), Code::kInvalidArgument));
  EXPECT_TRUE(has_code(store().sync_directory("link"), Code::kInvalidArgument));
  EXPECT_EQ(std::distance(fs::directory_iterator(outside_.path()), fs::directory_iterator()), 1);
  EXPECT_EQ(slurp(outside_.path() / "file"), "file");
}

TEST_P(Posix, RemovalsTakeALinkAndNotWhatItPointsTo) {
  fs::create_directory(outside_.path() / "sub");
  spit(outside_.path() / "sub/file", "file");
  ASSERT_TRUE(is_ok(store().make_directory("d")));
  fs::create_directory_symlink(outside_.path() / "sub", path() / "d/directory_link");
  fs::create_symlink(outside_.path() / "sub/file", path() / "d/file_link");
  fs::create_symlink("nowhere", path() / "dangling");
  ASSERT_TRUE(is_ok(store().remove_directory("d")));
  ASSERT_TRUE(is_ok(store().remove("dangling")));
  EXPECT_TRUE(store().list("")->empty());
  EXPECT_EQ(slurp(outside_.path() / "sub/file"), "file");
}

TEST_P(Posix, TheRootItselfMayBeALink) {
  fs::create_directory(outside_.path() / "real");
  fs::create_directory_symlink(outside_.path() / "real", path() / "root");
  const auto linked = open(path() / "root", {.create = true});
  ASSERT_TRUE(linked);
  ASSERT_TRUE(is_ok(linked->publish("o", bytes_of("x"))));
  EXPECT_EQ(slurp(outside_.path() / "real/o"), "x");
}

TEST_P(Posix, AFifoInTheWayBlocksNobody) {
  ASSERT_EQ(::mkfifo((path() / "fifo").c_str(), 0600), 0);
  EXPECT_TRUE(has_code(store().open("fifo", {}), Code::kInvalidArgument));
  EXPECT_TRUE(has_code(store().read("fifo", 100), Code::kInvalidArgument));
  EXPECT_TRUE(has_code(store().list("fifo"), Code::kInvalidArgument));
  EXPECT_TRUE(is_ok(store().remove("fifo")));
}

// --- Temporary names ---

TEST_P(Posix, TemporaryNamesAreHiddenAndGoWithTheirDirectory) {
  ASSERT_TRUE(is_ok(store().make_directory("d")));
  spit(path() / "d/.tmp-123-left-by-a-kill", "x");
  EXPECT_TRUE(store().list("d")->empty());
  ASSERT_TRUE(is_ok(store().remove_directory("d")));
  EXPECT_TRUE(fs::is_empty(path()));
}

TEST_P(Posix, PublishingLeavesNoTemporaryNameWhetherItGoesWellOrNot) {
  ASSERT_TRUE(is_ok(store().make_directory("d")));
  ASSERT_TRUE(is_ok(store().publish("o", bytes_of("x"))));
  EXPECT_FALSE(store().publish("d", bytes_of("x")));
  ASSERT_TRUE(is_ok(store().create_whole("w", bytes_of("x"))));
  EXPECT_FALSE(store().create_whole("w", bytes_of("x")));
  EXPECT_EQ(std::distance(fs::directory_iterator(path()), fs::directory_iterator()), 3);
}

// --- Modes and users ---

TEST_P(Posix, FilesAndDirectoriesFollowTheUmask) {
  EXPECT_TRUE(in_child([&]() -> std::string {
    ::umask(0027);
    if (!store().make_directory("d") || !store().publish("d/p", {}) || !store().create_whole("d/w", {})) return "store";
    if (!store().create("d/c", 10)) return "create";
    for (const char* name : {"d/p", "d/w", "d/c"}) {
      const auto mode = static_cast<unsigned>(fs::status(path() / name).permissions());
      if (mode != 0640) return std::string(name) + " has mode " + std::to_string(mode);
    }
    return static_cast<unsigned>(fs::status(path() / "d").permissions()) == 0750 ? "" : "directory";
  }));
}

std::string expect_code(const auto& result, Code code) {
  const auto checked = has_code(result, code);
  return checked ? "" : checked.message();
}

TEST_P(Posix, WhatAUserMayNotDoIsAPermissionError) {
  if (!may_change_user()) GTEST_SKIP() << "only root can become another user";
  ASSERT_TRUE(is_ok(store().make_directory("d")));
  ASSERT_TRUE(is_ok(store().publish("d/o", bytes_of("x"))));
  ASSERT_TRUE(is_ok(store().publish("private", bytes_of("x"))));
  fs::permissions(path(), fs::perms(0755));
  fs::permissions(path() / "private", fs::perms(0600));
  EXPECT_TRUE(as_nobody([&]() -> std::string {
    auto writable = open_posix_store(path(), {.create = true}, {.openat2 = GetParam()});
    if (auto wrong = expect_code(writable, Code::kPermission); !wrong.empty()) return wrong;
    auto opened = open_posix_store(path(), {}, {.openat2 = GetParam()});
    if (!opened) return "a root that can be read can be opened: " + opened.error().message;
    Store& reader = **opened;
    if (reader.read("d/o", 10).value_or("") != "x") return "read";
    if (!reader.list("d")) return "list";
    std::string wrong;
    wrong += expect_code(reader.publish("d/new", {}), Code::kPermission);
    wrong += expect_code(reader.create_whole("d/new", {}), Code::kPermission);
    wrong += expect_code(reader.create("d/new", 0), Code::kPermission);
    wrong += expect_code(reader.remove("d/o"), Code::kPermission);
    wrong += expect_code(reader.remove_directory("d"), Code::kPermission);
    wrong += expect_code(reader.make_directory("d/new"), Code::kPermission);
    wrong += expect_code(reader.open("private", {}), Code::kPermission);
    wrong += expect_code(open_posix_store(path() / "made/by/nobody", {.create = true}), Code::kPermission);
    return wrong;
  }));
}

TEST_P(Posix, AReadOnlyFileSystemCanBeReadAndSaysWhyItCannotBeWritten) {
  SmallFileSystem small(SmallFileSystem::Kind::kTmpfs, 4 * kMiB);
  if (small.path().empty()) GTEST_SKIP() << "no file system can be mounted here";
  ASSERT_TRUE(is_ok(open(small.path(), {.create = true})->publish("o", bytes_of("x"))));
  ASSERT_TRUE(small.make_read_only());
  const auto reader = open(small.path(), {});
  ASSERT_TRUE(reader);
  EXPECT_EQ(*reader->read("o", 10), "x");
  EXPECT_TRUE(has_code(reader->publish("o", {}), Code::kPermission));
  EXPECT_TRUE(has_code(open_posix_store(small.path(), {.create = true}), Code::kPermission));
}

// --- Roots ---

TEST_P(Posix, ARootIsMadeWithItsParentsOnlyWhenAskedTo) {
  const fs::path deep = path() / "a/b/c";
  EXPECT_TRUE(has_code(open_posix_store(deep, {}), Code::kNotFound));
  EXPECT_FALSE(fs::exists(path() / "a"));
  ASSERT_TRUE(open(deep, {.create = true}));
  EXPECT_TRUE(fs::is_directory(deep));
  ASSERT_TRUE(open(deep, {}));
}

TEST_P(Posix, ARootThatIsAFileOrBelowOneIsRefused) {
  spit(path() / "file", "x");
  for (const bool create : {false, true}) {
    EXPECT_TRUE(has_code(open_posix_store(path() / "file", {.create = create}), Code::kInvalidArgument));
    EXPECT_TRUE(has_code(open_posix_store(path() / "file/below", {.create = create}), Code::kInvalidArgument));
  }
  EXPECT_EQ(slurp(path() / "file"), "x");
}

TEST_P(Posix, ARootThatVanishesIsUnavailableAndNothingInItIsCalledAbsent) {
  const auto doomed = open(path() / "doomed", {.create = true});
  ASSERT_TRUE(doomed);
  ASSERT_TRUE(is_ok(doomed->publish("o", bytes_of("x"))));
  fs::remove_all(path() / "doomed");
  EXPECT_TRUE(has_code(doomed->read("o", 10), Code::kUnavailable));
  EXPECT_TRUE(has_code(doomed->stat("o"), Code::kUnavailable));
  EXPECT_TRUE(has_code(doomed->stat(""), Code::kUnavailable));
  EXPECT_TRUE(has_code(doomed->list(""), Code::kUnavailable));
  EXPECT_TRUE(has_code(doomed->remove("o"), Code::kUnavailable));
  EXPECT_TRUE(has_code(doomed->remove_directory("d"), Code::kUnavailable));
  EXPECT_TRUE(has_code(doomed->create("o", 1), Code::kUnavailable));
  EXPECT_TRUE(has_code(doomed->publish("o", {}), Code::kUnavailable));
  EXPECT_TRUE(has_code(doomed->create_whole("o", {}), Code::kUnavailable));
  EXPECT_TRUE(has_code(doomed->make_directory("d"), Code::kUnavailable));
}

TEST_P(Posix, ARootThatIsMovedStaysUsable) {
  const auto moved = open(path() / "here", {.create = true});
  ASSERT_TRUE(moved);
  fs::rename(path() / "here", path() / "there");
  ASSERT_TRUE(is_ok(moved->publish("o", bytes_of("x"))));
  EXPECT_EQ(slurp(path() / "there/o"), "x");
}

// --- Descriptors ---

TEST_P(Posix, NoDescriptorIsLeftOpen) {
  const auto all = [&](int i) {
    const std::string d = "d" + std::to_string(i);
    EXPECT_TRUE(is_ok(store().make_directory(d + "/e/f")));
    auto writer = store().create(d + "/o", 10000);
    EXPECT_TRUE(is_ok(writer) && is_ok((*writer)->finish(5)));
    EXPECT_TRUE(is_ok(store().create(d + "/dropped", 10)));
    EXPECT_TRUE(is_ok(store().publish(d + "/p", bytes_of("x"))));
    EXPECT_TRUE(is_ok(store().create_whole(d + "/w", bytes_of("x"))));
    EXPECT_FALSE(store().create_whole(d + "/w", bytes_of("x")));
    EXPECT_FALSE(store().publish(d + "/e", bytes_of("x")));
    EXPECT_TRUE(is_ok(store().open(d + "/o", {.direct = true})));
    EXPECT_FALSE(store().open(d + "/e", {}));
    EXPECT_TRUE(is_ok(store().read(d + "/o", 10)));
    EXPECT_TRUE(is_ok(store().list(d)));
    EXPECT_TRUE(is_ok(store().stat(d)));
    EXPECT_TRUE(is_ok(store().sync_directory(d)));
    EXPECT_TRUE(is_ok(store().remove_directory(d)));
    EXPECT_TRUE(open(path(), {.create = true}));
  };
  all(0);
  const std::size_t before = open_descriptors();
  for (int i = 1; i < 5; ++i) all(i);
  EXPECT_EQ(open_descriptors(), before);
}

TEST_P(Posix, AWriterHasTwoDescriptorsAndAReaderOne) {
  const std::size_t before = open_descriptors();
  {
    auto writer = store().create("o", 10000);
    ASSERT_TRUE(is_ok(writer));
    EXPECT_LE(open_descriptors(), before + 2);
    ASSERT_TRUE(is_ok((*writer)->finish(1)));
    EXPECT_EQ(open_descriptors(), before) << "a finished writer holds none";
  }
  auto reader = store().open("o", {});
  ASSERT_TRUE(is_ok(reader));
  EXPECT_EQ(open_descriptors(), before + 1);
}

TEST_P(Posix, RunningOutOfDescriptorsIsAnErrorThatMayPass) {
  ASSERT_TRUE(is_ok(store().publish("o", bytes_of("x"))));
  EXPECT_TRUE(in_child([&]() -> std::string {
    const int lowest_free = ::dup(0);
    ::close(lowest_free);
    const rlimit limit{.rlim_cur = static_cast<rlim_t>(lowest_free), .rlim_max = 1 << 10};
    if (lowest_free < 0 || ::setrlimit(RLIMIT_NOFILE, &limit) != 0) return "cannot limit descriptors";
    const auto failed = store().read("o", 10);
    if (auto wrong = expect_code(failed, Code::kUnavailable); !wrong.empty()) return wrong;
    return failed.error().retryable ? "" : "not retryable";
  }));
}

TEST_P(Posix, DirectoriesMayBeNestedSixtyDeepAndNoTreeIsHalfRemovedWithoutAnError) {
  std::string deep = "d";
  for (int i = 0; i < 60; ++i) deep += "/d";
  ASSERT_TRUE(is_ok(store().make_directory(deep)));
  ASSERT_TRUE(is_ok(store().remove_directory("d")));
  for (int i = 0; i < 10; ++i) deep += "/d";
  ASSERT_TRUE(is_ok(store().make_directory(deep)));
  EXPECT_TRUE(has_code(store().remove_directory("d"), Code::kInvalidArgument));
  EXPECT_TRUE(is_ok(store().stat(deep)));
}

// --- Full disks ---

class FullDisk : public testing::TestWithParam<SmallFileSystem::Kind> {
 protected:
  void SetUp() override {
    if (small_.path().empty()) GTEST_SKIP() << "no file system can be mounted here (needs root)";
    auto store = open_posix_store(small_.path() / "root", {.create = true});
    ASSERT_TRUE(is_ok(store));
    store_ = std::move(*store);
    ASSERT_TRUE(is_ok(store_->publish("m", bytes_of("old"))));
  }
  void TearDown() override { store_.reset(); }

  void fill() {
    auto writer = store_->create("filler", 0);
    ASSERT_TRUE(is_ok(writer));
    const std::string block(64 * kKiB, 'x');
    std::uint64_t at = 0;
    for (std::string_view rest = block; !rest.empty();) {
      if ((*writer)->write_at(at, bytes_of(rest))) {
        at += rest.size();
      } else {
        rest = rest.substr(0, rest.size() / 2);
      }
      ASSERT_LT(at, kBytes);
    }
  }

  static constexpr std::uint64_t kBytes = 16 * kMiB;
  SmallFileSystem small_{GetParam(), kBytes};
  std::unique_ptr<Store> store_;
};
INSTANTIATE_TEST_SUITE_P(Stores, FullDisk, testing::Values(SmallFileSystem::Kind::kTmpfs, SmallFileSystem::Kind::kExt4),
                         [](const auto& info) {
                           return std::string(info.param == SmallFileSystem::Kind::kTmpfs ? "tmpfs" : "ext4");
                         });

TEST_P(FullDisk, CreateOfMoreThanIsFreeSaysSoAtOnceAndLeavesNothing) {
  const auto failed = store_->create("o", 3 * kBytes);
  ASSERT_TRUE(has_code(failed, Code::kNoSpace));
  const std::string& message = failed.error().message;
  EXPECT_NE(message.find("48.0 MiB needed"), std::string::npos) << message;
  EXPECT_NE(message.find(" free"), std::string::npos) << message;
  EXPECT_NE(message.find("root/o"), std::string::npos) << message;
  EXPECT_EQ(store_->list("")->size(), 1U);
  EXPECT_TRUE(is_ok(store_->create("o", 1000)));
}

TEST_P(FullDisk, SpaceThatWasReservedIsThereWhenTheDiskFillsUp) {
  auto writer = store_->create("reserved", kMiB);
  ASSERT_TRUE(is_ok(writer));
  fill();
  const std::string bytes = random_bytes(kMiB, 1);
  ASSERT_TRUE(is_ok((*writer)->write_at(0, bytes_of(bytes))));
  ASSERT_TRUE(is_ok((*writer)->finish(kMiB)));
  EXPECT_EQ(*store_->read("reserved", kMiB), bytes);
}

TEST_P(FullDisk, WritingAndPublishingSayNoSpaceAndKeepTheOldState) {
  auto writer = store_->create("o", 0);
  ASSERT_TRUE(is_ok(writer));
  fill();
  const std::string large(kMiB, 'x');
  const Status failed = (*writer)->write_at(0, bytes_of(large));
  ASSERT_TRUE(has_code(failed, Code::kNoSpace));
  EXPECT_NE(failed.error().message.find("1.0 MiB needed"), std::string::npos) << failed.error().message;
  EXPECT_TRUE(has_code(store_->publish("m", bytes_of(large)), Code::kNoSpace));
  EXPECT_TRUE(has_code(store_->create_whole("w", bytes_of(large)), Code::kNoSpace));
  EXPECT_EQ(*store_->read("m", 10), "old");
  EXPECT_TRUE(has_code(store_->stat("w"), Code::kNotFound));
  for (const auto& entry : fs::directory_iterator(small_.path() / "root")) {
    EXPECT_FALSE(entry.path().filename().string().starts_with(".tmp-")) << entry.path();
  }
  EXPECT_LT(*store_->free_bytes(), kMiB);
}

TEST_P(FullDisk, AFullRootCanStillBeOpenedAndReadAndEmptied) {
  fill();
  auto again = open_posix_store(small_.path() / "root", {.create = true});
  ASSERT_TRUE(is_ok(again));
  EXPECT_EQ(*(*again)->read("m", 10), "old");
  ASSERT_TRUE(is_ok((*again)->remove("filler")));
  EXPECT_TRUE(is_ok((*again)->publish("m", bytes_of("new"))));
}

}  // namespace
}  // namespace unbroken::conformance
