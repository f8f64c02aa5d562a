// CRC32C (Castagnoli, reflected polynomial 0x82F63B78, initial value and final XOR 0xFFFFFFFF; RFC 3720, B.4).
// Uses the processor's instruction where there is one. Pure; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace unbroken {

// The CRC of `bytes` when `seed` is the CRC of what came before them (0: nothing).
std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t seed = 0);

}  // namespace unbroken
