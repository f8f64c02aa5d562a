// The one hash from which order and random seeds come: Stafford's variant 13 of the 64-bit finalizer, chained.
//
// Normative: docs/order.md. Another constant here is another order of samples for every run that was ever started, so
// nothing in this file may change without a new algorithm name. Pure; any thread.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace unbroken::order {

inline constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15;  // 2^64 divided by the golden ratio

// What a chain of words is hashed for. Each purpose has its own start, so that equal words give unrelated values.
enum class Purpose : std::uint64_t {
  kPermutation = 0x756e62726f6b0001,
  kSample = 0x756e62726f6b0002,
  kBatch = 0x756e62726f6b0003,
  kPython = 0x756e62726f6b0004,
  kNumpy = 0x756e62726f6b0005,
  kTorch = 0x756e62726f6b0006,
  kGenerator = 0x756e62726f6b0007,
};

// A bijection of the 64-bit words.
constexpr std::uint64_t mix64(std::uint64_t word) {
  word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9;
  word = (word ^ (word >> 27)) * 0x94d049bb133111eb;
  return word ^ (word >> 31);
}

// For a fixed hash a bijection of `word`, and for a fixed word one of `hash`.
constexpr std::uint64_t absorb(std::uint64_t hash, std::uint64_t word) { return mix64(hash ^ mix64(word + kGolden)); }

constexpr std::uint64_t hash_words(Purpose purpose, std::initializer_list<std::uint64_t> words) {
  auto hash = static_cast<std::uint64_t>(purpose);
  for (const std::uint64_t word : words) hash = absorb(hash, word);
  return hash;
}

}  // namespace unbroken::order
