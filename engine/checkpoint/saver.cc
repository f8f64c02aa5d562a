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
      decider_(board, life_, options.decision_timeout_seconds),
      parent_(start.attempt) {}

Result<StepDecision> Saver::decide(std::uint64_t step, const StepRequest& request) {
  {
    const std::lock_guard lock(mutex_);
    if (!unreleased_ranks_.empty()) decider_.await_release(unreleased_attempt_, unreleased_ranks_);
    unreleased_ranks_.clear();
  }
  return decider_.decide(step, request);
}

SaveOutcome Saver::commit(const Image* image, SaveRequest request) {
  request.key.generation = life_.generation;
  request.parent = parent_;
  request.vote_timeout_seconds = options_.vote_timeout_seconds;
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
  if (life_.rank == 0 && outcome.state == SaveOutcome::State::kDurable) {
    // All ranks voted in this attempt, so none is still reading the keys of the one before.
    forget_attempt(last_attempt_);
    last_attempt_ = request.attempt;
  }
  return outcome;
}

Result<std::vector<std::string>> Saver::retain() {
  if (life_.rank != 0) return std::vector<std::string>();
  UNBROKEN_ASSIGN(auto retired, unbroken::retain(store_, life_, options_.keep, committed_));
  for (const auto& name : retired) committed_.erase(name);
  return retired;
}

void Saver::forget_attempt(const std::string& attempt) {
  if (attempt.empty()) return;
  std::vector<std::string> keys{attempt_key(life_, attempt, "outcome")};
  for (std::uint64_t rank = 0; rank < life_.world_size; ++rank) {
    keys.push_back(attempt_key(life_, attempt, fmt::format("vote/{}", rank)));
    keys.push_back(attempt_key(life_, attempt, fmt::format("done/{}", rank)));
  }
  board_.erase(keys).ignore("old keys only take memory");
}

}  // namespace unbroken
