#include "conformance/posix_system.h"

#include <fmt/core.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <iterator>

namespace unbroken::conformance {

namespace fs = std::filesystem;

testing::AssertionResult in_child(const std::function<std::string()>& work) {
  int ends[2];
  if (::pipe(ends) != 0) return testing::AssertionFailure() << "pipe failed";
  const pid_t child = ::fork();
  if (child < 0) return testing::AssertionFailure() << "fork failed";
  if (child == 0) {
    const std::string wrong = work();
    const bool told = ::write(ends[1], wrong.data(), wrong.size()) == static_cast<ssize_t>(wrong.size());
    ::_exit(told && wrong.empty() ? 0 : 1);
  }
  ::close(ends[1]);
  std::string wrong;
  char buffer[4096];
  for (ssize_t got = 0; (got = ::read(ends[0], buffer, sizeof buffer)) > 0;)
    wrong.append(buffer, static_cast<std::size_t>(got));
  ::close(ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return testing::AssertionSuccess();
  return testing::AssertionFailure() << (wrong.empty() ? fmt::format("the child ended with status {}", status) : wrong);
}

bool may_change_user() { return ::geteuid() == 0; }

testing::AssertionResult as_nobody(const std::function<std::string()>& work) {
  constexpr uid_t kNobody = 65534;
  return in_child([&]() -> std::string {
    if (::setresgid(kNobody, kNobody, kNobody) != 0 || ::setresuid(kNobody, kNobody, kNobody) != 0) {
      return "cannot become nobody";
    }
    return work();
  });
}

namespace {

bool run(const std::string& command) { return std::system((command + " >/dev/null 2>&1").c_str()) == 0; }

}  // namespace

SmallFileSystem::SmallFileSystem(Kind kind, std::uint64_t bytes) {
  if (::geteuid() != 0) return;
  const fs::path mounted = ground_.path() / "mounted";
  fs::create_directory(mounted);
  if (kind == Kind::kTmpfs) {
    if (::mount("none", mounted.c_str(), "tmpfs", 0, fmt::format("size={}", bytes).c_str()) == 0) path_ = mounted;
    return;
  }
  const std::string image = ground_.path() / "image";
  // Without reserved blocks: what is free is free for this user, too.
  if (run(fmt::format("truncate -s {} {} && mkfs.ext4 -q -m 0 {} && mount -o loop {} {}", bytes, image, image, image,
                      mounted.c_str()))) {
    path_ = mounted;
  }
}

SmallFileSystem::~SmallFileSystem() {
  if (!path_.empty() && ::umount2(path_.c_str(), MNT_DETACH) != 0) {
    ADD_FAILURE() << "cannot unmount " << path_ << ": errno " << errno;
  }
}

bool SmallFileSystem::make_read_only() {
  return ::mount(nullptr, path_.c_str(), nullptr, MS_REMOUNT | MS_RDONLY, nullptr) == 0;
}

std::size_t open_descriptors() {
  return static_cast<std::size_t>(std::distance(fs::directory_iterator("/proc/self/fd"), fs::directory_iterator()));
}

}  // namespace unbroken::conformance
