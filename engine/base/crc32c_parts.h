// The ways in which crc32c() can be computed, for its dispatch and for the test that compares them. Private to base.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace unbroken::crc32c_parts {

// Takes and gives the raw register: without the initial value and the final XOR.
using Function = std::uint32_t (*)(std::uint32_t state, const std::byte* data, std::size_t size);

struct Way {
  std::string_view name;
  Function function;
};

// The ways that this processor can go, slowest first; the last one is what crc32c() uses.
std::span<const Way> ways();

}  // namespace unbroken::crc32c_parts
