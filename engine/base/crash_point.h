// Named points at which tests inject a fault into a protocol. In release they compile to nothing.
//
// `UNBROKEN_CRASH_POINT("commit.3.directory_synced")` stands between two numbered steps of a protocol. In a build with
// UNBROKEN_TESTING, the handler that a test has installed may return an error there (the step fails), or end the
// process (a kill between the steps). Threads: points are reached from any thread; the handler is set before threads
// start.
#pragma once

#include "base/error.h"

#ifdef UNBROKEN_TESTING
#include <functional>
#include <string_view>

namespace unbroken {
using CrashHandler = std::function<Status(std::string_view point)>;
void set_crash_handler(CrashHandler handler);
Status reach_crash_point(std::string_view point);
}  // namespace unbroken

#define UNBROKEN_CRASH_POINT(name) UNBROKEN_TRY(::unbroken::reach_crash_point(name))
#else
#define UNBROKEN_CRASH_POINT(name) static_cast<void>(0)
#endif
