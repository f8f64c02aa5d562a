// System calls of the posix driver: descriptors that close themselves, calls that go on after a signal, and opening
// beneath a root. Everything here answers with errno; the store makes messages of it. Any thread.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <expected>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace unbroken::posix {

template <class T>
using Tried = std::expected<T, int>;  // the int is an errno

class Fd {
 public:
  Fd() = default;
  explicit Fd(int number) : number_(number) {}
  Fd(Fd&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Fd() { static_cast<void>(close()); }

  int get() const { return number_; }
  explicit operator bool() const { return number_ >= 0; }
  // Closes now; 0 or errno. (Linux frees the descriptor whatever close() answers, so it is never repeated.)
  int close();
  void release() { number_ = -1; }

 private:
  int number_ = -1;
};

bool interrupted();
// Runs `call` (which answers -1 and errno on failure) again while a signal interrupts it.
template <class Call>
auto uninterrupted(Call call) {
  for (;;) {
    const auto answer = call();
    if (answer != -1 || !interrupted()) return answer;
  }
}

// 0 or errno.
int write_all(int fd, std::uint64_t offset, std::span<const std::byte> bytes);
int sync_data(int fd);
int sync_all(int fd);
// Makes a directory's entries durable. File systems that know no such thing (EINVAL) are content.
int sync_directory_fd(int fd);

// Whether most of the range is in the page cache. Of files that the user neither owns nor may write the kernel says so,
// too; and so does this where it cannot be found out.
bool is_resident(int fd, std::uint64_t offset, std::uint64_t length);

// Free bytes for ordinary users; UINT64_MAX where the file system does not say.
Tried<std::uint64_t> free_bytes(int fd);

// The root of a store: everything is opened beneath it, and no symbolic link is followed on the way.
class Root {
 public:
  Root() = default;
  // With `openat2` false the path is walked by component, as it is where the kernel (or a seccomp filter) has no
  // openat2.
  Root(Fd fd, bool openat2);

  int fd() const { return fd_.get(); }
  // The directory behind the descriptor has been deleted.
  bool gone() const;
  // `path` has been checked (path.h); "" is the root itself. ELOOP or ENOTDIR: a symbolic link.
  Tried<Fd> open(std::string_view path, int flags, mode_t mode = 0) const;
  Tried<Fd> open_directory(std::string_view path) const;

 private:
  Tried<Fd> walk(std::string_view path, int flags, mode_t mode) const;

  Fd fd_;
  bool openat2_ = true;
};

struct Entry {
  std::string name;
  bool is_directory = false;
};
// The entries of an open directory, "." and ".." left out, unsorted.
Tried<std::vector<Entry>> entries_of(int directory);

// Removes the directory `name` in `parent` with all in it, following no link. An absent one is no error. ENOTDIR: it
// is no directory. At most kMaxDepth levels (ELOOP otherwise), so that descriptors are bounded.
inline constexpr int kMaxDepth = 64;
int remove_tree(int parent, const std::string& name, int depth = 0);

}  // namespace unbroken::posix
