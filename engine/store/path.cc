#include "store/path.h"

#include <fmt/core.h>
#include <sys/random.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>

namespace unbroken {
namespace {

std::string_view fault_of_component(std::string_view component) {
  if (component.empty()) return "it has an empty component";
  if (component == "." || component == "..") return "\".\" and \"..\" are not allowed";
  if (component.find('\0') != std::string_view::npos) return "it has a NUL byte";
  if (is_temporary(component)) return "names that begin with \".tmp-\" are reserved";
  return {};
}

// NUL bytes and the like must not reach a terminal or a log.
std::string printable(std::string_view path) {
  std::string text;
  for (const char c : path) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) {
      text += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    } else {
      text += c;
    }
  }
  return text;
}

}  // namespace

bool is_temporary(std::string_view name) { return name.starts_with(kTemporaryPrefix); }

Status check_path(std::string_view action, std::string_view path) {
  for (std::string_view rest = path; !path.empty();) {
    const std::size_t slash = rest.find('/');
    const std::string_view fault = fault_of_component(rest.substr(0, slash));
    if (!fault.empty()) {
      return make_error(Code::kInvalidArgument,
                        fmt::format("{} \"{}\": not a path below a store's root: {}", action, printable(path), fault));
    }
    if (slash == std::string_view::npos) break;
    rest.remove_prefix(slash + 1);
  }
  return {};
}

Status check_path_below_root(std::string_view action, std::string_view path) {
  if (path.empty()) {
    return make_error(Code::kInvalidArgument, fmt::format("{} \"\": the root of a store cannot be used so", action));
  }
  return check_path(action, path);
}

SplitPath split_path(std::string_view path) {
  const std::size_t slash = path.rfind('/');
  if (slash == std::string_view::npos) return {.directory = {}, .name = path};
  return {.directory = path.substr(0, slash), .name = path.substr(slash + 1)};
}

std::string join_path(std::string_view directory, std::string_view name) {
  if (directory.empty()) return std::string(name);
  return fmt::format("{}/{}", directory, name);
}

std::string temporary_name() {
  static std::atomic<std::uint64_t> counter{0};
  std::uint64_t random = 0;
  if (getrandom(&random, sizeof random, GRND_NONBLOCK) != static_cast<ssize_t>(sizeof random)) {
    random = static_cast<std::uint64_t>(std::chrono::system_clock::now().time_since_epoch().count());
  }
  return fmt::format("{}{}-{:016x}-{}", kTemporaryPrefix, ::getpid(), random, counter.fetch_add(1));
}

}  // namespace unbroken
