// Where global batches begin and end: a function of a place, the number of samples, and the batch size.
//
// A place is (epoch, offset): the next sample is the one that the epoch's permutation has at `offset`. A global batch
// is the next `global_batch_size` places, whoever takes them; nothing here depends on ranks or workers. A count of
// batches does not tell the place (`drop` skips samples, and the batch size may change between two starts), so the
// place itself is what is stored. Owns nothing. Threads: immutable, any thread. Errors: kInvalidArgument, never worth a
// retry.
#pragma once

#include <compare>
#include <cstdint>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace unbroken::order {

// What happens to the samples at the end of an epoch that do not fill a global batch.
enum class EpochEnd {
  kDrop,  // skipped: the next batch starts the next epoch; fewer samples than one batch are an error
  kWrap,  // the batch is filled up from the next epoch (or epochs) and belongs to the one in which it starts
  kKeep,  // they are a short batch, for evaluation
};

// "drop", "wrap" or "keep"; kInvalidArgument for anything else.
Result<EpochEnd> parse_epoch_end(std::string_view name);

struct Place {
  std::uint64_t epoch = 0;
  std::uint64_t offset = 0;
  friend auto operator<=>(const Place&, const Place&) = default;
};

// Neighbouring places of one epoch.
struct Range {
  Place start;
  std::uint64_t count = 0;
  friend bool operator==(const Range&, const Range&) = default;
};

struct GlobalBatch {
  std::uint64_t samples = 0;  // the global batch size, less only for the last batch of a kept epoch
  Place next;                 // where the batch after it starts
};

struct ScheduleOptions {
  std::uint64_t samples = 0;
  std::uint64_t global_batch_size = 0;
  EpochEnd epoch_end = EpochEnd::kDrop;
};

class Schedule {
 public:
  static constexpr std::uint64_t kMaxEpoch = std::uint64_t{1} << 62;

  static Result<Schedule> make(const ScheduleOptions& options);

  // The place at which the next batch starts: `place`, or the next epoch's first where no batch starts at `place` any
  // more. An error where `place` is not one of this dataset's.
  Result<Place> settle(Place place) const;

  // The batch that starts at `start`, which is settled.
  GlobalBatch batch_at(Place start) const;

  // The `count` places that follow the first `skip` after `start`, in order, as ranges; across epochs.
  std::vector<Range> ranges(Place start, std::uint64_t skip, std::uint64_t count) const;

  // Batches that start in an epoch begun at offset 0; with kWrap an epoch that is begun later may have one fewer.
  std::uint64_t batches_per_epoch() const;

  // Batches that start in the epoch of `start`, which is settled, from there on: at least one.
  std::uint64_t batches_left(Place start) const;

 private:
  explicit Schedule(const ScheduleOptions& options) : options_(options) {}

  ScheduleOptions options_;
};

}  // namespace unbroken::order
