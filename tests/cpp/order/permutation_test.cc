#include "order/permutation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <numeric>
#include <random>
#include <vector>

namespace unbroken::order {
namespace {

Permutation permutation(std::uint64_t seed, std::uint64_t epoch, std::uint64_t samples) {
  return Permutation::make({.seed = seed, .epoch = epoch, .samples = samples}).value();
}

std::vector<std::uint64_t> whole(const Permutation& permutation) {
  std::vector<std::uint64_t> order(permutation.samples());
  permutation.fill(0, order);
  return order;
}

// How far a chi-squared statistic lies above its mean, in standard deviations.
double deviation(const std::vector<std::uint64_t>& counts, double expected, double degrees_of_freedom) {
  double sum = 0;
  for (const std::uint64_t count : counts) {
    const double difference = static_cast<double>(count) - expected;
    sum += difference * difference / expected;
  }
  return (sum - degrees_of_freedom) / std::sqrt(2 * degrees_of_freedom);
}

TEST(Permutation, TakesEverySampleOnceForEveryLengthUpTo4096) {
  for (std::uint64_t samples = 1; samples <= 4096; ++samples) {
    const Permutation order = permutation(7, samples % 5, samples);
    std::vector<char> seen(samples, 0);
    for (const std::uint64_t sample : whole(order)) {
      ASSERT_LT(sample, samples);
      ASSERT_FALSE(seen[sample]) << "sample " << sample << " of " << samples << " comes twice";
      seen[sample] = 1;
    }
  }
}

TEST(Permutation, InverseUndoesItForEveryLengthUpTo1024) {
  for (std::uint64_t samples = 1; samples <= 1024; ++samples) {
    const Permutation order = permutation(11, 3, samples);
    for (std::uint64_t place = 0; place < samples; ++place) ASSERT_EQ(order.inverse(order(place)), place);
  }
}

TEST(Permutation, InverseUndoesItForRandomLengthsUpTo2To62) {
  const auto seed = static_cast<std::uint64_t>(testing::UnitTest::GetInstance()->random_seed());
  SCOPED_TRACE(testing::Message() << "--gtest_random_seed=" << seed);
  std::mt19937_64 random(seed);
  for (int trial = 0; trial < 2000; ++trial) {
    const int bits = std::uniform_int_distribution<int>(1, 62)(random);
    const std::uint64_t samples = (random() >> (64 - bits)) + 1;
    const Permutation order = permutation(random(), random() % 1000, samples);
    for (int probe = 0; probe < 50; ++probe) {
      const std::uint64_t place = random() % samples;
      const std::uint64_t sample = order(place);
      ASSERT_LT(sample, samples);
      ASSERT_EQ(order.inverse(sample), place) << samples << " samples";
      ASSERT_EQ(order(order.inverse(place)), place) << samples << " samples";
    }
  }
}

TEST(Permutation, TakesEverySampleOnceAtPowersOfTwoAndBesideThem) {
  for (const std::uint64_t samples : {(1U << 16) - 1, 1U << 16, (1U << 16) + 1, (1U << 19) + 1, 1U << 20}) {
    std::vector<std::uint64_t> order = whole(permutation(5, 0, samples));
    std::ranges::sort(order);
    std::vector<std::uint64_t> all(samples);
    std::iota(all.begin(), all.end(), 0U);
    EXPECT_EQ(order, all);
  }
}

TEST(Permutation, FillGivesTheSameSamplesAsOneCallEach) {
  for (const std::uint64_t samples : {1U, 2U, 3U, 511U, 512U, 513U, 1025U, 100'000U}) {
    const Permutation order = permutation(3, 8, samples);
    for (std::uint64_t first : {std::uint64_t{0}, samples / 3, samples - 1}) {
      for (std::uint64_t count : {std::uint64_t{0}, std::uint64_t{1}, samples / 2, samples - first}) {
        count = std::min(count, samples - first);
        std::vector<std::uint64_t> some(count);
        order.fill(first, some);
        for (std::uint64_t i = 0; i < count; ++i) ASSERT_EQ(some[i], order(first + i)) << samples << " samples";
      }
    }
  }
}

// Recorded once. If this test fails, the order of samples of every run that was ever started has changed: that needs a
// new algorithm name in the loader's state, not new values here.
TEST(Permutation, OrderIsTheGoldenOne) {
  EXPECT_EQ(whole(permutation(0, 0, 1)), (std::vector<std::uint64_t>{0}));
  EXPECT_EQ(whole(permutation(0, 0, 10)), (std::vector<std::uint64_t>{8, 5, 1, 9, 6, 0, 2, 3, 7, 4}));
  EXPECT_EQ(whole(permutation(0, 1, 10)), (std::vector<std::uint64_t>{7, 3, 9, 8, 0, 4, 6, 5, 1, 2}));
  EXPECT_EQ(whole(permutation(1, 0, 10)), (std::vector<std::uint64_t>{0, 7, 5, 3, 9, 6, 4, 2, 8, 1}));
  EXPECT_EQ(whole(permutation(7, 3, 17)),
            (std::vector<std::uint64_t>{2, 7, 10, 16, 3, 0, 4, 9, 8, 13, 11, 14, 6, 15, 12, 1, 5}));

  struct Golden {
    std::uint64_t seed, epoch, samples;
    std::array<std::uint64_t, 3> at;  // at the first, the middle and the last place
  };
  const std::vector<Golden> golden{
      {0, 0, 65'535, {44104, 3511, 26866}},
      {0, 0, 65'536, {44104, 22120, 49872}},
      {7, 2, 65'537, {12035, 54723, 46071}},
      {7, 2, 1'000'000'007, {142771986, 569801448, 118160092}},
      {~std::uint64_t{0}, 41, std::uint64_t{1} << 40, {188334184328, 821131644244, 292975597159}},
      {12345, 99, (std::uint64_t{1} << 40) + 1, {144439913457, 735138720671, 253882873922}},
      {12345, 99, kMaxSamples, {3032367223684437263, 3227560316232493561, 1743226699683034489}},
  };
  for (const Golden& entry : golden) {
    const Permutation order = permutation(entry.seed, entry.epoch, entry.samples);
    const std::array<std::uint64_t, 3> at{order(0), order(entry.samples / 2), order(entry.samples - 1)};
    EXPECT_EQ(at, entry.at) << "seed " << entry.seed << " epoch " << entry.epoch << " samples " << entry.samples;
  }
}

TEST(Permutation, AllOrdersOfAFewSamplesAreEquallyLikelyOverSeedsAndEpochs) {
  for (const std::uint64_t samples : {2U, 3U, 4U, 5U, 6U}) {
    std::map<std::vector<std::uint64_t>, std::uint64_t> seen;
    constexpr std::uint64_t kTrials = 216'000;
    for (std::uint64_t trial = 0; trial < kTrials; ++trial) ++seen[whole(permutation(trial / 60, trial % 60, samples))];
    double orders = 1;
    for (std::uint64_t i = 2; i <= samples; ++i) orders *= static_cast<double>(i);
    ASSERT_EQ(seen.size(), static_cast<std::size_t>(orders));
    std::vector<std::uint64_t> counts;
    for (const auto& [order, count] : seen) counts.push_back(count);
    EXPECT_LT(deviation(counts, kTrials / orders, orders - 1), 5.0) << samples << " samples";
  }
}

TEST(Permutation, PairsOfPlacesTakeAllPairsOfSamplesEquallyOften) {
  for (const std::uint64_t samples : {7U, 8U, 9U, 16U, 17U, 33U}) {
    for (const auto& [a, b] : {std::pair{std::uint64_t{0}, std::uint64_t{1}}, {samples / 2, samples - 1}}) {
      std::vector<std::uint64_t> counts(samples * samples, 0);
      constexpr std::uint64_t kTrials = 200'000;
      for (std::uint64_t trial = 0; trial < kTrials; ++trial) {
        const Permutation order = permutation(trial / 100, trial % 100, samples);
        ++counts[order(a) * samples + order(b)];
      }
      std::vector<std::uint64_t> possible;
      for (std::uint64_t cell = 0; cell < counts.size(); ++cell) {
        if (cell / samples != cell % samples) possible.push_back(counts[cell]);
      }
      const auto pairs = static_cast<double>(samples * (samples - 1));
      EXPECT_LT(deviation(possible, kTrials / pairs, pairs - 1), 5.0) << samples << " samples";
    }
  }
}

// The epoch cut into 64 stretches, the dataset into 64: each stretch draws from all of the dataset alike.
TEST(Permutation, StretchesOfALongEpochDrawFromAllOfTheDataset) {
  for (const std::uint64_t samples : {(1U << 20) - 1, 1U << 20, (1U << 20) + 1}) {
    const std::vector<std::uint64_t> order = whole(permutation(1, 0, samples));
    std::vector<std::uint64_t> counts(64 * 64, 0);
    for (std::uint64_t place = 0; place < samples; ++place) {
      ++counts[place * 64 / samples * 64 + order[place] * 64 / samples];
    }
    EXPECT_LT(deviation(counts, static_cast<double>(samples) / 4096, 63 * 63), 5.0) << samples << " samples";
  }
}

// Two random orders have one place in common on average, and at the same place every difference is equally likely.
TEST(Permutation, OrdersOfNeighbouringSeedsAndEpochsAreUnrelated) {
  constexpr std::uint64_t kSamples = (1 << 16) + 1;
  const Permutation base = permutation(1000, 10, kSamples);
  std::uint64_t equal = 0;
  int others = 0;
  for (std::uint64_t bit = 0; bit < 64; ++bit) {
    for (const auto& [seed, epoch] : {std::pair{1000 ^ (std::uint64_t{1} << bit), std::uint64_t{10}},
                                      {std::uint64_t{1000}, 10 ^ (std::uint64_t{1} << bit)}}) {
      const Permutation other = permutation(seed, epoch, kSamples);
      const std::vector<std::uint64_t> one = whole(base);
      const std::vector<std::uint64_t> two = whole(other);
      std::vector<std::uint64_t> differences(64, 0);
      for (std::uint64_t place = 0; place < kSamples; ++place) {
        const std::uint64_t difference = (two[place] + kSamples - one[place]) % kSamples;
        equal += difference == 0;
        ++differences[difference * 64 / kSamples];
      }
      ++others;
      EXPECT_LT(deviation(differences, static_cast<double>(kSamples) / 64, 63), 6.0)
          << "seed " << seed << " epoch " << epoch;
    }
  }
  // Poisson with mean `others`: six standard deviations.
  EXPECT_LT(std::abs(static_cast<double>(equal) - others), 6 * std::sqrt(others));
}

// In a random order the step from one sample to the next takes every length equally often.
TEST(Permutation, StepsBetweenNeighbouringPlacesAreUniform) {
  for (const std::uint64_t samples : {65'536U, 65'537U, 1'000'000U, 1U << 20}) {
    const std::vector<std::uint64_t> order = whole(permutation(42, 0, samples));
    std::vector<std::uint64_t> steps(256, 0);
    for (std::uint64_t place = 1; place < samples; ++place) {
      ++steps[(order[place] + samples - order[place - 1]) % samples * 256 / samples];
    }
    EXPECT_LT(deviation(steps, static_cast<double>(samples) / 256, 255), 5.0) << samples << " samples";
  }
}

TEST(Permutation, RefusesNoSamplesAndTooMany) {
  const auto none = Permutation::make({.samples = 0});
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code, Code::kInvalidArgument);
  EXPECT_FALSE(Permutation::make({.samples = kMaxSamples + 1}));
}

TEST(PermutationDeathTest, IndexOutsideIsOurBug) {
  const Permutation order = permutation(0, 0, 10);
  EXPECT_DEATH(order(10), "place < samples_");
  EXPECT_DEATH(order.inverse(10), "sample < samples_");
}

}  // namespace
}  // namespace unbroken::order
