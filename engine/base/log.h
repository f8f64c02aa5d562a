// The engine's log goes through one callback: Python's `logging` in the package, stderr in the command line.
// Any thread; the callback is set before threads start and must not throw.
#pragma once

#include <functional>
#include <string_view>

namespace unbroken {

enum class LogLevel { kInfo, kWarning, kError };
using LogSink = std::function<void(LogLevel, std::string_view)>;

void set_log_sink(LogSink sink);
void log(LogLevel level, std::string_view message);

}  // namespace unbroken
