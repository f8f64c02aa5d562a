// Reading again after an input error. It may be a hiccup of a device or of the network below it, while what is
// concluded from it is final: a checkpoint that is called damaged is given up, a record that cannot be read constrains
// nothing. Any thread; blocks for up to kLooks - 1 intervals.
#pragma once

#include <chrono>
#include <thread>

#include "base/error.h"

namespace unbroken {

// Calls `read`, a function that returns a Result or Status, until it gives something other than kIo, a few times at
// most.
template <class Read>
auto read_patiently(const Read& read) {
  constexpr int kLooks = 3;
  constexpr auto kInterval = std::chrono::milliseconds(100);
  auto answer = read();
  for (int look = 1; look < kLooks && !answer && answer.error().code == Code::kIo; ++look) {
    std::this_thread::sleep_for(kInterval);
    answer = read();
  }
  return answer;
}

}  // namespace unbroken
