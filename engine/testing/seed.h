// The seed of randomised tests: UNBROKEN_SEED where it is set, chance otherwise. It is printed once, so that a failure
// can be repeated.
#pragma once

#include <cstdint>

namespace unbroken {

std::uint64_t test_seed();

}  // namespace unbroken
