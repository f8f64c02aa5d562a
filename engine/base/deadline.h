// A point in time after which waiting is given up. Monotonic clock: a wall clock that jumps changes nothing.
#pragma once

#include <algorithm>
#include <chrono>

namespace unbroken {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  static Deadline after(std::chrono::milliseconds wait) { return Deadline(Clock::now() + wait); }
  // At most ten years, so that no sum overflows.
  static Deadline after_seconds(double seconds) {
    constexpr double kLongest = 10 * 365.25 * 24 * 3600;
    seconds = seconds < 0 ? 0 : seconds < kLongest ? seconds : kLongest;
    return Deadline(Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds)));
  }

  bool passed() const { return Clock::now() >= at_; }
  std::chrono::milliseconds left() const {
    return std::max(std::chrono::milliseconds(0),
                    std::chrono::duration_cast<std::chrono::milliseconds>(at_ - Clock::now()));
  }

 private:
  explicit Deadline(Clock::time_point at) : at_(at) {}
  Clock::time_point at_;
};

}  // namespace unbroken
