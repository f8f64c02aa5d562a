// The order of one epoch: a keyed bijection of [0, samples), and its inverse, each index on its own.
//
// A Feistel network over the smallest power of two that holds all samples (below 2 x samples), walked until it lands
// inside: constant time on average (under two evaluations an index) and constant memory, whatever the number of
// samples. It mixes well and is no secret: it is not meant to resist an attacker. Normative definition, with all
// constants: docs/order.md; golden values: tests/cpp/order/permutation_test.cc.
// Owns a few hundred bytes. Threads: immutable, any thread. Blocks never. Errors: only make() has one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/error.h"

namespace unbroken::order {

inline constexpr std::uint64_t kMaxSamples = std::uint64_t{1} << 62;

struct PermutationOptions {
  std::uint64_t seed = 0;
  std::uint64_t epoch = 0;
  std::uint64_t samples = 0;  // 1 to kMaxSamples
};

class Permutation {
 public:
  // kInvalidArgument: no samples, or more than kMaxSamples.
  static Result<Permutation> make(const PermutationOptions& options);

  std::uint64_t samples() const { return samples_; }

  // The sample at `place` of the epoch. Requires place < samples().
  std::uint64_t operator()(std::uint64_t place) const;

  // The place at which `sample` comes. Requires sample < samples().
  std::uint64_t inverse(std::uint64_t sample) const;

  // The samples at `first`, `first` + 1, ...: as operator() for each, several times faster. Requires that
  // first + out.size() <= samples().
  void fill(std::uint64_t first, std::span<std::uint64_t> out) const;

 private:
  static constexpr std::size_t kRounds = 8;
  static constexpr int kNarrowWidth = 16;  // below it, in bits, the halves are so small that 8 rounds leave a pattern
  static constexpr std::size_t kNarrowRounds = 24;  // found by chi-squared tests of all permutations of 3 to 6 samples

  explicit Permutation(const PermutationOptions& options);

  std::uint64_t forward(std::uint64_t value) const;
  std::uint64_t backward(std::uint64_t value) const;
  template <int kLanes>
  void forward_lanes(std::uint64_t* values) const;
  void forward_block(std::span<std::uint64_t> values) const;

  std::uint64_t samples_;
  std::size_t rounds_;
  int low_bits_;  // the network's width, rounded up half of it; the high part has the rest
  std::uint64_t low_mask_;
  std::uint64_t high_mask_;
  std::array<std::uint64_t, kNarrowRounds> keys_;
};

}  // namespace unbroken::order
