#include "store/posix/posix_root.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <string_view>

namespace unbroken::posix {
namespace {

Tried<Fd> open_plain(const std::string& path) {
  const int fd = uninterrupted([&] { return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
  if (fd < 0) return std::unexpected(errno);
  return Fd(fd);
}

std::string parent_of(const std::string& absolute) {
  const std::size_t slash = absolute.rfind('/');
  return slash == 0 ? "/" : absolute.substr(0, slash);
}

Error open_error(int number, const std::string& path) {
  Error error = errno_error(number, "open store", path);
  if (number == ENOTDIR) error.message += "; a store needs a directory, and something in this path is none";
  if (number == EACCES) error.message += "; choose a directory that this user may read and write";
  return error;
}

// Makes `path` where its parent is there or can be made. An entry that came up meanwhile is as good as ours, and its
// maker may not have synced it yet, so it is synced, too.
Status make(const std::string& path) {
  if (::mkdir(path.c_str(), 0777) != 0) {
    if (errno == ENOENT && path != "/") {
      UNBROKEN_TRY(make(parent_of(path)));
      if (::mkdir(path.c_str(), 0777) != 0 && errno != EEXIST) return errno_error(errno, "make directory", path);
    } else if (errno != EEXIST) {
      Error error = errno_error(errno, "make directory", path);
      if (errno == ENOTDIR) error.message += "; a file is in the way of the store's directory";
      return error;
    }
  }
  const std::string parent = parent_of(path);
  auto directory = open_plain(parent);
  const int error = directory ? sync_directory_fd(directory->get()) : directory.error();
  if (error != 0) return errno_error(error, "sync directory", parent);
  return {};
}

}  // namespace

Result<std::string> absolute_path(const std::string& path) {
  if (path.empty()) return make_error(Code::kInvalidArgument, "open store: the path is empty; name a directory");
  if (path.find('\0') != std::string::npos) {
    return make_error(Code::kInvalidArgument, "open store: the path has a NUL byte");
  }
  std::string from;
  if (path.front() != '/') {
    char here[PATH_MAX];
    if (::getcwd(here, sizeof here) == nullptr) return errno_error(errno, "open store", path);
    from = std::string(here) + "/";
  }
  const std::string whole = from + path;
  std::string absolute;
  for (std::string_view rest = whole; !rest.empty();) {
    const std::size_t slash = rest.find('/');
    const std::string_view component = rest.substr(0, slash);
    if (!component.empty() && component != ".") absolute.append("/").append(component);
    if (slash == std::string_view::npos) break;
    rest.remove_prefix(slash + 1);
  }
  return absolute.empty() ? "/" : absolute;
}

Result<Fd> open_root(const std::string& absolute, bool create) {
  auto root = open_plain(absolute);
  if (!root && root.error() == ENOENT && create) {
    UNBROKEN_TRY(make(absolute));
    root = open_plain(absolute);
  }
  if (!root) return open_error(root.error(), absolute);
  return std::move(*root);
}

}  // namespace unbroken::posix
