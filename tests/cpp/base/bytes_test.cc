#include "base/bytes.h"

#include <gtest/gtest.h>

#include <limits>

namespace unbroken {
namespace {

TEST(BytesTest, TextAndBytesAreViewsOfTheSameMemory) {
  const std::string text("a\0\xff z", 5);
  const auto bytes = bytes_of(text);
  ASSERT_EQ(bytes.size(), 5U);
  EXPECT_EQ(static_cast<const void*>(bytes.data()), static_cast<const void*>(text.data()));
  EXPECT_EQ(bytes[2], std::byte{0xff});
  EXPECT_EQ(text_of(bytes), text);
  EXPECT_TRUE(bytes_of("").empty());
  EXPECT_TRUE(text_of({}).empty());
}

TEST(BytesTest, AlignUpYieldsTheNextMultiple) {
  EXPECT_EQ(align_up(0, 4096), 0U);
  EXPECT_EQ(align_up(1, 4096), 4096U);
  EXPECT_EQ(align_up(4096, 4096), 4096U);
  EXPECT_EQ(align_up(4097, 4096), 8192U);
  EXPECT_EQ(align_up(10, 3), 12U);
  EXPECT_EQ(align_up((1ULL << 60) + 1, 4096), (1ULL << 60) + 4096);
}

TEST(BytesTest, FormatChoosesTheUnitThatFits) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(kKiB), "1.0 KiB");
  EXPECT_EQ(format_bytes(kMiB + kMiB / 2), "1.5 MiB");
  EXPECT_EQ(format_bytes(3 * kGiB + kGiB / 4), "3.25 GiB");
  EXPECT_EQ(format_bytes(std::numeric_limits<std::uint64_t>::max()), "17179869184.00 GiB");
}

}  // namespace
}  // namespace unbroken
