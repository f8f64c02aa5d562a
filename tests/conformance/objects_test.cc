// Objects: writing and reading bytes.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <memory>

#include "base/bytes.h"
#include "conformance/places.h"

namespace unbroken::conformance {
namespace {

class Objects : public StoreTest {};
INSTANTIATE_TEST_SUITE_P(Stores, Objects, testing::ValuesIn(all_places()), place_name);

struct Free {
  void operator()(std::byte* memory) const { std::free(memory); }
};
class AlignedBuffer {
 public:
  explicit AlignedBuffer(std::size_t size)
      : size_(size),
        memory_(static_cast<std::byte*>(std::aligned_alloc(kDirectAlignment, align_up(size, kDirectAlignment)))) {
    std::memset(memory_.get(), 0, align_up(size, kDirectAlignment));
  }
  explicit AlignedBuffer(std::string_view content) : AlignedBuffer(content.size()) {
    std::memcpy(memory_.get(), content.data(), content.size());
  }
  std::span<std::byte> bytes() { return {memory_.get(), size_}; }
  // To the end of the last block.
  std::span<std::byte> padded() { return {memory_.get(), align_up(size_, kDirectAlignment)}; }

 private:
  std::size_t size_;
  std::unique_ptr<std::byte, Free> memory_;
};

const std::size_t kSizes[] = {0,    1,    511,   512,    4095,    4096,    4097,
                              8191, 8192, 12289, 100000, 1 << 20, 5000001, (4 << 20) + 4096};

TEST_P(Objects, WhatIsWrittenInOnePieceIsReadBack) {
  for (const std::size_t size : kSizes) {
    const std::string bytes = random_bytes(size, size);
    const std::string path = "o" + std::to_string(size);
    write(path, bytes);
    ASSERT_EQ(content(path), bytes) << size;
    ASSERT_EQ(store().stat(path)->size, size);
  }
}

TEST_P(Objects, AlignedWritesWithAPaddedLastBlockAreCutByFinish) {
  for (const std::size_t size : kSizes) {
    const std::string bytes = random_bytes(size, size + 1);
    const std::string path = "o" + std::to_string(size);
    AlignedBuffer buffer(bytes);
    auto writer = store().create(path, size);
    ASSERT_TRUE(is_ok(writer));
    constexpr std::size_t kPiece = 64 * kKiB;
    const auto padded = buffer.padded();
    for (std::size_t at = 0; at < padded.size(); at += kPiece) {
      const auto piece = padded.subspan(at, std::min(kPiece, padded.size() - at));
      ASSERT_TRUE(is_ok((*writer)->write_at(at, piece)));
    }
    ASSERT_TRUE(is_ok((*writer)->finish(size)));
    ASSERT_EQ(content(path), bytes) << size;
  }
}

TEST_P(Objects, RangesMayComeInAnyOrderAndWithAnyAlignment) {
  const std::string bytes = random_bytes(50000, 4);
  AlignedBuffer buffer(bytes);
  // Offset, address and length aligned or not, backwards.
  const std::size_t cuts[] = {0, 4096, 4097, 8192, 8200, 12288, 20480, 20481, 28672, 49152, 50000};
  auto writer = store().create("o", bytes.size());
  ASSERT_TRUE(is_ok(writer));
  for (std::size_t i = std::size(cuts) - 1; i > 0; --i) {
    const auto range = buffer.bytes().subspan(cuts[i - 1], cuts[i] - cuts[i - 1]);
    ASSERT_TRUE(is_ok((*writer)->write_at(cuts[i - 1], range)));
  }
  ASSERT_TRUE(is_ok((*writer)->finish(bytes.size())));
  EXPECT_EQ(content("o"), bytes);
}

TEST_P(Objects, AnAlignedRangeFromAnUnalignedAddressIsWritten) {
  const std::string bytes = random_bytes(3 * kDirectAlignment, 5);
  AlignedBuffer buffer(bytes.size() + kDirectAlignment);
  std::memcpy(buffer.bytes().data() + 3, bytes.data(), bytes.size());
  auto writer = store().create("o", bytes.size());
  ASSERT_TRUE(is_ok(writer));
  ASSERT_TRUE(is_ok((*writer)->write_at(0, buffer.bytes().subspan(3, bytes.size()))));
  ASSERT_TRUE(is_ok((*writer)->finish(bytes.size())));
  EXPECT_EQ(content("o"), bytes);
}

TEST_P(Objects, AlignedAndUnalignedOverwritesOfOneBlockAreSeenInTheirOrder) {
  AlignedBuffer zeros(std::string(2 * kDirectAlignment, '0'));
  auto writer = store().create("o", 2 * kDirectAlignment);
  ASSERT_TRUE(is_ok(writer));
  ASSERT_TRUE(is_ok((*writer)->write_at(0, zeros.bytes())));
  ASSERT_TRUE(is_ok((*writer)->write_at(5, bytes_of("abc"))));
  ASSERT_TRUE(is_ok((*writer)->write_at(kDirectAlignment, zeros.bytes().first(kDirectAlignment))));
  ASSERT_TRUE(is_ok((*writer)->write_at(kDirectAlignment + 1, bytes_of("xyz"))));
  ASSERT_TRUE(is_ok((*writer)->finish(2 * kDirectAlignment)));
  std::string expected(2 * kDirectAlignment, '0');
  expected.replace(5, 3, "abc");
  expected.replace(kDirectAlignment + 1, 3, "xyz");
  EXPECT_EQ(content("o"), expected);
}

TEST_P(Objects, TheLengthGivenToCreateIsOnlyAnEstimate) {
  for (const std::uint64_t estimate : {std::uint64_t{0}, std::uint64_t{3}, std::uint64_t{100000}}) {
    const std::string path = "o" + std::to_string(estimate);
    auto writer = store().create(path, estimate);
    ASSERT_TRUE(is_ok(writer));
    ASSERT_TRUE(is_ok((*writer)->write_at(0, bytes_of("ten bytes!"))));
    ASSERT_TRUE(is_ok((*writer)->finish(10)));
    EXPECT_EQ(content(path), "ten bytes!");
  }
}

TEST_P(Objects, FinishCutsToTheLengthGiven) {
  auto writer = store().create("o", 10);
  ASSERT_TRUE(is_ok(writer));
  ASSERT_TRUE(is_ok((*writer)->write_at(0, bytes_of("0123456789"))));
  ASSERT_TRUE(is_ok((*writer)->finish(4)));
  EXPECT_EQ(content("o"), "0123");
}

TEST_P(Objects, AFinishedObjectIsNoLongerWritten) {
  auto writer = store().create("o", 1);
  ASSERT_TRUE(is_ok(writer));
  ASSERT_TRUE(is_ok((*writer)->write_at(0, bytes_of("x"))));
  ASSERT_TRUE(is_ok((*writer)->finish(1)));
  EXPECT_TRUE(has_code((*writer)->write_at(0, bytes_of("y")), Code::kInvalidArgument));
  EXPECT_TRUE(has_code((*writer)->finish(0), Code::kInvalidArgument));
  EXPECT_EQ(content("o"), "x");
}

TEST_P(Objects, AWriterThatIsDroppedLeavesGarbageThatCanBeRemoved) {
  {
    auto writer = store().create("o", 100);
    ASSERT_TRUE(is_ok(writer));
    ASSERT_TRUE(is_ok((*writer)->write_at(0, bytes_of("part"))));
  }
  const Status removed = store().remove("o");
  EXPECT_TRUE(removed.has_value() || removed.error().code == Code::kNotFound);
  write("o", "whole");
  EXPECT_EQ(content("o"), "whole");
}

TEST_P(Objects, CreateRefusesANameThatIsTaken) {
  write("o", "first");
  make("d");
  EXPECT_TRUE(has_code(store().create("o", 1), Code::kAlreadyExists));
  EXPECT_TRUE(has_code(store().create("d", 1), Code::kAlreadyExists));
  EXPECT_EQ(content("o"), "first");
}

TEST_P(Objects, CreateNeedsItsDirectory) {
  write("o", "x");
  EXPECT_TRUE(has_code(store().create("absent/o", 1), Code::kNotFound));
  EXPECT_TRUE(has_code(store().create("absent/deeper/o", 1), Code::kNotFound));
  EXPECT_TRUE(has_code(store().create("o/below", 1), Code::kInvalidArgument));
}

TEST_P(Objects, WritesPastTheLargestOffsetAreRefused) {
  auto writer = store().create("o", 1);
  ASSERT_TRUE(is_ok(writer));
  EXPECT_TRUE(has_code((*writer)->write_at(std::uint64_t{1} << 63, bytes_of("x")), Code::kInvalidArgument));
  EXPECT_TRUE(has_code((*writer)->write_at((std::uint64_t{1} << 63) - 1, bytes_of("xy")), Code::kInvalidArgument));
}

TEST_P(Objects, AReaderReadsAnyRange) {
  const std::string bytes = random_bytes(20001, 6);
  write("o", bytes);
  auto reader = store().open("o", {});
  ASSERT_TRUE(is_ok(reader));
  ASSERT_EQ((*reader)->size(), bytes.size());
  for (const std::size_t from : {0U, 1U, 4095U, 4096U, 20000U, 20001U}) {
    for (const std::size_t length : {0U, 1U, 3U, 4096U, 8191U, 20001U}) {
      std::string got(length, '?');
      const Status read = (*reader)->read_at(from, std::as_writable_bytes(std::span(got)));
      if (from + length <= bytes.size()) {
        ASSERT_TRUE(is_ok(read));
        ASSERT_EQ(got, bytes.substr(from, length));
      } else {
        ASSERT_TRUE(has_code(read, Code::kDamaged)) << from << "+" << length;
      }
    }
  }
}

TEST_P(Objects, ADirectReaderReadsAlignedRangesAndTheEnd) {
  for (const std::size_t size : {std::size_t{1}, kDirectAlignment, 3 * kDirectAlignment, 5 * kDirectAlignment + 7}) {
    const std::string bytes = random_bytes(size, size);
    const std::string path = "o" + std::to_string(size);
    write(path, bytes);
    auto reader = store().open(path, {.direct = true});
    ASSERT_TRUE(is_ok(reader));
    ASSERT_EQ((*reader)->size(), size);
    AlignedBuffer whole(size);
    ASSERT_TRUE(is_ok((*reader)->read_at(0, whole.padded())));
    ASSERT_EQ(text_of(whole.bytes()), bytes);
    AlignedBuffer block(kDirectAlignment);
    const std::size_t last = (size - 1) / kDirectAlignment * kDirectAlignment;
    ASSERT_TRUE(is_ok((*reader)->read_at(last, block.bytes())));
    ASSERT_EQ(text_of(block.bytes().first(size - last)), bytes.substr(last));
    // A whole block past the end was never there.
    ASSERT_TRUE(has_code((*reader)->read_at(last + kDirectAlignment, block.bytes()), Code::kDamaged));
  }
}

TEST_P(Objects, ADirectReaderRefusesWhatIsNotAligned) {
  write("o", random_bytes(3 * kDirectAlignment, 7));
  auto reader = store().open("o", {.direct = true});
  ASSERT_TRUE(is_ok(reader));
  AlignedBuffer buffer(2 * kDirectAlignment);
  const auto bytes = buffer.bytes();
  EXPECT_TRUE(has_code((*reader)->read_at(1, bytes), Code::kInvalidArgument));
  EXPECT_TRUE(has_code((*reader)->read_at(0, bytes.first(100)), Code::kInvalidArgument));
  EXPECT_TRUE(has_code((*reader)->read_at(0, bytes.subspan(1, kDirectAlignment)), Code::kInvalidArgument));
}

TEST_P(Objects, AnEmptyObjectCanBeOpenedAndRead) {
  write("o", "");
  for (const bool direct : {false, true}) {
    auto reader = store().open("o", {.direct = direct});
    ASSERT_TRUE(is_ok(reader));
    EXPECT_EQ((*reader)->size(), 0U);
    EXPECT_TRUE(is_ok((*reader)->read_at(0, {})));
  }
  EXPECT_EQ(content("o"), "");
}

TEST_P(Objects, OpenAndReadSayWhatIsMissingOrOfTheWrongKind) {
  make("d");
  write("o", "x");
  EXPECT_TRUE(has_code(store().open("absent", {}), Code::kNotFound));
  EXPECT_TRUE(has_code(store().open("absent/o", {}), Code::kNotFound));
  EXPECT_TRUE(has_code(store().open("d", {}), Code::kInvalidArgument));
  EXPECT_TRUE(has_code(store().open("d", {.direct = true}), Code::kInvalidArgument));
  EXPECT_TRUE(has_code(store().open("o/x", {}), Code::kInvalidArgument));
  EXPECT_TRUE(has_code(store().read("absent", 10), Code::kNotFound));
  EXPECT_TRUE(has_code(store().read("d", 10), Code::kInvalidArgument));
  const auto failed = store().read("absent", 10);
  EXPECT_NE(failed.error().message.find("absent"), std::string::npos) << "an error names the object";
  EXPECT_FALSE(failed.error().retryable);
}

TEST_P(Objects, ReadHasALimit) {
  write("o", "12345");
  EXPECT_EQ(*store().read("o", 5), "12345");
  const auto failed = store().read("o", 4);
  EXPECT_TRUE(has_code(failed, Code::kInvalidArgument));
  EXPECT_NE(failed.error().message.find('4'), std::string::npos) << failed.error().message;
}

TEST_P(Objects, AnOpenReaderKeepsItsObjectWhenTheNameGetsAnother) {
  publish("o", "old one");
  auto reader = store().open("o", {});
  ASSERT_TRUE(is_ok(reader));
  publish("o", "new");
  std::string got(7, '?');
  ASSERT_TRUE(is_ok((*reader)->read_at(0, std::as_writable_bytes(std::span(got)))));
  EXPECT_EQ(got, "old one");
}

TEST_P(Objects, AReaderOfAnObjectThatWasCutSinceSaysDamaged) {
  auto writer = store().create("o", 0);
  ASSERT_TRUE(is_ok(writer));
  ASSERT_TRUE(is_ok((*writer)->write_at(0, bytes_of(random_bytes(10000, 8)))));
  auto reader = store().open("o", {});
  ASSERT_TRUE(is_ok(reader));
  ASSERT_EQ((*reader)->size(), 10000U);
  ASSERT_TRUE(is_ok((*writer)->finish(5000)));
  std::string got(10000, '?');
  EXPECT_TRUE(has_code((*reader)->read_at(0, std::as_writable_bytes(std::span(got))), Code::kDamaged));
}

}  // namespace
}  // namespace unbroken::conformance
