// Runs two actors against one another, one operation at a time, in an order that a test chooses.
//
// Each actor works on a FaultStore of its own over one common store. Its script calls wait() before every operation;
// whose turn it is follows from the plan.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "testing/fault_store.h"

namespace unbroken {

class Turns {
 public:
  static constexpr std::uint64_t kToTheEnd = ~std::uint64_t{0};
  struct Segment {
    int actor = 0;
    std::uint64_t operations = 0;
  };

  // After the plan actor 0 runs to its end, then actor 1.
  explicit Turns(std::vector<Segment> plan) : plan_(plan.begin(), plan.end()) {
    plan_.push_back({0, kToTheEnd});
    plan_.push_back({1, kToTheEnd});
  }

  // For the actor's store. It dies before its operation number `dies_at`.
  FaultScript script(int actor, std::uint64_t dies_at = kToTheEnd) {
    return [this, actor, dies_at](const Operation& operation) {
      if (operation.index == dies_at) return Fault::killed_before();
      Fault fault;
      fault.before = [this, actor] { wait(actor); };
      return fault;
    };
  }

  // The actor has come to its end.
  void leave(int actor) {
    const std::lock_guard lock(mutex_);
    left_[actor] = true;
    skip();
    moved_.notify_all();
  }

 private:
  void wait(int actor) {
    std::unique_lock lock(mutex_);
    skip();
    moved_.wait(lock, [&] { return plan_.empty() || plan_.front().actor == actor; });
    if (plan_.empty()) return;
    if (plan_.front().operations != kToTheEnd) --plan_.front().operations;
    skip();
    moved_.notify_all();
  }

  // With mutex_ held: past turns that are over.
  void skip() {
    while (!plan_.empty() && (plan_.front().operations == 0 || left_[plan_.front().actor])) plan_.pop_front();
  }

  std::mutex mutex_;
  std::condition_variable moved_;
  std::deque<Segment> plan_;
  bool left_[2] = {false, false};
};

}  // namespace unbroken
