#include "base/log.h"

#include <utility>

namespace unbroken {
namespace {
LogSink& log_sink() {
  static LogSink sink;
  return sink;
}
}  // namespace

void set_log_sink(LogSink sink) { log_sink() = std::move(sink); }

void log(LogLevel level, std::string_view message) {
  if (log_sink()) log_sink()(level, message);
}

}  // namespace unbroken
