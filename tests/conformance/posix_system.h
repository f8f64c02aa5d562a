// What tests of the posix driver need of the system: another user, small file systems, strace. Each says so when this
// machine does not let it.
#pragma once

#include <gtest/gtest.h>
#include <sys/types.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include "conformance/places.h"

namespace unbroken::conformance {

// Runs `work` in a forked child; it returns what is wrong, "" for nothing.
testing::AssertionResult in_child(const std::function<std::string()>& work);

// The same, as an ordinary user. Needs root; `may()` says whether that is so.
bool may_change_user();
testing::AssertionResult as_nobody(const std::function<std::string()>& work);

// A mounted file system of `bytes`, unmounted with the object; `path()` is empty where it cannot be mounted.
class SmallFileSystem {
 public:
  enum class Kind { kTmpfs, kExt4 };
  SmallFileSystem(Kind kind, std::uint64_t bytes);
  SmallFileSystem(const SmallFileSystem&) = delete;
  SmallFileSystem& operator=(const SmallFileSystem&) = delete;
  ~SmallFileSystem();

  const std::filesystem::path& path() const { return path_; }
  bool make_read_only();

 private:
  TemporaryDirectory ground_;
  std::filesystem::path path_;
};

// Number of open descriptors of this process.
std::size_t open_descriptors();

}  // namespace unbroken::conformance
