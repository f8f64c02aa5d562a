#include "checkpoint/image.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <map>
#include <memory>
#include <random>

#include "base/bytes.h"
#include "checkpoint/shard.h"
#include "store/memory/memory_store.h"
#include "testing/seed.h"

namespace unbroken {
namespace {

// As torch.save ends an archive: an end record without a comment.
std::string archive_of(std::size_t length, char fill = 'x') {
  std::string archive(length - 22, fill);
  archive += "PK\x05\x06";
  archive.append(18, '\0');
  return archive;
}

std::string_view text_at(const Image::File& file, const Slot& slot) {
  return text_of(file.bytes.subspan(slot.offset, slot.length));
}

Status place(Image& image, const std::vector<std::string>& archives, bool* changed = nullptr) {
  const std::vector<std::string_view> views(archives.begin(), archives.end());
  UNBROKEN_ASSIGN(const bool moved, image.place_objects(views));
  if (changed != nullptr) *changed = moved;
  return {};
}

TEST(Image, TensorsLieWhereTheirSlotsSayAsTorchWouldWriteThem) {
  ImageBuilder builder(3, kMiB);
  const std::size_t first = builder.add_tensor("head one", 1000, "tail").value();
  const std::size_t second = builder.add_tensor("h2", 0, "t").value();
  const std::size_t third = builder.add_tensor("", 5, "").value();
  Image image = std::move(builder).build(2).value();
  const std::string one(1000, 'a');
  const std::string three = "12345";
  const std::vector<CopyIn> copies = {{.slot = third, .source = bytes_of(three).data(), .bytes = 5},
                                      {.slot = first, .source = bytes_of(one).data(), .bytes = 1000}};
  ASSERT_TRUE(image.stage(copies, 2));
  const auto files = image.files();
  ASSERT_EQ(files.size(), 1u);
  EXPECT_EQ(files[0].name, "__3_0.distcp");
  ASSERT_EQ(files[0].slots.size(), 3u);
  EXPECT_EQ(text_at(files[0], image.slot(first).slot), "head one" + one + "tail");
  EXPECT_EQ(text_at(files[0], image.slot(second).slot), "h2t");
  EXPECT_EQ(text_at(files[0], image.slot(third).slot), "12345");
  EXPECT_EQ(files[0].bytes.size() % kDirectAlignment, 0u);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(files[0].slots[i].offset % 64, 0u);
  EXPECT_EQ(files[0].length, image.slot(third).slot.offset + 5);
}

TEST(Image, NoFileIsLongerThanItMayBe) {
  std::mt19937_64 random(test_seed());
  for (int round = 0; round < 20; ++round) {
    const std::uint64_t most = 1000 + random() % 5000;
    ImageBuilder builder(0, most);
    std::vector<std::size_t> slots;
    for (int i = 0; i < 50; ++i) slots.push_back(builder.add_tensor("h", random() % (most - 2), "t").value());
    Image image = std::move(builder).build(1).value();
    std::map<std::string, std::vector<Slot>> by_file;
    for (const std::size_t slot : slots) by_file[image.slot(slot).file].push_back(image.slot(slot).slot);
    const auto files = image.files();
    ASSERT_EQ(files.size(), by_file.size());
    for (const auto& file : files) {
      ASSERT_LE(file.length, most);
      std::uint64_t end = 0;
      ASSERT_EQ(file.slots.size(), by_file[file.name].size());
      for (const auto& slot : file.slots) {
        ASSERT_GE(slot.offset, end) << "slots must not overlap";
        end = slot.offset + slot.length;
      }
      ASSERT_EQ(end, file.length);
    }
  }
}

TEST(Image, APieceLargerThanAFileIsRefused) {
  ImageBuilder builder(0, 1000);
  EXPECT_TRUE(builder.add_tensor("h", 998, "t"));
  const auto refused = builder.add_tensor("h", 999, "t");
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::kInvalidArgument);
}

TEST(Image, ACopyOfAnotherLengthIsRefused) {
  ImageBuilder builder(0, kMiB);
  const std::size_t slot = builder.add_tensor("h", 100, "t").value();
  Image image = std::move(builder).build(1).value();
  const std::string bytes(101, 'a');
  for (const std::uint64_t length : {0, 99, 101}) {
    const CopyIn copy{.slot = slot, .source = bytes_of(bytes).data(), .bytes = length};
    EXPECT_FALSE(image.stage(std::span(&copy, 1), 1)) << length;
  }
}

TEST(Image, AnObjectFillsItsSlotAndStaysAValidArchive) {
  ImageBuilder builder(1, kMiB);
  const std::size_t slot = builder.add_object(500);
  Image image = std::move(builder).build(1).value();
  for (const std::size_t length : {500, 400, 600, 22, 500}) {
    const std::string archive = archive_of(length);
    bool changed = true;
    ASSERT_TRUE(place(image, {archive}, &changed));
    EXPECT_FALSE(changed) << "room to grow and to shrink: " << length;
    const auto files = image.files();
    ASSERT_EQ(files.size(), 1u);
    EXPECT_EQ(files[0].name, image.object_file_name());
    const std::string_view there = text_at(files[0], image.slot(slot).slot);
    EXPECT_EQ(there.size(), image.slot(slot).slot.length);
    // The end record says how long the comment is, and the comment is all that follows.
    const auto comment = static_cast<std::size_t>(static_cast<unsigned char>(there[length - 2])) +
                         256 * static_cast<std::size_t>(static_cast<unsigned char>(there[length - 1]));
    EXPECT_EQ(comment, there.size() - length);
    EXPECT_EQ(there.substr(0, length - 2), std::string_view(archive).substr(0, length - 2));
    EXPECT_EQ(there.substr(length), std::string(comment, '\0'));
  }
}

TEST(Image, AnObjectThatOutgrowsItsSlotMovesAndSaysSo) {
  std::mt19937_64 random(test_seed());
  ImageBuilder builder(0, kMiB);
  const std::size_t tensor = builder.add_tensor("h", 10, "t").value();
  std::vector<std::size_t> slots = {builder.add_object(100), builder.add_object(200'000), builder.add_object(22)};
  Image image = std::move(builder).build(1).value();
  for (int round = 0; round < 200; ++round) {
    std::vector<std::string> archives;
    for (std::size_t i = 0; i < 3; ++i) {
      archives.push_back(
          archive_of(22 + random() % (random() % 4 == 0 ? 3'000'000 : 5000), static_cast<char>('a' + i)));
    }
    std::vector<Slot> before;
    for (const std::size_t slot : slots) before.push_back(image.slot(slot).slot);
    bool changed = false;
    ASSERT_TRUE(place(image, archives, &changed));
    const auto files = image.files();
    ASSERT_EQ(files.size(), 2u);
    EXPECT_EQ(image.slot(tensor).file, files[0].name) << "tensors stay";
    std::uint64_t end = 0;
    for (std::size_t i = 0; i < 3; ++i) {
      const Slot slot = image.slot(slots[i]).slot;
      ASSERT_TRUE(changed || slot.offset == before[i].offset);
      ASSERT_GE(slot.offset, end);
      end = slot.offset + slot.length;
      const std::string_view there = text_at(files[1], slot);
      ASSERT_EQ(there.substr(0, archives[i].size() - 2),
                std::string_view(archives[i]).substr(0, archives[i].size() - 2));
      ASSERT_LE(there.size() - archives[i].size(), 65535u) << "the longest comment of a ZIP archive";
    }
    ASSERT_EQ(files[1].length, end);
    ASSERT_NE(image.object_slots().find(std::to_string(image.slot(slots[0]).slot.length)), std::string::npos);
  }
}

TEST(Image, WhatIsNoArchiveOrNotAsManyIsRefused) {
  ImageBuilder builder(0, kMiB);
  builder.add_object(100);
  Image image = std::move(builder).build(1).value();
  EXPECT_FALSE(place(image, {"no archive at all, but long enough"}));
  EXPECT_FALSE(place(image, {""}));
  EXPECT_FALSE(place(image, {archive_of(100) + "x"}));
  EXPECT_FALSE(place(image, {}));
  EXPECT_FALSE(place(image, {archive_of(100), archive_of(100)}));
  std::string commented = archive_of(100);
  commented[98] = 1;
  EXPECT_FALSE(place(image, {commented}));
}

TEST(Image, AnEmptyImageIsAnImage) {
  Image image = ImageBuilder(0, kMiB).build(1).value();
  EXPECT_TRUE(image.files().empty());
  EXPECT_TRUE(image.stage({}, 4));
  EXPECT_TRUE(place(image, {}));
}

// Runs in a forked child and says by its exit code whether all held.
bool holds_in_child(const std::function<bool()>& check) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(check() ? 0 : 1);
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST(Image, RefusesToWorkInAForkedChild) {
  ImageBuilder builder(0, kMiB);
  const std::size_t slot = builder.add_tensor("h", 100, "t").value();
  builder.add_object(100);
  Image image = std::move(builder).build(1).value();
  const std::string bytes(100, 'a');
  const CopyIn copy{.slot = slot, .source = bytes_of(bytes).data(), .bytes = bytes.size()};
  ASSERT_TRUE(image.stage(std::span(&copy, 1), 1));
  EXPECT_TRUE(holds_in_child([&] {
    MemoryStore store;
    store.make_directory("d").ignore("it is empty");
    const Status staged = image.stage(std::span(&copy, 1), 1);
    const auto written = write_rank(store, "d", image, 1);
    return !image.usable() && !staged && staged.error().code == Code::kInvalidArgument && !written &&
           written.error().code == Code::kInvalidArgument;
  }));
  EXPECT_TRUE(holds_in_child([&] {
    const auto placed = place(image, {archive_of(100)});
    return !placed && placed.error().code == Code::kInvalidArgument;
  })) << "objects, too";
  EXPECT_TRUE(image.usable());
}

// An image that dies in the child must not take the parent's memory along.
TEST(Image, AForkedChildThatEndsLeavesTheParentsImageAlone) {
  ImageBuilder builder(0, kMiB);
  const std::size_t slot = builder.add_tensor("h", 100, "t").value();
  auto image = std::make_unique<Image>(std::move(builder).build(1).value());
  const std::string bytes(100, 'a');
  const CopyIn copy{.slot = slot, .source = bytes_of(bytes).data(), .bytes = bytes.size()};
  ASSERT_TRUE(image->stage(std::span(&copy, 1), 1));
  EXPECT_TRUE(holds_in_child([&] {
    image.reset();
    return true;
  }));
  EXPECT_EQ(text_of(image->data(slot)), bytes);
}

}  // namespace
}  // namespace unbroken
