// A directory of a POSIX file system as a Store (store.h).
//
// The root may be reached through symbolic links; it is opened once, and everything is then opened beneath that
// descriptor, so a root that is renamed stays usable and one that is deleted answers kUnavailable. Nothing below it is
// reached through a symbolic link: such a path is kInvalidArgument.
//
// Descriptors: one for the store, two for each open writer, one for each open reader, up to 64 for the time of a
// remove_directory(). Files are made with mode 0666 and directories with 0777, less the umask.
//
// create_whole() goes by link(), where that is missing by renameat2(RENAME_NOREPLACE), and where both are missing by
// O_EXCL on the final name; only then can a kill leave a torn object there.
//
// Without StoreOptions::create nothing is written into the root, so what can be found out only by writing is assumed to
// work (create_if_absent) or falls back by itself (direct_io, file by file).
#pragma once

#include <memory>
#include <string>

#include "store/store.h"

namespace unbroken {

// What the driver may use where the system has it. For tests of the ways that are taken elsewhere.
struct PosixUse {
  bool openat2 = true;
  bool link = true;
  bool rename_noreplace = true;
  bool direct_io = true;
};

// Opens the directory `path`. With `create`, missing parents are made, too, and all new names made durable, and the
// abilities are found out with a scratch file. kNotFound, kPermission, kInvalidArgument (not a directory).
Result<std::unique_ptr<Store>> open_posix_store(const std::string& path, StoreOptions options, PosixUse use = {});

}  // namespace unbroken
