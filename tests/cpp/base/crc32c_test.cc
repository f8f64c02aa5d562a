#include "base/crc32c.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/crc32c_parts.h"

namespace unbroken {
namespace {

// The definition, one bit at a time.
std::uint32_t by_definition(std::span<const std::byte> bytes) {
  std::uint32_t crc = 0xFFFFFFFF;
  for (const std::byte byte : bytes) {
    crc ^= std::to_integer<std::uint32_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82F63B78 : 0);
  }
  return ~crc;
}

std::vector<std::byte> random_bytes(std::size_t size, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(size);
  std::generate(bytes.begin(), bytes.end(), [&] { return static_cast<std::byte>(random()); });
  return bytes;
}

std::vector<std::byte> filled(std::size_t size, unsigned char value) {
  return std::vector<std::byte>(size, static_cast<std::byte>(value));
}

TEST(Crc32c, GivesTheValuesOfRfc3720) {
  EXPECT_EQ(crc32c(filled(32, 0x00)), 0x8A9136AAU);
  EXPECT_EQ(crc32c(filled(32, 0xFF)), 0x62A8AB43U);
  std::vector<unsigned char> rising(32);
  std::iota(rising.begin(), rising.end(), 0);
  EXPECT_EQ(crc32c(std::as_bytes(std::span(rising))), 0x46DD794EU);
  std::reverse(rising.begin(), rising.end());
  EXPECT_EQ(crc32c(std::as_bytes(std::span(rising))), 0x113FDB5CU);
  const unsigned char read_command[] = {0x01, 0xC0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,    0, 0, 0, 0,
                                        0x14, 0,    0, 0, 0, 0, 4, 0, 0, 0, 0, 0x14, 0, 0, 0, 0x18,
                                        0x28, 0,    0, 0, 0, 0, 0, 0, 2, 0, 0, 0,    0, 0, 0, 0};
  EXPECT_EQ(crc32c(std::as_bytes(std::span(read_command))), 0xD9963A56U);
  EXPECT_EQ(crc32c(bytes_of("123456789")), 0xE3069283U);
}

TEST(Crc32c, OfNothingIsZeroAndKeepsTheSeed) {
  EXPECT_EQ(crc32c({}), 0U);
  EXPECT_EQ(crc32c({}, 0x12345678U), 0x12345678U);
}

TEST(Crc32c, EveryWayAgreesWithTheDefinitionAtEveryLengthAndAlignment) {
  const auto bytes = random_bytes(4096, 1);
  for (std::size_t size = 0; size <= 1700; size += size < 80 ? 1 : 37) {
    for (std::size_t shift = 0; shift < 9; ++shift) {
      const auto part = std::span(bytes).subspan(shift, size);
      const std::uint32_t right = by_definition(part);
      for (const auto& way : crc32c_parts::ways()) {
        ASSERT_EQ(~way.function(0xFFFFFFFF, part.data(), part.size()), right)
            << way.name << " " << size << " " << shift;
      }
    }
  }
}

TEST(Crc32c, EveryWayAgreesAroundTheBordersOfItsLanes) {
  const auto bytes = random_bytes((std::size_t{2} << 20) + 64, 2);
  const auto& portable = crc32c_parts::ways().front();
  ASSERT_EQ(portable.name, "portable");
  for (const std::size_t lane : {std::size_t{256}, std::size_t{4096}, std::size_t{65536}}) {
    for (const std::size_t lanes : {1U, 2U, 3U, 4U, 6U, 7U}) {
      for (int off = -9; off <= 9; ++off) {
        const std::size_t size = lane * lanes + static_cast<std::size_t>(off);
        const auto part = std::span(bytes).subspan(3, size);
        const std::uint32_t right = portable.function(0xFFFFFFFF, part.data(), part.size());
        for (const auto& way : crc32c_parts::ways()) {
          ASSERT_EQ(way.function(0xFFFFFFFF, part.data(), part.size()), right) << way.name << " " << size;
        }
      }
    }
  }
}

TEST(Crc32c, OfPartsInARowIsThatOfTheWhole) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  const auto bytes = random_bytes(1 << 20, seed);
  const std::uint32_t whole = crc32c(bytes);
  for (int round = 0; round < 20; ++round) {
    std::uint32_t crc = 0;
    for (std::size_t at = 0; at < bytes.size();) {
      const std::size_t size = std::min<std::size_t>(bytes.size() - at, random() % 300000);
      crc = crc32c(std::span(bytes).subspan(at, size), crc);
      at += size;
    }
    ASSERT_EQ(crc, whole);
  }
}

TEST(Crc32c, FindsEveryFlippedBit) {
  auto bytes = random_bytes(1024, 3);
  const std::uint32_t right = crc32c(bytes);
  for (std::size_t at = 0; at < bytes.size(); ++at) {
    for (unsigned bit = 0; bit < 8; ++bit) {
      bytes[at] ^= static_cast<std::byte>(1U << bit);
      ASSERT_NE(crc32c(bytes), right) << at << "." << bit;
      bytes[at] ^= static_cast<std::byte>(1U << bit);
    }
  }
}

}  // namespace
}  // namespace unbroken
