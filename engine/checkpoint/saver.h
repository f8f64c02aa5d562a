// The saves of one life on one rank: decisions, attempts, retention, in order.
//
// Threads: decide() on the training thread, commit() and retain() on one background thread; both may run at the same
// time. Blocking, errors and what a crash leaves: as decision.h, commit.h and retention.h say.
#pragma once

#include <atomic>
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
  std::uint64_t steps_ahead = 1;  // see Decider
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
  // The process is leaving because something else went wrong: a save in flight waits for others a few
  // seconds more and then fails. Any thread.
  void cancel() { cancelled_.store(true); }

 private:
  void make_room(const std::string& under_way);
  void forget_attempts();

  Store& store_;
  Board& board_;
  LifeContext life_;
  SaverOptions options_;
  Decider decider_;
  std::string parent_;
  std::set<std::string> committed_;  // by this life and not retired since
  std::vector<std::string> ended_;   // ids of attempts whose keys go when the next one has ended
  bool garbage_ = true;              // an attempt may have left files: of an older life, or one that failed
  std::atomic<bool> cancelled_{false};

  std::mutex mutex_;          // guards what follows
  bool all_released_ = true;  // no rank is still writing to an attempt that has failed
  std::string unreleased_attempt_;
  std::vector<std::uint64_t> unreleased_ranks_;
};

}  // namespace unbroken
