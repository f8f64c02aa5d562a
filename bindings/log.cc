#include "base/log.h"

#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace unbroken::bindings {
namespace {

// The engine may log from any thread, also while the interpreter ends: then there is nobody left to tell.
void log_to_python(LogLevel level, std::string_view message) {
  if (!nb::is_alive()) return;
  const nb::gil_scoped_acquire acquired;
  try {
    const nb::object logger = nb::module_::import_("logging").attr("getLogger")("unbroken.engine");
    const char* method = level == LogLevel::kInfo ? "info" : level == LogLevel::kWarning ? "warning" : "error";
    logger.attr(method)("%s", nb::str(message.data(), message.size()));
  } catch (nb::python_error& raised) {
    raised.discard_as_unraisable("unbroken: a log handler failed");
  }
}

}  // namespace

void bind_log(nb::module_&) { set_log_sink(log_to_python); }

}  // namespace unbroken::bindings
