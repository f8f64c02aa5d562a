// Seeds for random numbers, as functions of what they are for: never of a worker, a rank or a moment.
//
// Normative: docs/order.md. Pure; any thread; no errors.
#pragma once

#include <cstdint>

namespace unbroken::order {

struct SampleKey {
  std::uint64_t seed = 0;
  std::uint64_t epoch = 0;
  std::uint64_t sample = 0;  // the index in the dataset, not the place in the epoch
};

struct BatchKey {
  std::uint64_t seed = 0;
  std::uint64_t epoch = 0;
  std::uint64_t offset = 0;  // the place at which the global batch starts
  std::uint64_t share = 0;   // rank x micro_batches + micro-batch
};

// One seed for each generator: equal or neighbouring seeds in generators of one family give correlated streams.
struct RandomSeeds {
  std::uint64_t python = 0;
  std::uint64_t numpy = 0;
  std::uint64_t torch = 0;
  std::uint64_t generator = 0;  // the one that is handed to the transform
};

std::uint64_t sample_seed(const SampleKey& key);
std::uint64_t batch_seed(const BatchKey& key);
RandomSeeds random_seeds(std::uint64_t base);

}  // namespace unbroken::order
