#include "base/bytes.h"

#include <fmt/core.h>

namespace unbroken {

std::string format_bytes(std::uint64_t bytes) {
  if (bytes < kKiB) return fmt::format("{} B", bytes);
  const double value = static_cast<double>(bytes);
  if (bytes < kMiB) return fmt::format("{:.1f} KiB", value / static_cast<double>(kKiB));
  if (bytes < kGiB) return fmt::format("{:.1f} MiB", value / static_cast<double>(kMiB));
  return fmt::format("{:.2f} GiB", value / static_cast<double>(kGiB));
}

}  // namespace unbroken
