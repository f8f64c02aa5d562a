#include "order/share.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace unbroken::order {
namespace {

std::string refusal(const ShareOptions& options) {
  const auto share = Share::make(options);
  return share ? "accepted" : share.error().message;
}

TEST(Share, SharesOfAllRanksAreTheBatchInTheirOrder) {
  for (std::uint32_t ranks = 1; ranks <= 9; ++ranks) {
    for (std::uint32_t micro_batches = 1; micro_batches <= 4; ++micro_batches) {
      for (std::uint64_t size = ranks * micro_batches; size <= 60; ++size) {
        const bool even = size % (ranks * micro_batches) == 0;
        for (const std::uint64_t samples : {size, size / 2, std::uint64_t{1}}) {
          std::uint64_t next = 0;
          std::uint64_t shortest = samples;
          std::uint64_t longest = 0;
          for (std::uint32_t rank = 0; rank < ranks; ++rank) {
            const Share share = Share::make({.global_batch_size = size,
                                             .ranks = ranks,
                                             .rank = rank,
                                             .micro_batches = micro_batches,
                                             .balanced = !even})
                                    .value();
            const Part whole = share.of(samples);
            ASSERT_EQ(whole.first, next);
            std::uint64_t inside = whole.first;
            for (const Part& part : share.micro_batches(samples)) {
              ASSERT_EQ(part.first, inside);
              inside += part.count;
            }
            next += whole.count;
            ASSERT_EQ(inside, next);
            shortest = std::min(shortest, whole.count);
            longest = std::max(longest, whole.count);
          }
          ASSERT_EQ(next, samples);
          ASSERT_LE(longest - shortest, even && samples == size ? 0U : 1U);
        }
      }
    }
  }
}

TEST(Share, BatchThatRanksDoNotDivideNamesTheNearestThatDo) {
  EXPECT_NE(refusal({.global_batch_size = 10, .ranks = 4}).find("8 and 12 fit"), std::string::npos);
  EXPECT_NE(refusal({.global_batch_size = 10, .ranks = 4}).find("balanced"), std::string::npos);
  EXPECT_NE(refusal({.global_batch_size = 3, .ranks = 4}).find("4 fits"), std::string::npos);
  EXPECT_NE(refusal({.global_batch_size = 10, .ranks = 4, .micro_batches = 2}).find("8 and 16 fit"), std::string::npos);
}

TEST(Share, MicroBatchesThatDoNotDivideAShareNameThoseThatDo) {
  const std::string message = refusal({.global_batch_size = 12, .ranks = 2, .micro_batches = 4});
  EXPECT_NE(message.find("micro_batches 3 and 6 fit"), std::string::npos) << message;
  EXPECT_NE(message.find("global_batch_size 8 and 16 fit"), std::string::npos) << message;
  EXPECT_NE(refusal({.global_batch_size = 4, .ranks = 2, .micro_batches = 5}).find("micro_batches 2 fits"),
            std::string::npos);
}

TEST(Share, BalancedSharesOfLessThanOneSampleAreRefused) {
  EXPECT_NE(refusal({.global_batch_size = 3, .ranks = 4, .balanced = true}).find("4 or more"), std::string::npos);
  EXPECT_EQ(refusal({.global_batch_size = 5, .ranks = 4, .balanced = true}), "accepted");
}

TEST(Share, RanksOutsideAndZeroesAreRefused) {
  EXPECT_NE(refusal({.global_batch_size = 8, .ranks = 4, .rank = 4}), "accepted");
  EXPECT_NE(refusal({.global_batch_size = 8, .ranks = 0}), "accepted");
  EXPECT_NE(refusal({.global_batch_size = 8, .micro_batches = 0}), "accepted");
  EXPECT_NE(refusal({.global_batch_size = 0}), "accepted");
}

}  // namespace
}  // namespace unbroken::order
