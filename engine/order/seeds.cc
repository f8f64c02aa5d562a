#include "order/seeds.h"

#include "order/hash.h"

namespace unbroken::order {

std::uint64_t sample_seed(const SampleKey& key) {
  return hash_words(Purpose::kSample, {key.seed, key.epoch, key.sample});
}

std::uint64_t batch_seed(const BatchKey& key) {
  return hash_words(Purpose::kBatch, {key.seed, key.epoch, key.offset, key.share});
}

RandomSeeds random_seeds(std::uint64_t base) {
  return {
      .python = hash_words(Purpose::kPython, {base}),
      .numpy = hash_words(Purpose::kNumpy, {base}),
      .torch = hash_words(Purpose::kTorch, {base}),
      .generator = hash_words(Purpose::kGenerator, {base}),
  };
}

}  // namespace unbroken::order
