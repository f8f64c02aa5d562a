// Finding or making the root of a posix store, and its name in messages.
#pragma once

#include <string>

#include "base/error.h"
#include "store/posix/posix_io.h"

namespace unbroken::posix {

// The absolute path, "." and doubled slashes taken out; links and ".." are left as they are.
Result<std::string> absolute_path(const std::string& path);

// Opens the directory; with `create` makes it and its missing parents first, and syncs the directory above each.
Result<Fd> open_root(const std::string& absolute, bool create);

}  // namespace unbroken::posix
