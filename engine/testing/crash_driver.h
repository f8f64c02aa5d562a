// Injects one fault at one place of a run, where a place is an operation of the store or a named point between two
// steps (base/crash_point.h). A run without a fault lists its places; then the run is repeated with a fault at each of
// them.
//
// Random ids in paths are left out of a place's name, and a place is found again by name and count: ranks that are
// threads may do their parts in any order. Installs the process's crash handler and the store's script while it lives:
// one at a time.
#pragma once

#include <atomic>
#include <compare>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "testing/fault_store.h"

namespace unbroken {

struct CrashPlace {
  std::string what{};   // an operation ("publish"), or "point"
  std::string where{};  // its path, attempts without their ids, or the point's name
  std::uint64_t nth = 0;
  std::uint64_t bytes = 0;  // of the operation
  auto operator<=>(const CrashPlace&) const = default;

  bool is_point() const { return what == "point"; }
  std::string text() const;  // "publish step-30-g1/.metadata #0"
};

struct CrashFault {
  enum class Kind {
    kFail,        // the operation is not carried out; an error returns from the point
    kReplyLost,   // carried out, but the caller gets the error
    kTornFail,    // carried out in part, and fails
    kKillBefore,  // the process ends before the operation, or at the point
    kKillAfter,
    kKillWithin,  // carried out in part
    kPowerAll,    // the power goes before it: nothing that was not synced survives
    kPowerRandom,
  };
  Kind kind = Kind::kFail;
  Code code = Code::kIo;   // of the error
  std::uint64_t part = 0;  // of what is torn
  std::uint64_t seed = 0;  // of kPowerRandom

  bool kills() const { return kind >= Kind::kKillBefore; }
  std::string text() const;
};

inline constexpr int kKilledExit = 137;

class CrashDriver {
 public:
  explicit CrashDriver(FaultStore& store);
  ~CrashDriver();
  CrashDriver(const CrashDriver&) = delete;
  CrashDriver& operator=(const CrashDriver&) = delete;

  // From now on this fault happens at that place. A kill ends the process with _exit(kKilledExit), after the power loss
  // if there is to be one; to be called in a child, then.
  void arm(CrashPlace place, CrashFault fault);
  // Called at every place, before anything happens there; to be set before the run.
  void watch(std::function<void(const CrashPlace&)> watcher) { watcher_ = std::move(watcher); }
  bool reached() const { return reached_.load(); }
  // So far, in the order in which they were reached.
  std::vector<CrashPlace> places() const;
  // Ends the process as a fault would.
  [[noreturn]] void die(const CrashFault& fault);

 private:
  // Counts the place; the fault if it is the one.
  std::optional<CrashFault> pass(std::string_view what, std::string_view where, std::uint64_t bytes);
  Fault carry_out(const CrashFault& fault);

  FaultStore& store_;
  std::function<void(const CrashPlace&)> watcher_;
  std::optional<CrashPlace> place_;
  CrashFault fault_;
  std::atomic<bool> reached_{false};
  std::atomic<bool> dying_{false};
  mutable std::mutex mutex_;  // guards the two below
  std::map<std::string, std::uint64_t> counts_;
  std::vector<CrashPlace> places_;
};

// A path without the random ids of attempts: "step-30-g1-4f1c9a2e/x" gives "step-30-g1/x".
std::string without_ids(std::string_view path);

// Checks cases 0 to `count` - 1, several at once in forked children, for most of a case's time goes by in waiting.
// `check` says what is wrong, "" if nothing. Returns what was wrong; a child stops at its first.
std::vector<std::string> check_cases(std::size_t count, const std::function<std::string(std::size_t)>& check);

// Runs `work` in a forked child and returns its exit status as a shell would see it (128 + a signal's number).
int run_in_child(const std::function<void()>& work);

}  // namespace unbroken
