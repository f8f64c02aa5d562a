#include "store/posix/posix_io.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <memory>

namespace unbroken::posix {

int Fd::close() {
  if (number_ < 0) return 0;
  // EINTR means that the descriptor is gone and nothing else is known to be wrong.
  return ::close(std::exchange(number_, -1)) == 0 || errno == EINTR ? 0 : errno;
}

bool interrupted() { return errno == EINTR; }

int write_all(int fd, std::uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written =
        uninterrupted([&] { return ::pwrite(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset)); });
    if (written < 0) return errno;
    if (written == 0) return EIO;  // must not happen, and must not become an endless loop
    offset += static_cast<std::uint64_t>(written);
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
  return 0;
}

int sync_data(int fd) {
  return uninterrupted([&] { return ::fdatasync(fd); }) == 0 ? 0 : errno;
}

int sync_all(int fd) {
  return uninterrupted([&] { return ::fsync(fd); }) == 0 ? 0 : errno;
}

int sync_directory_fd(int fd) {
  const int error = sync_all(fd);
  return error == EINVAL ? 0 : error;
}

bool is_resident(int fd, std::uint64_t offset, std::uint64_t length) {
  static const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));  // not everywhere 4096
  if (length == 0) return true;
  const std::uint64_t begin = offset / page * page;
  const std::size_t bytes = static_cast<std::size_t>(offset + length - begin);
  void* const mapped = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, static_cast<off_t>(begin));
  if (mapped == MAP_FAILED) return true;
  std::vector<unsigned char> pages((bytes + page - 1) / page);
  const bool known = ::mincore(mapped, bytes, pages.data()) == 0;
  ::munmap(mapped, bytes);
  constexpr std::size_t kMostMissing = 8;  // of so many pages one
  const auto missing = std::ranges::count_if(pages, [](unsigned char one) { return (one & 1) == 0; });
  return !known || static_cast<std::size_t>(missing) <= pages.size() / kMostMissing;
}

Tried<std::uint64_t> free_bytes(int fd) {
  struct statvfs answer{};
  if (uninterrupted([&] { return ::fstatvfs(fd, &answer); }) != 0) return std::unexpected(errno);
  if (answer.f_blocks == 0) return std::numeric_limits<std::uint64_t>::max();
  return static_cast<std::uint64_t>(answer.f_bavail) * answer.f_frsize;
}

namespace {

Tried<Fd> open_at(int directory, const std::string& name, int flags, mode_t mode) {
  const int fd = uninterrupted([&] { return ::openat(directory, name.c_str(), flags | O_CLOEXEC, mode); });
  if (fd < 0) return std::unexpected(errno);
  return Fd(fd);
}

int call_openat2(int directory, const char* path, int flags, mode_t mode) {
  open_how how{};
  how.flags = static_cast<std::uint64_t>(flags | O_CLOEXEC);
  how.mode = (flags & O_CREAT) != 0 ? mode : 0;
  how.resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS;
  // EAGAIN: something was renamed on the way and the kernel could not be sure; it may be the next time.
  for (int attempt = 0;; ++attempt) {
    const long fd = uninterrupted([&] { return ::syscall(SYS_openat2, directory, path, &how, sizeof how); });
    if (fd >= 0 || errno != EAGAIN || attempt == 100) return static_cast<int>(fd);
  }
}

bool has_openat2(int directory) {
  const Fd fd(call_openat2(directory, ".", O_PATH | O_DIRECTORY, 0));
  return static_cast<bool>(fd);
}

}  // namespace

Root::Root(Fd fd, bool openat2) : fd_(std::move(fd)), openat2_(openat2 && has_openat2(fd_.get())) {}

bool Root::gone() const {
  struct stat info{};
  return ::fstat(fd_.get(), &info) != 0 || info.st_nlink == 0;
}

Tried<Fd> Root::walk(std::string_view path, int flags, mode_t mode) const {
  Fd directory;
  for (;;) {
    const int at = directory ? directory.get() : fd_.get();
    const std::size_t slash = path.find('/');
    const std::string component(path.substr(0, slash));
    if (slash == std::string_view::npos) return open_at(at, component, flags | O_NOFOLLOW, mode);
    auto next = open_at(at, component, O_PATH | O_DIRECTORY | O_NOFOLLOW, 0);
    if (!next) return next;
    directory = std::move(*next);
    path.remove_prefix(slash + 1);
  }
}

Tried<Fd> Root::open(std::string_view path, int flags, mode_t mode) const {
  if (path.empty()) return open_at(fd_.get(), ".", flags, mode);
  if (!openat2_) return walk(path, flags, mode);
  const int fd = call_openat2(fd_.get(), std::string(path).c_str(), flags, mode);
  if (fd < 0) return std::unexpected(errno);
  return Fd(fd);
}

Tried<Fd> Root::open_directory(std::string_view path) const { return open(path, O_RDONLY | O_DIRECTORY); }

Tried<std::vector<Entry>> entries_of(int directory) {
  // A descriptor of its own: reading moves its position and closedir() closes it.
  auto own = open_at(directory, ".", O_RDONLY | O_DIRECTORY, 0);
  if (!own) return std::unexpected(own.error());
  const std::unique_ptr<DIR, int (*)(DIR*)> stream(::fdopendir(own->get()), ::closedir);
  if (!stream) return std::unexpected(errno);
  own->release();  // the stream owns it now
  std::vector<Entry> entries;
  for (;;) {
    errno = 0;
    const dirent* entry = ::readdir(stream.get());
    if (entry == nullptr) {
      if (errno != 0) return std::unexpected(errno);
      return entries;
    }
    const std::string_view name = entry->d_name;
    if (name == "." || name == "..") continue;
    bool is_directory = entry->d_type == DT_DIR;
    if (entry->d_type == DT_UNKNOWN) {
      struct stat info{};
      if (::fstatat(directory, entry->d_name, &info, AT_SYMLINK_NOFOLLOW) != 0) {
        if (errno == ENOENT) continue;  // removed in the meantime
        return std::unexpected(errno);
      }
      is_directory = S_ISDIR(info.st_mode);
    }
    entries.push_back({.name = std::string(name), .is_directory = is_directory});
  }
}

namespace {

int empty_directory(int directory, int depth) {
  auto entries = entries_of(directory);
  if (!entries) return entries.error();
  for (const Entry& entry : *entries) {
    if (entry.is_directory) {
      if (const int error = remove_tree(directory, entry.name, depth + 1); error != 0) return error;
    } else if (::unlinkat(directory, entry.name.c_str(), 0) != 0 && errno != ENOENT) {
      return errno;
    }
  }
  return 0;
}

}  // namespace

int remove_tree(int parent, const std::string& name, int depth) {
  if (depth >= kMaxDepth) return ELOOP;
  auto directory = open_at(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW, 0);
  if (!directory) return directory.error() == ENOENT ? 0 : directory.error();
  // Somebody may be adding entries while we remove them; a few rounds, then it is an error.
  constexpr int kRounds = 8;
  for (int round = 0;; ++round) {
    if (const int error = empty_directory(directory->get(), depth); error != 0) return error;
    if (::unlinkat(parent, name.c_str(), AT_REMOVEDIR) == 0 || errno == ENOENT) return 0;
    if ((errno != ENOTEMPTY && errno != EEXIST) || round == kRounds) return errno;
  }
}

}  // namespace unbroken::posix
