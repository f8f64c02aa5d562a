// Which part of a global batch one data-parallel rank takes, and how it is split into micro-batches.
//
// Shares are neighbouring places, in the order of ranks; together they are the batch, each place once. Owns nothing.
// Threads: immutable, any thread. Errors: kInvalidArgument from make(), naming what fits.
#pragma once

#include <cstdint>
#include <vector>

#include "base/error.h"

namespace unbroken::order {

struct ShareOptions {
  std::uint64_t global_batch_size = 0;
  std::uint32_t ranks = 1;  // data-parallel ranks: peers that hold parts of one model replica count once
  std::uint32_t rank = 0;
  std::uint32_t micro_batches = 1;
  bool balanced = false;  // shares may differ by one sample, and so may micro-batches
};

// Places of a global batch, counted from its start.
struct Part {
  std::uint64_t first = 0;
  std::uint64_t count = 0;
  friend bool operator==(const Part&, const Part&) = default;
};

class Share {
 public:
  // Unless balanced, ranks x micro_batches must divide the batch. Balanced, it must not exceed it.
  static Result<Share> make(const ShareOptions& options);

  // This rank's part of a batch of `samples`: the global batch size, or fewer at the end of a kept epoch; then parts
  // differ by at most one and may be empty.
  Part of(std::uint64_t samples) const;

  // The same part, cut into micro-batches.
  std::vector<Part> micro_batches(std::uint64_t samples) const;

 private:
  explicit Share(const ShareOptions& options) : options_(options) {}

  ShareOptions options_;
};

}  // namespace unbroken::order
