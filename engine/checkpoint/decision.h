// When the ranks save: one decision, the same on all of them, without a collective.
//
// A save that is due by the count of steps is known to all ranks; they wait for the coordinator's word on it. What only
// one rank knows (time has come, a deferred save can now be made, a signal arrived) is posted for the *next* step:
// ranks in lockstep cannot finish that step before the poster has begun it, so none can miss the note.
// Threads: the training thread of a rank. Blocking: one look at the board a step (none in a world of one); on a step
// where a save is due, until the coordinator has decided, within the deadline. Errors: kDeadline, kUnavailable; the
// rank then takes no part in the attempt, which fails by its name. Crash: nothing is left.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "base/board.h"
#include "base/error.h"
#include "checkpoint/commit.h"

namespace unbroken {

struct StepRequest {
  bool due = false;          // by count of steps, or asked for; equal on all ranks
  bool wanted = false;       // coordinator: a save should come soon (time, or one that was deferred)
  bool stop = false;         // this rank was asked to stop
  bool busy = false;         // this rank's arena is in use
  bool is_explicit = false;  // never deferred; the caller's own arena is free
  bool plan_anew = false;    // coordinator: the structure differs from the plan
};

struct StepDecision {
  enum class Action { kNone, kSave, kDeferred, kStop };
  Action action = Action::kNone;
  std::string attempt{};  // id, for kSave and kStop (which saves, too)
  std::uint64_t sequence = 0;
  bool plan_anew = false;
};
std::string_view action_name(StepDecision::Action action);

class Decider {
 public:
  // `steps_ahead`: how far ahead a note is posted; 1 where ranks finish a step together (their collectives block), 2
  // where the host may be one step ahead of them.
  Decider(Board& board, LifeContext life, double timeout_seconds, std::uint64_t steps_ahead = 1)
      : board_(board), life_(std::move(life)), timeout_seconds_(timeout_seconds), steps_ahead_(steps_ahead) {}

  Result<StepDecision> decide(std::uint64_t step, const StepRequest& request);

  // Coordinator: ranks that had not voted in `attempt` are busy until they say that they have stopped.
  void await_release(std::string_view attempt, const std::vector<std::uint64_t>& ranks);
  bool all_released() const { return awaited_.empty(); }

 private:
  bool coordinator() const { return life_.rank == 0; }
  std::string key(std::string_view what, std::uint64_t step) const;
  std::string decision_key(std::uint64_t step);
  Status post_events(std::uint64_t step, const StepRequest& request);
  Result<StepDecision> make_decision(const StepRequest& request, bool stopping);
  Result<StepDecision> hear_decision(std::uint64_t step, const std::string& key);
  void answer_missed();
  Result<bool> others_busy(Deadline deadline);
  void forget_old_keys(std::uint64_t step);

  Board& board_;
  LifeContext life_;
  double timeout_seconds_;
  std::uint64_t steps_ahead_;
  std::uint64_t decided_step_ = 0;  // of the last decision that this rank took part in, or should have
  std::uint64_t decisions_ = 0;     // at that step
  std::deque<std::string> missed_;  // decisions that did not come in time
  std::uint64_t sequence_ = 0;
  bool stop_posted_ = false;
  std::vector<std::string> awaited_;  // keys that busy ranks will set
  struct Posted {
    std::uint64_t step = 0;  // at which the ranks read it
    std::string key;
  };
  std::deque<Posted> posted_;  // coordinator: not forgotten yet
};

}  // namespace unbroken
