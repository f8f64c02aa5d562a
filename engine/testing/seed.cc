#include "testing/seed.h"

#include <cstdio>
#include <cstdlib>
#include <random>

namespace unbroken {

std::uint64_t test_seed() {
  static const std::uint64_t seed = [] {
    const char* const given = std::getenv("UNBROKEN_SEED");
    const std::uint64_t drawn = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
    std::printf("UNBROKEN_SEED=%llu\n", static_cast<unsigned long long>(drawn));
    std::fflush(stdout);
    return drawn;
  }();
  return seed;
}

}  // namespace unbroken
