#include "base/crash_point.h"

#ifdef UNBROKEN_TESTING
namespace unbroken {
namespace {
CrashHandler& crash_handler() {
  static CrashHandler handler;
  return handler;
}
}  // namespace

void set_crash_handler(CrashHandler handler) { crash_handler() = std::move(handler); }

Status reach_crash_point(std::string_view point) { return crash_handler() ? crash_handler()(point) : Status(); }
}  // namespace unbroken
#endif
