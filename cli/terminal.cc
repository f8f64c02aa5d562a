#include "cli/terminal.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>

#include "base/bytes.h"

namespace unbroken::cli {
namespace {

struct CodePoint {
  char32_t value = 0;
  std::size_t bytes = 0;  // 0: not UTF-8
};

// Strict: no overlong forms, no surrogates, nothing past U+10FFFF.
CodePoint decode(std::string_view text) {
  const auto at = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = at(0);
  if (lead < 0x80) return {lead, 1};
  const std::size_t bytes = lead >= 0xF0 && lead < 0xF8 ? 4 : lead >= 0xE0 ? 3 : lead >= 0xC2 ? 2 : 0;
  if (bytes == 0 || lead >= 0xF5 || text.size() < bytes) return {};
  char32_t value = lead & (0x7FU >> bytes);
  for (std::size_t i = 1; i < bytes; ++i) {
    if ((at(i) & 0xC0U) != 0x80U) return {};
    value = (value << 6U) | (at(i) & 0x3FU);
  }
  constexpr std::array<char32_t, 5> kLeast = {0, 0, 0x80, 0x800, 0x10000};
  if (value < kLeast[bytes] || value > 0x10FFFF || (value >= 0xD800 && value <= 0xDFFF)) return {};
  return {value, bytes};
}

bool is_harmless(char32_t c) {
  struct Range {
    char32_t first;
    char32_t last;
  };
  // Controls, soft hyphen, zero-width and direction marks, separators of lines, invisible operators, byte order marks,
  // interlinear marks, tags.
  constexpr std::array<Range, 10> kHarmful = {{{0x00, 0x1F},
                                               {0x7F, 0x9F},
                                               {0xAD, 0xAD},
                                               {0x061C, 0x061C},
                                               {0x200B, 0x200F},
                                               {0x2028, 0x202E},
                                               {0x2060, 0x206F},
                                               {0xFEFF, 0xFEFF},
                                               {0xFFF9, 0xFFFB},
                                               {0xE0000, 0xE007F}}};
  return std::none_of(kHarmful.begin(), kHarmful.end(), [&](const Range& r) { return c >= r.first && c <= r.last; });
}

std::string escape(char32_t c) {
  if (c == '\n') return "\\n";
  if (c == '\t') return "\\t";
  if (c < 0x80) return fmt::format("\\x{:02x}", static_cast<unsigned>(c));
  return c <= 0xFFFF ? fmt::format("\\u{:04x}", static_cast<unsigned>(c))
                     : fmt::format("\\U{:08x}", static_cast<unsigned>(c));
}

bool wants_colour(std::FILE* stream) {
  const char* no_colour = std::getenv("NO_COLOR");
  if (no_colour != nullptr && *no_colour != '\0') return false;
  const char* term = std::getenv("TERM");
  if (term == nullptr || std::string_view(term) == "dumb") return false;
  return ::isatty(::fileno(stream)) == 1;
}

void write_error_line(std::string_view line) {
  std::fwrite(line.data(), 1, line.size(), stderr);
  std::fputc('\n', stderr);
}

}  // namespace

std::string printable(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    const CodePoint c = decode(text);
    const std::size_t bytes = std::max<std::size_t>(c.bytes, 1);
    if (c.bytes == 0) {
      result += fmt::format("\\x{:02x}", static_cast<unsigned char>(text.front()));
    } else if (is_harmless(c.value)) {
      result += text.substr(0, bytes);
    } else {
      result += escape(c.value);
    }
    text.remove_prefix(bytes);
  }
  return result;
}

std::size_t width_of(std::string_view printable_text) {
  return static_cast<std::size_t>(std::count_if(printable_text.begin(), printable_text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U;
  }));
}

std::string paint(std::FILE* stream, Tone tone, std::string_view text) {
  if (tone == Tone::kPlain || !wants_colour(stream)) return std::string(text);
  const int colour = tone == Tone::kGood ? 32 : tone == Tone::kWarning ? 33 : 31;
  return fmt::format("\x1b[{}m{}\x1b[0m", colour, text);
}

void say(std::string_view text) { write_error_line(printable(text)); }

void say_error(std::string_view text) { write_error_line(paint(stderr, Tone::kBad, "error:") + " " + printable(text)); }

void say_hint(std::string_view text) {
  if (!text.empty()) write_error_line(paint(stderr, Tone::kWarning, "hint:") + " " + printable(text));
}

void print(std::string_view text) { std::fwrite(text.data(), 1, text.size(), stdout); }

bool flush_output() { return std::fflush(stdout) == 0 && std::ferror(stdout) == 0; }

std::string format_age(std::int64_t time_ms, std::int64_t now_ms) {
  // In floating point: a hostile time must not overflow.
  const double seconds = (static_cast<double>(now_ms) - static_cast<double>(time_ms)) / 1000;
  const double size = std::abs(seconds);
  const std::string amount = size < 60          ? fmt::format("{:.0f} s", std::floor(size))
                             : size < 3600      ? fmt::format("{:.0f} min", std::floor(size / 60))
                             : size < 48 * 3600 ? fmt::format("{:.0f} h", std::floor(size / 3600))
                                                : fmt::format("{:.0f} d", std::floor(size / 86400));
  return seconds <= -1 ? "in " + amount : amount;
}

ProgressLine::ProgressLine(std::string_view title) : title_(printable(title)), shown_(::isatty(STDERR_FILENO) == 1) {}

ProgressLine::~ProgressLine() {
  if (drawn_) std::fputs("\r\x1b[K", stderr);
}

void ProgressLine::update(std::uint64_t done_bytes, std::uint64_t all_bytes) {
  constexpr auto kInterval = std::chrono::milliseconds(100);
  if (!shown_) return;
  const std::lock_guard lock(mutex_);
  const auto now = Clock::now();
  if (now - last_ < kInterval) return;
  last_ = now;
  const double seconds = std::chrono::duration<double>(now - begin_).count();
  const double rate = seconds > 0 ? static_cast<double>(done_bytes) / seconds : 0;
  const double percent = all_bytes > 0 ? 100 * static_cast<double>(done_bytes) / static_cast<double>(all_bytes) : 100;
  const std::string line = fmt::format("\r{}: {:.0f} % of {}, {}/s\x1b[K", title_, percent, format_bytes(all_bytes),
                                       format_bytes(static_cast<std::uint64_t>(rate)));
  std::fputs(line.c_str(), stderr);
  std::fflush(stderr);
  drawn_ = true;
}

}  // namespace unbroken::cli
