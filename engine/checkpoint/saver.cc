#include "checkpoint/saver.h"

#include <fmt/core.h>

namespace unbroken {

Saver::Saver(Store& store, Board& board, const Start& start, SaverOptions options)
    : store_(store),
      board_(board),
      life_{.run_id = start.run_id,
            .life_id = start.life_id,
            .generation = start.generation,
            .rank = options.rank,
            .world_size = options.world_size},
      options_(options),
      decider_(board, life_, options.decision_timeout_seconds, options.steps_ahead),
      parent_(start.attempt) {}

Result<StepDecision> Saver::decide(std::uint64_t step, const StepRequest& request) {
  {
    const std::lock_guard lock(mutex_);
    if (!unreleased_ranks_.empty()) decider_.await_release(unreleased_attempt_, unreleased_ranks_);
    unreleased_ranks_.clear();
  }
  auto decision = decider_.decide(step, request);
  const std::lock_guard lock(mutex_);
  all_released_ = decider_.all_released();
  return decision;
}

SaveOutcome Saver::commit(const Image* image, SaveRequest request) {
  request.key.generation = life_.generation;
  request.parent = parent_;
  request.vote_timeout_seconds = options_.vote_timeout_seconds;
  request.cancelled = &cancelled_;
  if (life_.rank == 0) make_room(attempt_directory(request.key, request.attempt));
  SaveOutcome outcome = commit_attempt(store_, board_, life_, image, request);
  if (outcome.state == SaveOutcome::State::kDurable) {
    parent_ = outcome.attempt_path;
    committed_.insert(outcome.attempt_path);
  }
  if (life_.rank == 0) {
    const std::lock_guard lock(mutex_);
    unreleased_attempt_ = request.attempt;
    unreleased_ranks_ = outcome.missing;
  }
  garbage_ = garbage_ || outcome.state == SaveOutcome::State::kFailed;
  if (life_.rank == 0) {
    // When all ranks have voted in this attempt, none is still reading the keys of those before.
    if (outcome.missing.empty()) forget_attempts();
    ended_.push_back(request.attempt);
  }
  return outcome;
}

// What killed and failed attempts have left can fill the disk, and then no save would ever succeed and lead to
// retention.
void Saver::make_room(const std::string& under_way) {
  if (!garbage_ || options_.keep.last == 0) return;
  {
    const std::lock_guard lock(mutex_);
    if (!all_released_ || !unreleased_ranks_.empty()) return;
  }
  const auto removed = remove_garbage(store_, life_, under_way);
  if (removed) garbage_ = false;
  removed.ignore("the save says what is wrong with the place, if something is");
}

Result<std::vector<std::string>> Saver::retain() {
  if (life_.rank != 0) return std::vector<std::string>();
  UNBROKEN_ASSIGN(auto retired, unbroken::retain(store_, life_, options_.keep, committed_));
  for (const auto& name : retired) committed_.erase(name);
  return retired;
}

void Saver::forget_attempts() {
  std::vector<std::string> keys;
  for (const auto& attempt : ended_) {
    keys.push_back(attempt_key(life_, attempt, "outcome"));
    for (std::uint64_t rank = 0; rank < life_.world_size; ++rank) {
      keys.push_back(attempt_key(life_, attempt, fmt::format("vote/{}", rank)));
      keys.push_back(attempt_key(life_, attempt, fmt::format("done/{}", rank)));
    }
  }
  ended_.clear();
  if (!keys.empty()) board_.erase(keys).ignore("old keys only take memory");
}

}  // namespace unbroken
