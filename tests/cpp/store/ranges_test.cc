#include "store/ranges.h"

#include <gtest/gtest.h>

#include "store/store.h"

namespace unbroken {
namespace {

alignas(kDirectAlignment) std::byte buffer[4 * kDirectAlignment];

std::span<std::byte> blocks(std::size_t count) { return std::span(buffer).first(count * kDirectAlignment); }

TEST(Ranges, AlignmentIsThatOfOffsetAddressAndLength) {
  EXPECT_TRUE(is_aligned(0, buffer, kDirectAlignment));
  EXPECT_TRUE(is_aligned(kDirectAlignment, buffer, 0));
  EXPECT_FALSE(is_aligned(512, buffer, kDirectAlignment));
  EXPECT_FALSE(is_aligned(0, buffer + 512, kDirectAlignment));
  EXPECT_FALSE(is_aligned(0, buffer, 512));
}

TEST(Ranges, AReadNeedsAllItsBytes) {
  EXPECT_EQ(*bytes_to_read("o", false, 100, 90, std::span(buffer).first(10)), 10U);
  EXPECT_EQ(*bytes_to_read("o", false, 100, 100, {}), 0U);
  const auto early = bytes_to_read("o", false, 100, 91, std::span(buffer).first(10));
  ASSERT_FALSE(early);
  EXPECT_EQ(early.error().code, Code::kDamaged);
  EXPECT_NE(early.error().message.find("ends at byte 100"), std::string::npos) << early.error().message;
  EXPECT_FALSE(bytes_to_read("o", false, 100, 200, std::span(buffer).first(1)));
}

TEST(Ranges, ADirectReadMayPassTheEndWithinItsLastBlock) {
  EXPECT_EQ(*bytes_to_read("o", true, kDirectAlignment + 1, 0, blocks(2)), kDirectAlignment + 1);
  EXPECT_EQ(*bytes_to_read("o", true, 2 * kDirectAlignment, 0, blocks(2)), 2 * kDirectAlignment);
  EXPECT_FALSE(bytes_to_read("o", true, kDirectAlignment + 1, 0, blocks(3)));
  EXPECT_FALSE(bytes_to_read("o", true, kDirectAlignment, kDirectAlignment, blocks(1)));
  EXPECT_FALSE(bytes_to_read("o", true, 0, 0, blocks(1)));
}

TEST(Ranges, ADirectReadMustBeAligned) {
  const auto failed = bytes_to_read("o", true, 1 << 20, 1, blocks(1));
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().code, Code::kInvalidArgument);
}

TEST(Ranges, OffsetsEndAtTwoToThe63) {
  constexpr std::uint64_t kEnd = (std::uint64_t{1} << 63) - 1;
  EXPECT_TRUE(check_range("write", "o", kEnd - 10, 10));
  EXPECT_FALSE(check_range("write", "o", kEnd - 10, 11));
  EXPECT_FALSE(check_range("write", "o", ~std::uint64_t{0}, 2));
}

}  // namespace
}  // namespace unbroken
