#include "order/seeds.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <set>

namespace unbroken::order {
namespace {

// Recorded once. If this test fails, every augmentation of every run that was ever started has changed.
TEST(Seeds, AreTheGoldenOnes) {
  EXPECT_EQ(sample_seed({.seed = 0, .epoch = 0, .sample = 0}), 9487822771354856688U);
  EXPECT_EQ(sample_seed({.seed = 7, .epoch = 3, .sample = 1796}), 9200745362307541903U);
  EXPECT_EQ(batch_seed({.seed = 0, .epoch = 0, .offset = 0, .share = 0}), 16575802178264138957U);
  EXPECT_EQ(batch_seed({.seed = 7, .epoch = 3, .offset = 96, .share = 1}), 4972248976672132520U);
  const RandomSeeds seeds = random_seeds(1);
  EXPECT_EQ(seeds.python, 16573348927297154920U);
  EXPECT_EQ(seeds.numpy, 9166427862556075031U);
  EXPECT_EQ(seeds.torch, 7473480165774767083U);
  EXPECT_EQ(seeds.generator, 6515680860204800110U);
}

TEST(Seeds, NoTwoSamplesOrEpochsOrSeedsShareOne) {
  std::set<std::uint64_t> seen;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    for (std::uint64_t epoch = 0; epoch < 20; ++epoch) {
      for (std::uint64_t sample = 0; sample < 500; ++sample) {
        ASSERT_TRUE(seen.insert(sample_seed({.seed = seed, .epoch = epoch, .sample = sample})).second);
      }
    }
  }
}

TEST(Seeds, GeneratorsOfOneSampleGetUnequalSeedsInTheirLow32Bits) {
  // torch's and numpy's Mersenne twisters use few bits of a seed, so the low half alone must differ.
  for (std::uint64_t sample = 0; sample < 1000; ++sample) {
    const RandomSeeds seeds = random_seeds(sample_seed({.seed = 1, .epoch = 0, .sample = sample}));
    const std::set<std::uint32_t> low{static_cast<std::uint32_t>(seeds.python), static_cast<std::uint32_t>(seeds.numpy),
                                      static_cast<std::uint32_t>(seeds.torch),
                                      static_cast<std::uint32_t>(seeds.generator)};
    EXPECT_EQ(low.size(), 4U);
  }
}

TEST(Seeds, OneBitOfAnyInputChangesHalfOfTheOutput) {
  std::uint64_t changed = 0;
  std::uint64_t pairs = 0;
  for (std::uint64_t bit = 0; bit < 64; ++bit) {
    const std::uint64_t flip = std::uint64_t{1} << bit;
    for (std::uint64_t base = 0; base < 32; ++base) {
      const std::uint64_t seed = sample_seed({.seed = base, .epoch = base, .sample = base});
      for (const SampleKey& key : {SampleKey{base ^ flip, base, base}, SampleKey{base, base ^ flip, base},
                                   SampleKey{base, base, base ^ flip}}) {
        changed += static_cast<std::uint64_t>(std::popcount(seed ^ sample_seed(key)));
        ++pairs;
      }
    }
  }
  EXPECT_NEAR(static_cast<double>(changed) / static_cast<double>(pairs), 32.0, 0.3);
}

TEST(Seeds, SharesOfABatchAndASampleOfTheSameNumbersDiffer) {
  std::set<std::uint64_t> seen{sample_seed({.seed = 1, .epoch = 2, .sample = 3})};
  for (std::uint64_t offset : {0U, 3U, 96U}) {
    for (std::uint64_t share = 0; share < 64; ++share) {
      EXPECT_TRUE(seen.insert(batch_seed({.seed = 1, .epoch = 2, .offset = offset, .share = share})).second);
    }
  }
}

}  // namespace
}  // namespace unbroken::order
