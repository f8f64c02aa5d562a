// Memory for staging: allocated, pre-faulted and kept once, so that a save never pays for page faults (fresh memory
// costs about nine times a memcpy).
//
// Anonymous private memory with huge pages where they are to be had (MADV_HUGEPAGE), kept out of forked children
// (MADV_DONTFORK: a forked loader worker would otherwise turn every later copy into page faults, and direct I/O on
// private memory across a fork is unsafe). Address and size are multiples of 2 MiB.
// Threads: the memory is the caller's to share. It belongs to the process that made it: usable() is false in a child.
// Errors: kUnavailable when the memory is not to be had, with the size. Crash: nothing is left.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <span>

#include "base/error.h"

namespace unbroken {

class Arena {
 public:
  Arena() = default;
  Arena(Arena&& other) noexcept { swap(other); }
  Arena& operator=(Arena&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Arena();

  // At least `bytes`, zeroed, faulted in by `threads` threads.
  static Result<Arena> create(std::size_t bytes, int threads);

  std::span<std::byte> bytes() const { return {data_, size_}; }
  bool usable() const;

 private:
  void swap(Arena& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(owner_, other.owner_);
  }

  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  pid_t owner_ = 0;
};

}  // namespace unbroken
