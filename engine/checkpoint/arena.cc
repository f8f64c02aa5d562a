#include "checkpoint/arena.h"

#include <fmt/core.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>

#include "base/bytes.h"
#include "base/parallel.h"

namespace unbroken {
namespace {

constexpr std::size_t kHugePage = 2 * kMiB;
constexpr std::size_t kPage = 4096;

// MADV_POPULATE_WRITE (Linux 5.14) faults a range in at once; older kernels get a touch a page.
void fault_in(std::byte* data, std::size_t size) {
#ifdef MADV_POPULATE_WRITE
  if (::madvise(data, size, MADV_POPULATE_WRITE) == 0) return;
#endif
  for (std::size_t at = 0; at < size; at += kPage) *const_cast<volatile std::byte*>(data + at) = std::byte{0};
}

}  // namespace

Result<Arena> Arena::create(std::size_t bytes, int threads) {
  const std::size_t size = align_up(std::max<std::size_t>(bytes, 1), kHugePage);
  // One huge page more, so that the start can be aligned; the ends are given back.
  void* const mapped =
      ::mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) {
    return make_error(Code::kUnavailable, fmt::format("allocate {} for staging: {}", format_bytes(size),
                                                      errno_error(errno, "mmap", "memory").message));
  }
  const auto begin = reinterpret_cast<std::uintptr_t>(mapped);
  const std::uintptr_t aligned = align_up(begin, kHugePage);
  if (aligned > begin) ::munmap(mapped, aligned - begin);
  if (aligned < begin + kHugePage) ::munmap(reinterpret_cast<void*>(aligned + size), begin + kHugePage - aligned);

  Arena arena;
  arena.data_ = reinterpret_cast<std::byte*>(aligned);
  arena.size_ = size;
  arena.owner_ = ::getpid();
  ::madvise(arena.data_, size, MADV_HUGEPAGE);  // a wish: without it the arena is slower, not wrong
  if (::madvise(arena.data_, size, MADV_DONTFORK) != 0)
    return errno_error(errno, "keep out of forks", "staging memory");

  const std::size_t share = align_up(size / static_cast<std::size_t>(std::max(threads, 1)) + 1, kHugePage);
  UNBROKEN_TRY(parallel_for((size + share - 1) / share, threads, [&](std::size_t part) -> Status {
    fault_in(arena.data_ + part * share, std::min(share, size - part * share));
    return {};
  }));
  return arena;
}

Arena::~Arena() {
  if (data_ != nullptr && usable()) ::munmap(data_, size_);
}

bool Arena::usable() const { return owner_ == ::getpid(); }

}  // namespace unbroken
