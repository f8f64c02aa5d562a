#include <fmt/core.h>

#include <algorithm>
#include <cctype>
#include <optional>
#include <string>

#include "store/posix/posix_store.h"
#include "store/store.h"

namespace unbroken {
namespace {

// "s3" of "s3://bucket"; nothing for a plain path.
std::optional<std::string_view> scheme_of(std::string_view url) {
  const std::size_t end = url.find("://");
  if (end == std::string_view::npos || end == 0) return std::nullopt;
  const std::string_view scheme = url.substr(0, end);
  const bool letters = std::all_of(scheme.begin(), scheme.end(), [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '+' || c == '-' || c == '.';
  });
  if (!letters) return std::nullopt;
  return scheme;
}

}  // namespace

Result<std::unique_ptr<Store>> open_store(std::string_view url, StoreOptions options) {
  const auto scheme = scheme_of(url);
  if (!scheme) return open_posix_store(std::string(url), options);
  if (*scheme != "file") {
    return make_error(Code::kUnsupported,
                      fmt::format("open store {}: scheme \"{}\" is not supported; known are /path, relative/path and "
                                  "file:///path",
                                  url, *scheme));
  }
  const std::string_view path = url.substr(std::string_view("file://").size());
  if (!path.starts_with('/')) {
    return make_error(
        Code::kInvalidArgument,
        fmt::format("open store {}: a file URL has three slashes and an absolute path: file:///path", url));
  }
  return open_posix_store(std::string(path), options);
}

}  // namespace unbroken
