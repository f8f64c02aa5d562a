#include "order/schedule.h"

#include <fmt/format.h>

#include <algorithm>

#include "order/permutation.h"

namespace unbroken::order {

Result<EpochEnd> parse_epoch_end(std::string_view name) {
  if (name == "drop") return EpochEnd::kDrop;
  if (name == "wrap") return EpochEnd::kWrap;
  if (name == "keep") return EpochEnd::kKeep;
  return make_error(Code::kInvalidArgument,
                    fmt::format("epoch_end {:?}: it must be \"drop\", \"wrap\" or \"keep\"", name));
}

Result<Schedule> Schedule::make(const ScheduleOptions& options) {
  if (options.samples == 0) {
    return make_error(Code::kInvalidArgument, "plan an epoch: the dataset has no samples");
  }
  if (options.samples > kMaxSamples) {
    return make_error(Code::kInvalidArgument,
                      fmt::format("plan an epoch: {} samples; at most {} are supported", options.samples, kMaxSamples));
  }
  if (options.global_batch_size == 0 || options.global_batch_size > kMaxSamples) {
    return make_error(Code::kInvalidArgument, fmt::format("plan an epoch: global_batch_size {}; it must be 1 or more",
                                                          options.global_batch_size));
  }
  if (options.epoch_end == EpochEnd::kDrop && options.samples < options.global_batch_size) {
    return make_error(
        Code::kInvalidArgument,
        fmt::format(
            "plan an epoch: the dataset has {0} samples, fewer than one global batch of {1}, and "
            "epoch_end=\"drop\" would skip them all; make global_batch_size {0} or less, or use \"wrap\" to fill "
            "a batch from the next epoch, or \"keep\" for a short batch",
            options.samples, options.global_batch_size));
  }
  return Schedule(options);
}

Result<Place> Schedule::settle(Place place) const {
  if (place.offset > options_.samples || place.epoch > kMaxEpoch) {
    return make_error(Code::kInvalidArgument,
                      fmt::format("place (epoch {}, offset {}) is not one of a dataset of {} samples", place.epoch,
                                  place.offset, options_.samples));
  }
  const std::uint64_t left = options_.samples - place.offset;
  const std::uint64_t needed = options_.epoch_end == EpochEnd::kDrop ? options_.global_batch_size : 1;
  return left >= needed ? place : Place{.epoch = place.epoch + 1, .offset = 0};
}

GlobalBatch Schedule::batch_at(Place start) const {
  UNBROKEN_ASSERT(start.offset < options_.samples);
  const std::uint64_t left = options_.samples - start.offset;
  const bool is_short = options_.epoch_end == EpochEnd::kKeep && left < options_.global_batch_size;
  const std::uint64_t count = is_short ? left : options_.global_batch_size;
  const std::uint64_t end = start.offset + count;
  const bool over = end >= options_.samples;
  const Place next = over ? Place{.epoch = start.epoch + end / options_.samples, .offset = end % options_.samples}
                          : Place{.epoch = start.epoch, .offset = end};
  return {.samples = count, .next = settle(next).value()};
}

std::vector<Range> Schedule::ranges(Place start, std::uint64_t skip, std::uint64_t count) const {
  std::vector<Range> result;
  const std::uint64_t position = start.offset + skip;
  Place at{.epoch = start.epoch + position / options_.samples, .offset = position % options_.samples};
  while (count > 0) {
    const std::uint64_t here = std::min(count, options_.samples - at.offset);
    result.push_back({.start = at, .count = here});
    count -= here;
    at = {.epoch = at.epoch + 1, .offset = 0};
  }
  return result;
}

std::uint64_t Schedule::batches_per_epoch() const { return batches_left({}); }

std::uint64_t Schedule::batches_left(Place start) const {
  const std::uint64_t left = options_.samples - start.offset;
  const std::uint64_t size = options_.global_batch_size;
  return options_.epoch_end == EpochEnd::kDrop ? left / size : (left + size - 1) / size;
}

}  // namespace unbroken::order
