// The places on which the conformance suite runs: every driver, every way that a driver can go, and the fault store
// around them, without faults.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "store/store.h"

namespace unbroken::conformance {

// A directory that goes with it, all in it included.
class TemporaryDirectory {
 public:
  explicit TemporaryDirectory(const std::filesystem::path& parent = std::filesystem::temp_directory_path());
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  ~TemporaryDirectory();

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// A store that is fresh and empty, and what it stands on.
struct Opened {
  std::shared_ptr<void> ground;  // kept alive as long as the store; a directory, a store that is wrapped
  std::unique_ptr<Store> store;
  std::filesystem::path directory{};  // of posix stores
};

struct Place {
  std::string name;
  Abilities abilities;  // that it must have (direct_io is left to the file system)
  // Empty where this machine lacks the place.
  std::function<Opened()> open;
};

std::vector<Place> all_places();

// For tests over all_places(); skips, visibly, a place that is missing here.
class StoreTest : public testing::TestWithParam<Place> {
 protected:
  void SetUp() override;
  Store& store() { return *opened_.store; }

  // Helpers that fail the test when the store does.
  void write(std::string_view path, std::string_view content);
  void publish(std::string_view path, std::string_view content);
  void make(std::string_view directory);
  std::string content(std::string_view path);
  std::vector<std::string> names(std::string_view directory);

  Opened opened_;
};

inline std::string place_name(const testing::TestParamInfo<Place>& info) { return info.param.name; }

// A string of random bytes, the same for the same seed.
std::string random_bytes(std::size_t size, std::uint64_t seed);

// EXPECT_PRED_FORMAT-style checks of an outcome's code.
template <class R>
testing::AssertionResult has_code(const R& result, Code code) {
  if (result.has_value()) return testing::AssertionFailure() << "no error, expected " << code_name(code);
  if (result.error().code == code) return testing::AssertionSuccess() << result.error().message;
  return testing::AssertionFailure() << code_name(result.error().code) << ": " << result.error().message;
}
template <class R>
testing::AssertionResult is_ok(const R& result) {
  if (result.has_value()) return testing::AssertionSuccess();
  return testing::AssertionFailure() << code_name(result.error().code) << ": " << result.error().message;
}

}  // namespace unbroken::conformance
