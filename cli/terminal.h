// How words come to a person: made harmless, coloured where that is wanted, on the right stream.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <string>
#include <string_view>

#include "base/error.h"

namespace unbroken::cli {

// Names of files and texts in JSON come from outside. Control characters, what reverses or hides text, and bytes that
// are not UTF-8 become visible escapes (\n, \x1b, \u202e), so that no name can move the cursor or fake a line.
std::string printable(std::string_view text);

// How many columns of a terminal a printable text takes, as far as that can be told from code points.
std::size_t width_of(std::string_view printable_text);

enum class Tone { kPlain, kGood, kWarning, kBad };

// In colour when the stream is a terminal and NO_COLOR is not set. The words must say the same without it.
std::string paint(std::FILE* stream, Tone tone, std::string_view text);

// A line on stderr. The text is made printable.
void say(std::string_view text);
void say_error(std::string_view text);
void say_hint(std::string_view text);

// Data on stdout, as it is.
void print(std::string_view text);
// False when something that was printed did not get through (a full disk, say).
bool flush_output();

// "12 s", "3 min", "5 h", "2 d" before now; "in 3 min" for a clock that is ahead.
std::string format_age(std::int64_t time_ms, std::int64_t now_ms);

// One line on stderr that is written over, only where that is a terminal. Any thread.
class ProgressLine {
 public:
  explicit ProgressLine(std::string_view title);
  ~ProgressLine();
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  void update(std::uint64_t done_bytes, std::uint64_t all_bytes);

 private:
  using Clock = std::chrono::steady_clock;

  const std::string title_;
  const bool shown_;
  const Clock::time_point begin_ = Clock::now();
  std::mutex mutex_;
  Clock::time_point last_{};  // guarded by mutex_
  bool drawn_ = false;        // guarded by mutex_
};

}  // namespace unbroken::cli
