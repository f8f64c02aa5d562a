#include "store/ranges.h"

#include <fmt/core.h>

#include <cstdint>
#include <limits>

#include "store/store.h"

namespace unbroken {

bool is_aligned(std::uint64_t offset, const std::byte* address, std::size_t length) {
  return (offset | reinterpret_cast<std::uintptr_t>(address) | length) % kDirectAlignment == 0;
}

Status check_range(std::string_view action, std::string_view path, std::uint64_t offset, std::size_t length) {
  constexpr auto kEnd = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  if (length <= kEnd && offset <= kEnd - length) return {};
  return make_error(Code::kInvalidArgument,
                    fmt::format("{} {}: {} bytes at offset {} end past 2^63 - 1", action, path, length, offset));
}

Error ends_early(std::string_view path, std::uint64_t wanted, std::uint64_t end) {
  return make_error(Code::kDamaged,
                    fmt::format("read {}: it ends at byte {}, but bytes up to {} were expected", path, end, wanted));
}

Result<std::size_t> bytes_to_read(std::string_view path, bool direct, std::uint64_t size, std::uint64_t offset,
                                  std::span<const std::byte> into) {
  UNBROKEN_TRY(check_range("read", path, offset, into.size()));
  if (direct && !is_aligned(offset, into.data(), into.size())) {
    return make_error(
        Code::kInvalidArgument,
        fmt::format("read {}: a direct read needs address, offset ({}) and length ({}) in multiples of {}", path,
                    offset, into.size(), kDirectAlignment));
  }
  const std::uint64_t left = size > offset ? size - offset : 0;
  if (into.size() <= left) return into.size();
  if (direct && left > 0 && into.size() - left < kDirectAlignment) return static_cast<std::size_t>(left);
  return ends_early(path, offset + into.size(), size);
}

}  // namespace unbroken
