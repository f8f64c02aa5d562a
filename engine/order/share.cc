#include "order/share.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>

namespace unbroken::order {
namespace {

// Part `index` of `whole` cut into `parts`, the longer ones first.
Part cut(const Part& whole, std::uint64_t parts, std::uint64_t index) {
  const std::uint64_t length = whole.count / parts;
  const std::uint64_t longer = whole.count % parts;
  return {.first = whole.first + index * length + std::min(index, longer), .count = length + (index < longer)};
}

// "8 and 12 fit": the multiples of `unit` around `size`, which is none.
std::string multiples_around(std::uint64_t size, std::uint64_t unit) {
  const std::uint64_t below = size / unit * unit;
  if (below == 0) return fmt::format("{} fits", unit);
  return fmt::format("{} and {} fit", below, below + unit);
}

// "2 and 3 fit": the divisors of `share` around `parts`, which is none.
std::string divisors_around(std::uint64_t share, std::uint64_t parts) {
  constexpr std::uint64_t kMost = 65536;  // nobody has more micro-batches, and the search must end
  std::uint64_t below = std::min(parts, share);
  while (share % below != 0) --below;
  for (std::uint64_t above = parts + 1; above <= std::min(share, kMost); ++above) {
    if (share % above == 0) return fmt::format("{} and {} fit", below, above);
  }
  return fmt::format("{} fits", below);
}

Status check_even(const ShareOptions& options) {
  const std::uint64_t size = options.global_batch_size;
  const std::uint64_t unit = std::uint64_t{options.ranks} * options.micro_batches;
  if (size % options.ranks != 0) {
    return make_error(
        Code::kInvalidArgument,
        fmt::format("share a global batch of {} samples over {} data-parallel ranks: every rank must get the same "
                    "number; global_batch_size {}{}, or uneven=\"balanced\" lets shares differ by one",
                    size, options.ranks, multiples_around(size, unit),
                    options.micro_batches > 1 ? fmt::format(" (with {} micro-batches)", options.micro_batches) : ""));
  }
  const std::uint64_t share = size / options.ranks;
  if (share % options.micro_batches != 0) {
    return make_error(
        Code::kInvalidArgument,
        fmt::format("split a rank's {} samples of a global batch into {} micro-batches: all must have the same number; "
                    "micro_batches {}, or global_batch_size {}",
                    share, options.micro_batches, divisors_around(share, options.micro_batches),
                    multiples_around(size, unit)));
  }
  return {};
}

}  // namespace

Result<Share> Share::make(const ShareOptions& options) {
  if (options.ranks == 0 || options.rank >= options.ranks) {
    return make_error(Code::kInvalidArgument,
                      fmt::format("data-parallel rank {} of {}: ranks count from 0 and are fewer than their number",
                                  options.rank, options.ranks));
  }
  if (options.micro_batches == 0) {
    return make_error(Code::kInvalidArgument, "micro_batches 0: it must be 1 or more");
  }
  if (options.global_batch_size == 0) {
    return make_error(Code::kInvalidArgument, "global_batch_size 0: it must be 1 or more");
  }
  if (options.balanced) {
    const std::uint64_t unit = std::uint64_t{options.ranks} * options.micro_batches;
    if (options.global_batch_size < unit) {
      return make_error(
          Code::kInvalidArgument,
          fmt::format("share a global batch of {} samples over {} data-parallel ranks in {} micro-batches: "
                      "some would get none; global_batch_size must be {} or more",
                      options.global_batch_size, options.ranks, options.micro_batches, unit));
    }
  } else {
    UNBROKEN_TRY(check_even(options));
  }
  return Share(options);
}

Part Share::of(std::uint64_t samples) const {
  return cut({.first = 0, .count = samples}, options_.ranks, options_.rank);
}

std::vector<Part> Share::micro_batches(std::uint64_t samples) const {
  const Part whole = of(samples);
  std::vector<Part> parts;
  for (std::uint32_t index = 0; index < options_.micro_batches; ++index) {
    parts.push_back(cut(whole, options_.micro_batches, index));
  }
  return parts;
}

}  // namespace unbroken::order
