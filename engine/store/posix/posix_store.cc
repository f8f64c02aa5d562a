// How an object comes to its name at once and whole (publish, create_whole):
//   1. Its bytes go into a new file with a temporary name in the same directory. A kill leaves that file, hidden.
//   2. fsync of the file, before it has its name: else the name could survive a power loss and the bytes not.
//   3. publish: rename over the final name. create_whole: link to the final name, which fails if that is taken, then
//      removal of the temporary one.
// The name is durable when the caller syncs the directory. Errors up to step 2 leave the old state for certain; an
// error of step 3 that may stand for a change that did happen is kUnknown.
#include "store/posix/posix_store.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <limits>
#include <optional>

#include "base/bytes.h"
#include "store/path.h"
#include "store/posix/posix_file.h"
#include "store/posix/posix_io.h"
#include "store/posix/posix_root.h"

namespace unbroken {
namespace posix {
namespace {

constexpr mode_t kFileMode = 0666;
constexpr mode_t kDirectoryMode = 0777;

int rename_noreplace(int directory, const char* from, const char* to) {
  // The system call itself: some C libraries lack the wrapper.
  constexpr unsigned int kNoReplace = 1;
  return ::syscall(SYS_renameat2, directory, from, directory, to, kNoReplace) == 0 ? 0 : errno;
}

// The kernel or the file system does not know this operation.
bool is_missing(int number) { return number == EPERM || number == EOPNOTSUPP || number == ENOSYS || number == EINVAL; }

// The change that was asked for certainly did not happen. Over a network a call that failed in any other way may have
// been carried out.
bool is_definite(int number) {
  constexpr std::array kDefinite = {ENOSPC,       EDQUOT, EACCES, EPERM, EROFS,  EISDIR,     ENOTDIR,
                                    ENAMETOOLONG, EMLINK, EEXIST, EXDEV, EINVAL, EOPNOTSUPP, ENOSYS};
  return std::find(kDefinite.begin(), kDefinite.end(), number) != kDefinite.end();
}

// A temporary file; its name goes when this does.
class Temporary {
 public:
  static Tried<Temporary> make(int directory) {
    for (;;) {
      std::string name = temporary_name();
      const int fd = uninterrupted([&] {
        return ::openat(directory, name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, kFileMode);
      });
      if (fd >= 0) return Temporary(directory, std::move(name), Fd(fd));
      if (errno != EEXIST) return std::unexpected(errno);
    }
  }
  Temporary(Temporary&& other) noexcept
      : directory_(other.directory_), name_(std::exchange(other.name_, {})), fd_(std::move(other.fd_)) {}
  Temporary& operator=(Temporary&&) = delete;
  ~Temporary() {
    if (!name_.empty()) ::unlinkat(directory_, name_.c_str(), 0);
  }

  const char* name() const { return name_.c_str(); }
  const Fd& fd() const { return fd_; }
  void keep() { name_.clear(); }

 private:
  Temporary(int directory, std::string name, Fd fd)
      : directory_(directory), name_(std::move(name)), fd_(std::move(fd)) {}

  int directory_;
  std::string name_;
  Fd fd_;
};

class PosixStore final : public Store, private Errors {
 public:
  PosixStore(std::string url, Root root, PosixUse use)
      : url_(std::move(url)), root_(std::move(root)), use_(use), abilities_{.direct_io = use.direct_io} {}

  // Tries in the root, with a scratch file, what cannot be known otherwise. An error: the root cannot be written.
  Status find_abilities();

  std::string_view url() const override { return url_; }
  const Abilities& abilities() const override { return abilities_; }
  Result<std::unique_ptr<Writer>> create(std::string_view path, std::uint64_t length) override;
  Status publish(std::string_view path, std::span<const std::byte> bytes) override;
  Status create_whole(std::string_view path, std::span<const std::byte> bytes) override;
  Result<std::unique_ptr<Reader>> open(std::string_view path, OpenOptions options) override;
  Result<std::string> read(std::string_view path, std::uint64_t limit) override;
  Result<ObjectInfo> stat(std::string_view path) override;
  Result<std::vector<ObjectInfo>> list(std::string_view path) override;
  Status remove(std::string_view path) override;
  Status remove_directory(std::string_view path) override;
  Status make_directory(std::string_view path) override;
  Status sync_directory(std::string_view path) override;
  Result<std::uint64_t> free_bytes() override;

 private:
  struct Place {
    Fd directory;
    std::string name;
  };

  Error error(int number, std::string_view action, std::string_view path, std::uint64_t needed = 0) const override;
  Error unclear(int number, std::string_view action, std::string_view path, std::uint64_t needed = 0) const;
  std::string object(std::string_view path) const;
  Result<Place> place_of(std::string_view action, std::string_view path) const;
  Result<Temporary> write_temporary(const Place& place, std::string_view action, std::string_view path,
                                    std::span<const std::byte> bytes) const;
  int put_if_absent(const Place& place, Temporary& temporary) const;
  Status create_exclusively(const Place& place, std::string_view path, std::span<const std::byte> bytes) const;
  Status make_one(std::string_view path, const Place& place) const;
  Fd open_direct(const Place& place, int flags, const Fd& same) const;

  const std::string url_;
  const Root root_;
  const PosixUse use_;
  Abilities abilities_;
};

// --- Errors ---

std::string PosixStore::object(std::string_view path) const {
  if (path.empty()) return url_;
  return url_ == "/" ? fmt::format("/{}", path) : fmt::format("{}/{}", url_, path);
}

Error PosixStore::error(int number, std::string_view action, std::string_view path, std::uint64_t needed) const {
  Error error = errno_error(number, action, object(path));
  if (number == ENOENT && root_.gone()) {
    error.code = Code::kUnavailable;
    error.retryable = true;
    error.message += fmt::format("; the store's directory {} was deleted while it was in use", url_);
  }
  if (number == ELOOP || number == EXDEV) error.message += "; symbolic links below a store's root are not followed";
  if (number == ENOTDIR) error.message += "; something on its path is not a directory";
  if (number == ENOSPC || number == EDQUOT) {
    if (needed > 0) error.message += fmt::format("; {} needed", format_bytes(needed));
    if (const auto free = posix::free_bytes(root_.fd()); free && *free != std::numeric_limits<std::uint64_t>::max()) {
      error.message += fmt::format("{} {} free", needed > 0 ? "," : ";", format_bytes(*free));
    }
  }
  return error;
}

// The error of a step after which the change may be there.
Error PosixStore::unclear(int number, std::string_view action, std::string_view path, std::uint64_t needed) const {
  Error result = error(number, action, path, needed);
  if (is_definite(number)) return result;
  result.code = Code::kUnknown;
  result.retryable = false;
  result.message += "; whether it happened has to be found out by reading";
  return result;
}

// --- Writing ---

Result<PosixStore::Place> PosixStore::place_of(std::string_view action, std::string_view path) const {
  UNBROKEN_TRY(check_path_below_root(action, path));
  const SplitPath split = split_path(path);
  auto directory = root_.open(split.directory, O_PATH | O_DIRECTORY);
  if (!directory) return error(directory.error(), action, path);
  return Place{.directory = std::move(*directory), .name = std::string(split.name)};
}

// A second descriptor of the file behind `same`, unbuffered; empty where that does not work.
Fd PosixStore::open_direct(const Place& place, int flags, const Fd& same) const {
  if (!use_.direct_io) return {};
  Fd fd(uninterrupted(
      [&] { return ::openat(place.directory.get(), place.name.c_str(), flags | O_DIRECT | O_NOFOLLOW | O_CLOEXEC); }));
  struct stat left{};
  struct stat right{};
  if (!fd || ::fstat(fd.get(), &left) != 0 || ::fstat(same.get(), &right) != 0) return {};
  if (left.st_dev != right.st_dev || left.st_ino != right.st_ino) return {};
  return fd;
}

Result<std::unique_ptr<Writer>> PosixStore::create(std::string_view path, std::uint64_t length) {
  UNBROKEN_ASSIGN(const Place place, place_of("create", path));
  Fd file(uninterrupted([&] {
    return ::openat(place.directory.get(), place.name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                    kFileMode);
  }));
  if (!file) return error(errno, "create", path);
  if (length > 0) {
    const auto size = static_cast<off_t>(std::min<std::uint64_t>(length, std::numeric_limits<off_t>::max()));
    const int failed = uninterrupted([&] { return ::fallocate(file.get(), 0, 0, size); }) == 0 ? 0 : errno;
    // Where space cannot be reserved, running out of it is found by writing.
    if (failed != 0 && failed != EOPNOTSUPP && failed != ENOSYS && failed != EINVAL) {
      // First, so that what was reserved counts as free again in the message.
      file = Fd();
      ::unlinkat(place.directory.get(), place.name.c_str(), 0);
      return error(failed, "reserve space for", path, length);
    }
  }
  Fd direct = open_direct(place, O_WRONLY, file);
  return make_writer(*this, std::string(path), std::move(file), std::move(direct));
}

Result<Temporary> PosixStore::write_temporary(const Place& place, std::string_view action, std::string_view path,
                                              std::span<const std::byte> bytes) const {
  auto temporary = Temporary::make(place.directory.get());
  if (!temporary) return error(temporary.error(), action, path, bytes.size());
  int failed = write_all(temporary->fd().get(), 0, bytes);
  if (failed == 0) failed = sync_all(temporary->fd().get());
  if (failed != 0) return error(failed, action, path, bytes.size());
  return std::move(*temporary);
}

Status PosixStore::publish(std::string_view path, std::span<const std::byte> bytes) {
  UNBROKEN_ASSIGN(const Place place, place_of("publish", path));
  UNBROKEN_ASSIGN(Temporary temporary, write_temporary(place, "publish", path, bytes));
  const int directory = place.directory.get();
  if (::renameat(directory, temporary.name(), directory, place.name.c_str()) != 0) {
    return unclear(errno, "publish", path, bytes.size());
  }
  temporary.keep();
  return {};
}

// 0, EEXIST, or another errno; EOPNOTSUPP when the file system has no way to do it.
int PosixStore::put_if_absent(const Place& place, Temporary& temporary) const {
  const int directory = place.directory.get();
  if (use_.link) {
    if (::linkat(directory, temporary.name(), directory, place.name.c_str(), 0) == 0) return 0;
    const int failed = errno;
    // A network file system may have lost the answer of a link that was made, and sent it again.
    struct stat info{};
    if (::fstat(temporary.fd().get(), &info) == 0 && info.st_nlink == 2) return 0;
    if (!is_missing(failed)) return failed;
  }
  if (use_.rename_noreplace) {
    const int failed = rename_noreplace(directory, temporary.name(), place.name.c_str());
    if (failed == 0) temporary.keep();
    if (!is_missing(failed)) return failed;
  }
  return EOPNOTSUPP;
}

Status PosixStore::create_exclusively(const Place& place, std::string_view path,
                                      std::span<const std::byte> bytes) const {
  const Fd file(uninterrupted([&] {
    return ::openat(place.directory.get(), place.name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                    kFileMode);
  }));
  if (!file) return unclear(errno, "create", path, bytes.size());
  int failed = write_all(file.get(), 0, bytes);
  if (failed == 0) failed = sync_all(file.get());
  if (failed == 0) return {};
  Error result = error(failed, "create", path, bytes.size());
  if (::unlinkat(place.directory.get(), place.name.c_str(), 0) != 0) result.code = Code::kUnknown;
  return result;
}

Status PosixStore::create_whole(std::string_view path, std::span<const std::byte> bytes) {
  UNBROKEN_ASSIGN(const Place place, place_of("create", path));
  UNBROKEN_ASSIGN(Temporary temporary, write_temporary(place, "create", path, bytes));
  const int failed = put_if_absent(place, temporary);
  if (failed == 0) return {};
  if (failed == EOPNOTSUPP) return create_exclusively(place, path, bytes);
  return unclear(failed, "create", path, bytes.size());
}

// --- Reading ---

Result<std::unique_ptr<Reader>> PosixStore::open(std::string_view path, OpenOptions options) {
  UNBROKEN_TRY(check_path_below_root("open", path));
  // Not blocking: a FIFO in the way must not make us wait for its writer.
  constexpr int kFlags = O_RDONLY | O_NONBLOCK | O_NOCTTY;
  Tried<Fd> file = std::unexpected(EINVAL);
  const bool unbuffered = options.direct && use_.direct_io && (file = root_.open(path, kFlags | O_DIRECT)).has_value();
  if (!file && file.error() == EINVAL) file = root_.open(path, kFlags);
  if (!file) return error(file.error(), "open", path);
  struct stat info{};
  if (::fstat(file->get(), &info) != 0) return error(errno, "open", path);
  if (S_ISDIR(info.st_mode)) return error(EISDIR, "open", path);
  if (!S_ISREG(info.st_mode)) {
    return make_error(Code::kInvalidArgument, fmt::format("open {}: it is not a regular file", object(path)));
  }
  return make_reader(
      *this, std::string(path), std::move(*file),
      {.direct = options.direct, .unbuffered = unbuffered, .size = static_cast<std::uint64_t>(info.st_size)});
}

Result<std::string> PosixStore::read(std::string_view path, std::uint64_t limit) {
  UNBROKEN_ASSIGN(const std::unique_ptr<Reader> reader, open(path, {}));
  const std::uint64_t size = reader->size();
  if (size > limit) {
    return make_error(Code::kInvalidArgument, fmt::format("read {}: it has {} bytes, more than the {} that are allowed",
                                                          object(path), size, limit));
  }
  std::string content(size, '\0');
  UNBROKEN_TRY(reader->read_at(0, std::as_writable_bytes(std::span(content))));
  return content;
}

Result<ObjectInfo> PosixStore::stat(std::string_view path) {
  UNBROKEN_TRY(check_path("stat", path));
  // With O_PATH and O_NOFOLLOW a link is opened itself; it must not pass for an object.
  auto place = root_.open(path, O_PATH | O_NOFOLLOW);
  if (!place) return error(place.error(), "stat", path);
  if (path.empty() && root_.gone()) return error(ENOENT, "stat", path);
  struct stat info{};
  if (::fstat(place->get(), &info) != 0) return error(errno, "stat", path);
  if (S_ISLNK(info.st_mode)) return error(ELOOP, "stat", path);
  const bool is_directory = S_ISDIR(info.st_mode);
  return ObjectInfo{.name = std::string(split_path(path).name),
                    .size = is_directory ? 0 : static_cast<std::uint64_t>(info.st_size),
                    .is_directory = is_directory};
}

Result<std::vector<ObjectInfo>> PosixStore::list(std::string_view path) {
  UNBROKEN_TRY(check_path("list", path));
  auto directory = root_.open_directory(path);
  if (!directory) return error(directory.error(), "list", path);
  if (path.empty() && root_.gone()) return error(ENOENT, "list", path);
  auto entries = entries_of(directory->get());
  if (!entries) return error(entries.error(), "list", path);
  std::vector<ObjectInfo> infos;
  for (Entry& entry : *entries) {
    if (is_temporary(entry.name)) continue;
    ObjectInfo info{.name = std::move(entry.name), .is_directory = entry.is_directory};
    if (!info.is_directory) {
      struct stat found{};
      if (::fstatat(directory->get(), info.name.c_str(), &found, AT_SYMLINK_NOFOLLOW) != 0) {
        if (errno == ENOENT) continue;  // removed since it was read
        return error(errno, "list", join_path(path, info.name));
      }
      info.size = static_cast<std::uint64_t>(found.st_size);
    }
    infos.push_back(std::move(info));
  }
  std::sort(infos.begin(), infos.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  return infos;
}

Result<std::uint64_t> PosixStore::free_bytes() {
  const auto free = posix::free_bytes(root_.fd());
  if (!free) return error(free.error(), "find free space of", {});
  return *free;
}

// --- Names ---

Status PosixStore::remove(std::string_view path) {
  UNBROKEN_ASSIGN(const Place place, place_of("remove", path));
  if (::unlinkat(place.directory.get(), place.name.c_str(), 0) != 0) return error(errno, "remove", path);
  return {};
}

Status PosixStore::remove_directory(std::string_view path) {
  UNBROKEN_TRY(check_path_below_root("remove directory", path));
  auto place = place_of("remove directory", path);
  if (!place) {
    if (place.error().code == Code::kNotFound) return {};
    return std::move(place).error();
  }
  int failed = remove_tree(place->directory.get(), place->name);
  if (failed == 0 && root_.gone()) failed = ENOENT;  // then absence says nothing
  if (failed == 0) return {};
  if (failed == ELOOP) {
    return make_error(Code::kInvalidArgument,
                      fmt::format("remove directory {}: it is a symbolic link, or nested deeper "
                                  "than {} levels",
                                  object(path), kMaxDepth));
  }
  return error(failed, "remove directory", path);
}

Status PosixStore::make_one(std::string_view path, const Place& place) const {
  if (::mkdirat(place.directory.get(), place.name.c_str(), kDirectoryMode) == 0) return {};
  if (errno != EEXIST) return error(errno, "make directory", path);
  const auto existing = root_.open(path, O_PATH | O_DIRECTORY | O_NOFOLLOW);
  if (existing) return {};
  if (existing.error() == ENOTDIR || existing.error() == ELOOP) {
    return make_error(Code::kInvalidArgument,
                      fmt::format("make directory {}: something that is not a directory has that name", object(path)));
  }
  return error(existing.error(), "make directory", path);
}

Status PosixStore::make_directory(std::string_view path) {
  UNBROKEN_TRY(check_path("make directory", path));
  for (std::size_t end = 0; end < path.size();) {
    end = std::min(path.find('/', end + 1), path.size());
    const std::string_view prefix = path.substr(0, end);
    UNBROKEN_ASSIGN(const Place place, place_of("make directory", prefix));
    UNBROKEN_TRY(make_one(prefix, place));
  }
  return {};
}

Status PosixStore::sync_directory(std::string_view path) {
  UNBROKEN_TRY(check_path("sync directory", path));
  auto directory = root_.open_directory(path);
  if (!directory) return error(directory.error(), "sync directory", path);
  if (const int failed = sync_directory_fd(directory->get()); failed != 0) {
    Error result = error(failed, "sync directory", path);
    result.code = Code::kUnknown;
    result.retryable = false;
    result.data_may_be_lost = true;
    result.message += "; names that were changed in it may not survive a loss of power";
    return result;
  }
  return {};
}

// --- Opening ---

Status PosixStore::find_abilities() {
  const Place scratch{.directory = Fd(::fcntl(root_.fd(), F_DUPFD_CLOEXEC, 0)), .name = temporary_name()};
  if (!scratch.directory) return error(errno, "open store", {});
  auto first = Temporary::make(scratch.directory.get());
  if (!first) {
    // A full disk can still be read, and what is written there next will say that it is full.
    if (first.error() == ENOSPC || first.error() == EDQUOT) return {};
    Error result = error(first.error(), "make a scratch file in store", {});
    result.message += "; choose a directory that this user may write";
    return result;
  }
  if (use_.direct_io) {
    alignas(kDirectAlignment) static constexpr std::array<std::byte, kDirectAlignment> kBlock{};
    const Fd direct(::openat(scratch.directory.get(), first->name(), O_WRONLY | O_DIRECT | O_NOFOLLOW | O_CLOEXEC));
    const int failed = direct ? write_all(direct.get(), 0, kBlock) : errno;
    abilities_.direct_io = failed == 0 || failed == ENOSPC || failed == EDQUOT;
  }
  auto second = Temporary::make(scratch.directory.get());
  if (!second) return {};
  const auto wins = [&](Temporary& temporary) {
    const int failed = put_if_absent(scratch, temporary);
    return failed == EOPNOTSUPP ? create_exclusively(scratch, {}, {}).has_value() : failed == 0;
  };
  if (wins(*first) && wins(*second)) abilities_.create_if_absent = false;
  ::unlinkat(scratch.directory.get(), scratch.name.c_str(), 0);
  return {};
}

}  // namespace
}  // namespace posix

Result<std::unique_ptr<Store>> open_posix_store(const std::string& path, StoreOptions options, PosixUse use) {
  UNBROKEN_ASSIGN(std::string absolute, posix::absolute_path(path));
  UNBROKEN_ASSIGN(posix::Fd fd, posix::open_root(absolute, options.create));
  auto store = std::make_unique<posix::PosixStore>(std::move(absolute), posix::Root(std::move(fd), use.openat2), use);
  if (options.create) UNBROKEN_TRY(store->find_abilities());
  return std::unique_ptr<Store>(std::move(store));
}

}  // namespace unbroken
