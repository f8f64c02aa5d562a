#include "order/schedule.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace unbroken::order {
namespace {

Schedule schedule(std::uint64_t samples, std::uint64_t global_batch_size, EpochEnd epoch_end) {
  return Schedule::make({.samples = samples, .global_batch_size = global_batch_size, .epoch_end = epoch_end}).value();
}

// How often each place of epochs [0, epochs) is taken when batches are followed from the first place on.
std::vector<std::vector<int>> times_taken(const Schedule& plan, std::uint64_t samples, std::uint64_t epochs) {
  std::vector<std::vector<int>> times(epochs, std::vector<int>(samples, 0));
  Place at = plan.settle({}).value();
  while (at.epoch < epochs) {
    const GlobalBatch batch = plan.batch_at(at);
    for (const Range& range : plan.ranges(at, 0, batch.samples)) {
      for (std::uint64_t i = 0; i < range.count && range.start.epoch < epochs; ++i) {
        ++times[range.start.epoch][range.start.offset + i];
      }
    }
    at = batch.next;
  }
  return times;
}

TEST(Schedule, WrapAndKeepTakeEveryPlaceOnceAnEpoch) {
  for (const EpochEnd epoch_end : {EpochEnd::kWrap, EpochEnd::kKeep}) {
    for (std::uint64_t samples = 1; samples <= 24; ++samples) {
      for (std::uint64_t size = 1; size <= 60; ++size) {
        const auto times = times_taken(schedule(samples, size, epoch_end), samples, 5);
        ASSERT_EQ(times, (std::vector<std::vector<int>>(5, std::vector<int>(samples, 1))))
            << samples << " samples, batches of " << size;
      }
    }
  }
}

TEST(Schedule, DropSkipsOnlyWhatDoesNotFillABatch) {
  for (std::uint64_t samples = 1; samples <= 40; ++samples) {
    for (std::uint64_t size = 1; size <= samples; ++size) {
      const auto times = times_taken(schedule(samples, size, EpochEnd::kDrop), samples, 3);
      for (const auto& epoch : times) {
        for (std::uint64_t offset = 0; offset < samples; ++offset) {
          ASSERT_EQ(epoch[offset], offset < samples / size * size ? 1 : 0)
              << samples << " samples, batches of " << size;
        }
      }
    }
  }
}

TEST(Schedule, WrappedBatchBelongsToTheEpochInWhichItStarts) {
  const Schedule plan = schedule(10, 4, EpochEnd::kWrap);
  const Place last{.epoch = 2, .offset = 8};
  EXPECT_EQ(plan.ranges(last, 0, 4), (std::vector<Range>{{{2, 8}, 2}, {{3, 0}, 2}}));
  EXPECT_EQ(plan.batch_at(last).next, (Place{.epoch = 3, .offset = 2}));
  EXPECT_EQ(plan.batches_left(last), 1U);
}

TEST(Schedule, WrappedBatchLargerThanTheDatasetGoesOverSeveralEpochs) {
  const Schedule plan = schedule(3, 7, EpochEnd::kWrap);
  EXPECT_EQ(plan.ranges({.epoch = 0, .offset = 0}, 0, 7), (std::vector<Range>{{{0, 0}, 3}, {{1, 0}, 3}, {{2, 0}, 1}}));
  EXPECT_EQ(plan.ranges({.epoch = 0, .offset = 0}, 4, 3), (std::vector<Range>{{{1, 1}, 2}, {{2, 0}, 1}}));
  EXPECT_EQ(plan.batch_at({}).next, (Place{.epoch = 2, .offset = 1}));
}

TEST(Schedule, LastBatchOfAKeptEpochIsShort) {
  const Schedule plan = schedule(10, 4, EpochEnd::kKeep);
  const GlobalBatch last = plan.batch_at({.epoch = 1, .offset = 8});
  EXPECT_EQ(last.samples, 2U);
  EXPECT_EQ(last.next, (Place{.epoch = 2, .offset = 0}));
}

TEST(Schedule, BatchesAreAsManyAsFollowingThemGives) {
  for (const EpochEnd epoch_end : {EpochEnd::kDrop, EpochEnd::kWrap, EpochEnd::kKeep}) {
    for (std::uint64_t samples = 1; samples <= 24; ++samples) {
      for (std::uint64_t size = 1; size <= (epoch_end == EpochEnd::kDrop ? samples : 40); ++size) {
        const Schedule plan = schedule(samples, size, epoch_end);
        for (std::uint64_t offset = 0; offset <= samples; ++offset) {
          const Place start = plan.settle({.epoch = 4, .offset = offset}).value();
          std::uint64_t batches = 0;
          for (Place at = start; at.epoch == start.epoch; at = plan.batch_at(at).next) ++batches;
          ASSERT_EQ(plan.batches_left(start), batches)
              << samples << " samples, batches of " << size << " from " << offset;
        }
      }
    }
  }
}

TEST(Schedule, PlaceAtWhichNoBatchStartsIsTheNextEpochs) {
  const Place next{.epoch = 6, .offset = 0};
  EXPECT_EQ(schedule(10, 4, EpochEnd::kDrop).settle({.epoch = 5, .offset = 7}).value(), next);
  EXPECT_EQ(schedule(10, 4, EpochEnd::kKeep).settle({.epoch = 5, .offset = 10}).value(), next);
  EXPECT_EQ(schedule(10, 4, EpochEnd::kWrap).settle({.epoch = 5, .offset = 10}).value(), next);
  const Place same{.epoch = 5, .offset = 6};
  EXPECT_EQ(schedule(10, 4, EpochEnd::kDrop).settle(same).value(), same);
}

TEST(Schedule, PlaceOfAnotherDatasetIsRefused) {
  const auto settled = schedule(10, 4, EpochEnd::kDrop).settle({.epoch = 0, .offset = 11});
  ASSERT_FALSE(settled);
  EXPECT_EQ(settled.error().code, Code::kInvalidArgument);
  EXPECT_FALSE(schedule(10, 4, EpochEnd::kDrop).settle({.epoch = ~std::uint64_t{0}, .offset = 0}));
}

TEST(Schedule, DropOfFewerSamplesThanOneBatchIsRefusedWithRemedies) {
  const auto plan = Schedule::make({.samples = 10, .global_batch_size = 12, .epoch_end = EpochEnd::kDrop});
  ASSERT_FALSE(plan);
  for (const char* part : {"10 samples", "batch of 12", "\"wrap\"", "\"keep\""}) {
    EXPECT_NE(plan.error().message.find(part), std::string::npos) << plan.error().message;
  }
}

TEST(Schedule, EmptyDatasetAndEmptyBatchAreRefused) {
  EXPECT_FALSE(Schedule::make({.samples = 0, .global_batch_size = 1, .epoch_end = EpochEnd::kWrap}));
  EXPECT_FALSE(Schedule::make({.samples = 1, .global_batch_size = 0, .epoch_end = EpochEnd::kWrap}));
}

TEST(Schedule, EpochEndsHaveThreeNames) {
  EXPECT_EQ(parse_epoch_end("drop").value(), EpochEnd::kDrop);
  EXPECT_EQ(parse_epoch_end("wrap").value(), EpochEnd::kWrap);
  EXPECT_EQ(parse_epoch_end("keep").value(), EpochEnd::kKeep);
  EXPECT_FALSE(parse_epoch_end("Drop"));
}

}  // namespace
}  // namespace unbroken::order
