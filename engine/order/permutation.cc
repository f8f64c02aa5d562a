// The network, as docs/order.md defines it:
// 1. A value of `width` bits is split into a low part (width / 2 bits, rounded up) and a high part.
// 2. Rounds come in pairs: the low part is XORed with a keyed function of the high part, then the high part with one of
//    the low part. Each is its own inverse, so the pair is a bijection whatever the function and the widths.
// 3. A result outside [0, samples) goes in again. The network is a permutation of the power of two, so following the
//    cycle of an index that is inside returns inside, and two indices never meet.
#include "order/permutation.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "order/hash.h"

namespace unbroken::order {
namespace {

constexpr std::uint64_t round_function(std::uint64_t half, std::uint64_t key) {
  std::uint64_t word = (half ^ key) * 0xbf58476d1ce4e5b9;
  word = (word ^ (word >> 32)) * 0x94d049bb133111eb;
  return word >> 32;
}

}  // namespace

Result<Permutation> Permutation::make(const PermutationOptions& options) {
  if (options.samples == 0) {
    return make_error(Code::kInvalidArgument, "make the order of an epoch: the dataset has no samples");
  }
  if (options.samples > kMaxSamples) {
    return make_error(
        Code::kInvalidArgument,
        fmt::format("make the order of an epoch: {} samples; at most {} are supported", options.samples, kMaxSamples));
  }
  return Permutation(options);
}

Permutation::Permutation(const PermutationOptions& options) : samples_(options.samples) {
  const auto width = static_cast<int>(std::bit_width(samples_ - 1));
  const int high_bits = width / 2;
  low_bits_ = width - high_bits;
  low_mask_ = (std::uint64_t{1} << low_bits_) - 1;
  high_mask_ = (std::uint64_t{1} << high_bits) - 1;
  rounds_ = width < kNarrowWidth ? kNarrowRounds : kRounds;

  std::uint64_t state = hash_words(Purpose::kPermutation, {options.seed, options.epoch});
  for (std::uint64_t& key : keys_) {
    state += kGolden;
    key = mix64(state);
  }
}

std::uint64_t Permutation::forward(std::uint64_t value) const {
  forward_lanes<1>(&value);
  return value;
}

std::uint64_t Permutation::backward(std::uint64_t value) const {
  std::uint64_t low = value & low_mask_;
  std::uint64_t high = value >> low_bits_;
  for (std::size_t round = rounds_; round > 0; round -= 2) {
    high ^= round_function(low, keys_[round - 1]) & high_mask_;
    low ^= round_function(high, keys_[round - 2]) & low_mask_;
  }
  return high << low_bits_ | low;
}

std::uint64_t Permutation::operator()(std::uint64_t place) const {
  UNBROKEN_ASSERT(place < samples_);
  std::uint64_t value = place;
  do value = forward(value);
  while (value >= samples_);
  return value;
}

std::uint64_t Permutation::inverse(std::uint64_t sample) const {
  UNBROKEN_ASSERT(sample < samples_);
  std::uint64_t value = sample;
  do value = backward(value);
  while (value >= samples_);
  return value;
}

// Lanes advance together, round by round: one value's rounds depend on each other, and a processor that has only them
// waits for each multiplication. Unrolled by word: as loops, which is what -O2 leaves, they take twice as long.
template <int kLanes>
inline void Permutation::forward_lanes(std::uint64_t* values) const {
  std::uint64_t low[kLanes];
  std::uint64_t high[kLanes];
#pragma GCC unroll 4
  for (int lane = 0; lane < kLanes; ++lane) {
    low[lane] = values[lane] & low_mask_;
    high[lane] = values[lane] >> low_bits_;
  }
  for (std::size_t round = 0; round < rounds_; round += 2) {
    const std::uint64_t first = keys_[round];
    const std::uint64_t second = keys_[round + 1];
#pragma GCC unroll 4
    for (int lane = 0; lane < kLanes; ++lane) low[lane] ^= round_function(high[lane], first) & low_mask_;
#pragma GCC unroll 4
    for (int lane = 0; lane < kLanes; ++lane) high[lane] ^= round_function(low[lane], second) & high_mask_;
  }
#pragma GCC unroll 4
  for (int lane = 0; lane < kLanes; ++lane) values[lane] = high[lane] << low_bits_ | low[lane];
}

void Permutation::forward_block(std::span<std::uint64_t> values) const {
  constexpr std::size_t kLanes = 4;
  std::size_t done = 0;
  for (; done + kLanes <= values.size(); done += kLanes) forward_lanes<kLanes>(&values[done]);
  for (; done < values.size(); ++done) values[done] = forward(values[done]);
}

void Permutation::fill(std::uint64_t first, std::span<std::uint64_t> out) const {
  UNBROKEN_ASSERT(first <= samples_ && out.size() <= samples_ - first);
  constexpr std::size_t kBlock = 512;
  std::array<std::uint32_t, kBlock> outside;  // which of the block's values must go in again
  std::array<std::uint64_t, kBlock> again;
  for (std::size_t start = 0; start < out.size(); start += kBlock) {
    const std::span<std::uint64_t> block = out.subspan(start, std::min(kBlock, out.size() - start));
    for (std::size_t i = 0; i < block.size(); ++i) block[i] = first + start + i;
    forward_block(block);

    // At samples = 2^k + 1 half of the values land outside, by chance: collecting them without a branch and sending
    // them in together keeps the lanes full and predicts nothing.
    std::size_t left = 0;
    for (std::size_t i = 0; i < block.size(); ++i) {
      outside[left] = static_cast<std::uint32_t>(i);
      left += block[i] >= samples_;
    }
    while (left > 0) {
      for (std::size_t i = 0; i < left; ++i) again[i] = block[outside[i]];
      forward_block(std::span(again.data(), left));
      std::size_t still = 0;
      for (std::size_t i = 0; i < left; ++i) {
        const std::uint32_t position = outside[i];
        block[position] = again[i];
        outside[still] = position;
        still += again[i] >= samples_;
      }
      left = still;
    }
  }
}

}  // namespace unbroken::order
