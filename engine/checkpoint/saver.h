// The saves of one life on one rank: decisions, attempts, retention, in order.
//
// Threads: decide() on the training thread, commit() and retain() on one background thread; both may run at the same
// time. Blocking, errors and what a crash leaves: as decision.h, commit.h and retention.h say.
#pragma once

#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/commit.h"
#include "checkpoint/decision.h"
#include "checkpoint/recovery.h"
#include "checkpoint/retention.h"

namespace unbroken {

struct SaverOptions {
  std::uint64_t rank = 0;
  std::uint64_t world_size = 1;
  Keep keep{};
  double vote_timeout_seconds = 600;
  double decision_timeout_seconds = 60;
};

class Saver {
 public:
  Saver(Store& store, Board& board, const Start& start, SaverOptions options);

  Result<StepDecision> decide(std::uint64_t step, const StepRequest& request);
  // Fills in what the life knows (key, parent, timeouts) and runs the protocol to its end.
  SaveOutcome commit(const Image* image, SaveRequest request);
  // After a save that became durable: removes what need not be kept, on the coordinator; returns the directories. Apart
  // from commit(), so that nobody waits for it who waits for the save.
  Result<std::vector<std::string>> retain();

 private:
  void forget_attempt(const std::string& attempt);

  Store& store_;
  Board& board_;
  LifeContext life_;
  SaverOptions options_;
  Decider decider_;
  std::string parent_;
  std::set<std::string> committed_;  // by this life and not retired since
  std::string last_attempt_;         // id; its keys go when the next one has ended

  std::mutex mutex_;  // guards the two below
  std::string unreleased_attempt_;
  std::vector<std::uint64_t> unreleased_ranks_;
};

}  // namespace unbroken
