// Paths below a store's root, as every driver checks them. Pure functions; any thread.
#pragma once

#include <string>
#include <string_view>

#include "base/error.h"

namespace unbroken {

// Names that begin so belong to the drivers: list() hides them and callers may not use them.
inline constexpr std::string_view kTemporaryPrefix = ".tmp-";

// A path that may be the root (""): '/'-separated components, none of them empty, "." or "..", none with a NUL or with
// the temporary prefix. `action` is what the caller was about ("open"), for the message. kInvalidArgument.
Status check_path(std::string_view action, std::string_view path);

// The same for a path that must name something below the root.
Status check_path_below_root(std::string_view action, std::string_view path);

bool is_temporary(std::string_view name);

struct SplitPath {
  std::string_view directory;  // "" is the root
  std::string_view name;
};
SplitPath split_path(std::string_view path);

// "a" and "b" give "a/b"; "" and "b" give "b".
std::string join_path(std::string_view directory, std::string_view name);

// A new name for a temporary entry; unique over processes and machines.
std::string temporary_name();

}  // namespace unbroken
