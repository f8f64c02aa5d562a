// Rules on the byte ranges of objects that all drivers share. Pure functions; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/error.h"

namespace unbroken {

// Offset, address and length are multiples of kDirectAlignment (address may be null: not looked at).
bool is_aligned(std::uint64_t offset, const std::byte* address, std::size_t length);

// Offsets up to 2^63 - 1 exist. kInvalidArgument.
Status check_range(std::string_view action, std::string_view path, std::uint64_t offset, std::size_t length);

// How many bytes a read of `into` at `offset` of an object of `size` bytes has to bring. Direct reads must be aligned
// (kInvalidArgument), and may reach past the end by less than kDirectAlignment; then what is past it stays as it is.
// Otherwise an object that ends too early is kDamaged.
Result<std::size_t> bytes_to_read(std::string_view path, bool direct, std::uint64_t size, std::uint64_t offset,
                                  std::span<const std::byte> into);

// kDamaged: bytes up to `wanted` were asked for.
Error ends_early(std::string_view path, std::uint64_t wanted, std::uint64_t end);

}  // namespace unbroken
