#include "checkpoint/decision.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "checkpoint/generation.h"
#include "checkpoint/sealed_json.h"

namespace unbroken {
namespace {

using nlohmann::json;
using Action = StepDecision::Action;

constexpr std::string_view kSave = "save";
constexpr std::string_view kStop = "stop";
constexpr std::size_t kAttemptIdBytes = 4;
constexpr double kStopPatienceSeconds = 5;
constexpr std::size_t kMostMissed = 16;
constexpr std::size_t kKeptNotes = 64;

}  // namespace

std::string_view action_name(Action action) {
  switch (action) {
    case Action::kNone: return "none";
    case Action::kSave: return "save";
    case Action::kDeferred: return "deferred";
    case Action::kStop: return "stop";
  }
  return "none";
}

std::string Decider::key(std::string_view what, std::uint64_t step) const {
  return fmt::format("g{}/{}/{}", life_.generation, what, step);
}

// By step, not by count: a rank that misses one is with the others again at the next.
std::string Decider::decision_key(std::uint64_t step) {
  if (step != decided_step_) decisions_ = 0;
  decided_step_ = step;
  return fmt::format("{}/{}", key("decision", step), decisions_++);
}

Result<StepDecision> Decider::decide(std::uint64_t step, const StepRequest& request) {
  bool announced = false;
  bool stopping = false;
  if (life_.world_size == 1) {
    // Nobody else has to hear of it first.
    announced = request.wanted && !request.busy;
    stopping = request.stop;
  } else {
    UNBROKEN_ASSIGN(const auto event, board_get(board_, key("event", step)));
    announced = event == kSave;
    stopping = event == kStop;
    UNBROKEN_TRY(post_events(step, request));
    answer_missed();
  }
  if (!request.due && !request.is_explicit && !announced && !stopping) return StepDecision();

  const std::string place = decision_key(step);
  if (!coordinator()) return hear_decision(step, place);
  auto decision = make_decision(request, stopping);
  if (!decision) return decision;
  const json note = {{"step", step},
                     {"action", action_name(decision->action)},
                     {"attempt", decision->attempt},
                     {"sequence", decision->sequence},
                     {"plan_anew", decision->plan_anew}};
  forget_old_keys(step);
  posted_.push_back({step, place});
  UNBROKEN_TRY(board_.set(posted_.back().key, note.dump()));
  return decision;
}

Status Decider::post_events(std::uint64_t step, const StepRequest& request) {
  const std::uint64_t read_at = step + steps_ahead_;
  const std::string next = key("event", read_at);
  if (request.stop && !stop_posted_) {
    // Of several ranks the first fixes the step; where a save was announced already, the stop follows it.
    UNBROKEN_ASSIGN(const std::string there, board_.set_if_absent(next, kStop));
    stop_posted_ = there == kStop;
    posted_.push_back({read_at, next});
  } else if (coordinator() && request.wanted && !request.busy) {
    UNBROKEN_ASSIGN([[maybe_unused]] const std::string there, board_.set_if_absent(next, kSave));
    posted_.push_back({read_at, next});
  }
  return {};
}

Result<StepDecision> Decider::make_decision(const StepRequest& request, bool stopping) {
  const bool must = stopping || request.is_explicit;
  if (!must && request.busy) return StepDecision{.action = Action::kDeferred};
  // A run that is asked to stop has half a minute until it is killed; a rank that is still busy then votes so.
  const double patience = stopping ? std::min(kStopPatienceSeconds, timeout_seconds_) : must ? timeout_seconds_ : 0;
  UNBROKEN_ASSIGN(const bool busy, others_busy(Deadline::after_seconds(patience)));
  if (busy && !must) return StepDecision{.action = Action::kDeferred};
  return StepDecision{.action = stopping ? Action::kStop : Action::kSave,
                      .attempt = random_hex(kAttemptIdBytes),
                      .sequence = ++sequence_,
                      .plan_anew = request.plan_anew};
}

// A decision that came too late for this rank may have begun an attempt: then the others wait for its vote, and the
// coordinator for its word that it is free. Both are given here, at a later step.
void Decider::answer_missed() {
  std::deque<std::string> still;
  for (auto& place : missed_) {
    const auto text = board_get(board_, place);
    if (!text || !*text) {
      if (still.size() < kMostMissed) still.push_back(std::move(place));
      continue;
    }
    const json note = json::parse(**text, nullptr, false);
    const std::string attempt = note.is_object() ? note.value("attempt", std::string()) : std::string();
    if (attempt.empty()) continue;
    const Vote refusal{.structure = {},
                       .part = {},
                       .object_slots = {},
                       .error = "the decision to save came too late for this rank",
                       .code = Code::kDeadline};
    board_.set(attempt_key(life_, attempt, fmt::format("vote/{}", life_.rank)), encode_vote(refusal))
        .ignore("the attempt fails without it, too");
    board_.set(attempt_key(life_, attempt, fmt::format("done/{}", life_.rank)), "1")
        .ignore("a rank that is not seen as free only defers saves");
  }
  missed_ = std::move(still);
}

Result<StepDecision> Decider::hear_decision(std::uint64_t step, const std::string& place) {
  // An explicit save may make the coordinator wait for busy ranks first.
  auto heard = board_wait(board_, place, Deadline::after_seconds(2 * timeout_seconds_));
  if (!heard) {
    missed_.push_back(place);
    return std::move(heard).error().in(fmt::format(
        "save at step {}: rank {} heard no decision of the coordinator (are step() and save() called equally "
        "often on all ranks?)",
        step, life_.rank));
  }
  const std::string& text = *heard;
  UNBROKEN_ASSIGN(const json parsed, parse_json_object(text, "a decision"));
  JsonFields fields(parsed, "a decision");
  const std::uint64_t decided_step = fields.u64("step");
  const std::string action = fields.text("action");
  StepDecision decision{.action = Action::kDeferred,
                        .attempt = fields.text("attempt"),
                        .sequence = fields.u64("sequence"),
                        .plan_anew = parsed.value("plan_anew", false)};
  UNBROKEN_TRY(fields.finish());
  if (decided_step != step) {
    return make_error(Code::kInternal,
                      fmt::format("save at step {}: the decision is about step {}", step, decided_step));
  }
  if (action == action_name(Action::kSave)) decision.action = Action::kSave;
  if (action == action_name(Action::kStop)) decision.action = Action::kStop;
  return decision;
}

void Decider::await_release(std::string_view attempt, const std::vector<std::uint64_t>& ranks) {
  for (const std::uint64_t rank : ranks) awaited_.push_back(attempt_key(life_, attempt, fmt::format("done/{}", rank)));
}

Result<bool> Decider::others_busy(Deadline deadline) {
  if (awaited_.empty()) return false;
  UNBROKEN_ASSIGN(const auto answers, board_collect(board_, awaited_, deadline));
  std::vector<std::string> still;
  for (std::size_t i = 0; i < answers.size(); ++i) {
    if (!answers[i]) still.push_back(std::move(awaited_[i]));
  }
  awaited_ = std::move(still);
  return !awaited_.empty();
}

void Decider::forget_old_keys(std::uint64_t step) {
  // A rank that is at this step has seen all others leave the last one, so all have read what was meant for the one
  // before. A note for this very step may be unread: other ranks are still on their way to it. Some more are kept for
  // ranks that nothing holds in step.
  std::vector<std::string> old;
  while (posted_.size() > kKeptNotes && posted_.front().step + 1 < step) {
    old.push_back(std::move(posted_.front().key));
    posted_.pop_front();
  }
  if (!old.empty()) board_.erase(old).ignore("old keys only take memory");
}

}  // namespace unbroken
