// How a run starts. The coordinator:
//   S1. claims a number (generation.cc), so that older lives commit and remove nothing any more. Where there is nothing
//       to choose from, nothing is claimed (a store that does not answer is asked again until the deadline, then the
//       start fails: unreachable is never absent);
//   S2. lists the records of lives and the attempts, *after* the claim: what an older life committed is seen before
//       what it removed for that is missed. An attempt that is retired may be taken back, so it is looked at until it
//       stands still;
//   S3. takes the newest complete attempt on the branch that no life has refused, and checks that every file of its
//       manifest is there with its length; one that is not is refused, with the reason, and the next older one is
//       looked at;
//   S4. looks whether a newer start has taken a number since S1, and if so ends; creates the record of the new life,
//       which names the choice and what was refused: so a bad checkpoint is never tried twice;
//   S5. tells the ranks.
// The ranks load, verify as they read, and report. If one found damage, all drop the checkpoint and the coordinator
// goes through S1 to S5 again; if a store was unreachable, all stop.
#include "checkpoint/recovery.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/crash_point.h"
#include "checkpoint/sealed_json.h"

namespace unbroken {
namespace {

using nlohmann::json;

constexpr auto kRetryInterval = std::chrono::milliseconds(500);
constexpr std::size_t kRunIdBytes = 8;
constexpr std::size_t kLifeIdBytes = 8;

std::string_view verdict_name(Verdict verdict) {
  switch (verdict) {
    case Verdict::kLoaded: return "loaded";
    case Verdict::kDamaged: return "damaged";
    case Verdict::kUnreachable: return "unreachable";
    case Verdict::kFailed: return "failed";
  }
  return "failed";
}

std::string dump(const json& value) { return value.dump(-1, ' ', false, json::error_handler_t::replace); }

std::string encode_error(const Error& error) {
  return dump({{"error", error.message}, {"code", static_cast<int>(error.code)}});
}

Error decode_error(const json& note) {
  const int code = note.value("code", static_cast<int>(Code::kInternal));
  const bool known = code >= 0 && code <= static_cast<int>(Code::kInternal);
  return make_error(known ? static_cast<Code>(code) : Code::kInternal,
                    note.value("error", std::string("unknown error")));
}

std::string encode_start(const Start& start) {
  json refused = json::array();
  for (const auto& refusal : start.refused) refused.push_back({refusal.attempt, refusal.reason});
  return dump({{"generation", start.generation},
               {"run_id", start.run_id},
               {"life_id", start.life_id},
               {"fresh", start.fresh},
               {"step", start.key.step},
               {"key_generation", start.key.generation},
               {"sequence", start.key.sequence},
               {"attempt", start.attempt},
               {"manifest", start.manifest},
               {"refused", std::move(refused)},
               {"account", start.account},
               {"warnings", start.warnings}});
}

Result<Start> decode_start(std::string_view text) {
  constexpr std::string_view kName = "the coordinator's choice";
  UNBROKEN_ASSIGN(const json note, parse_json_object(text, kName));
  if (note.contains("error")) return decode_error(note);
  JsonFields fields(note, kName);
  Start start{.generation = fields.u64("generation"),
              .run_id = fields.text("run_id"),
              .life_id = fields.text("life_id"),
              .fresh = note.value("fresh", true),
              .key = {.step = fields.u64("step"),
                      .generation = fields.u64("key_generation"),
                      .sequence = fields.u64("sequence")},
              .attempt = fields.text("attempt"),
              .manifest = fields.text("manifest"),
              .refused = {},
              .account = fields.text("account"),
              .warnings = {}};
  UNBROKEN_TRY(fields.finish());
  for (const auto& entry : note.value("refused", json::array())) {
    start.refused.push_back({entry.at(0).get<std::string>(), entry.at(1).get<std::string>()});
  }
  for (const auto& entry : note.value("warnings", json::array())) start.warnings.push_back(entry.get<std::string>());
  return start;
}

std::string give_account(const Start& start, const Catalog& catalog, const Choice& choice, bool asked_for,
                         const Store& store) {
  std::string account;
  if (start.fresh) {
    account = fmt::format("generation {} starts fresh at step 0: no checkpoint was ever complete in {}",
                          start.generation, store.url());
    if (!choice.evidence.empty())
      account = fmt::format("generation {} starts fresh at step 0, as allow_fresh says", start.generation);
  } else {
    account =
        fmt::format("generation {} goes on from step {} ({}), {}", start.generation, start.key.step, start.attempt,
                    asked_for             ? "as asked for"
                    : choice.attempt == 0 ? "the newest checkpoint"
                                          : "the newest usable checkpoint on the branch");
  }
  for (const auto& refusal : start.refused) account += fmt::format("; refused {}: {}", refusal.attempt, refusal.reason);
  if (!start.fresh && !asked_for) {
    for (std::size_t i = 0; i < choice.attempt; ++i) {
      const AttemptInfo& passed = catalog.attempts[i];
      const bool refused = std::any_of(start.refused.begin(), start.refused.end(),
                                       [&](const auto& refusal) { return refusal.attempt == passed.name; });
      if (!refused)
        account += fmt::format("; passed over {} ({}: {})", passed.name, state_name(passed.state), passed.reason);
    }
  }
  if (!store.abilities().create_if_absent) {
    account += "; this store cannot create a file only if it is absent: two starts at once are detected, not prevented";
  }
  return account;
}

// What the user must hear of although the start goes well.
std::vector<std::string> warn(const Start& start, const Catalog& catalog) {
  std::vector<std::string> warnings;
  for (const auto& entry : catalog.generations) {
    if (entry.record || entry.claim_only || entry.number == start.generation) continue;
    warnings.push_back(
        fmt::format("the record of generation {} cannot be read, so a checkpoint that it gave up counts again: {}",
                    entry.number, entry.error));
  }
  if (!start.fresh) return warnings;
  for (const auto& info : catalog.attempts) {
    if (info.state != AttemptState::kForeign) continue;
    warnings.push_back(fmt::format(
        "{} is a checkpoint that Unbroken did not write, so this run does not go on from it; unbroken.load() reads it",
        info.name));
  }
  return warnings;
}

}  // namespace

Choice choose(const Catalog& catalog, const std::vector<Refusal>& refused, const RecoveryOptions& options) {
  Choice choice;
  const auto refusals = [&] {
    auto all = all_refusals(catalog.generations);
    all.insert(all.end(), refused.begin(), refused.end());
    return all;
  }();
  for (std::size_t i = 0; i < catalog.attempts.size(); ++i) {
    const AttemptInfo& info = catalog.attempts[i];
    if (info.state == AttemptState::kForeign) continue;
    const auto refusal =
        std::find_if(refusals.begin(), refusals.end(), [&](const auto& r) { return r.attempt == info.name; });
    const bool asked_for = !options.step || info.key.step == *options.step;
    if (asked_for && info.state == AttemptState::kComplete && refusal == refusals.end()) {
      choice.kind = Choice::Kind::kAttempt;
      choice.attempt = i;
      return choice;
    }
    // Evidence that something was complete on this branch: a start that found nothing must not pass for a fresh one.
    // One that was refused is off the branch of the older one that was tried instead, and no less there for that.
    const bool has_whole_marker = info.has_marker && info.state != AttemptState::kIncomplete;
    const bool was_committed = has_whole_marker && (info.on_branch || !info.has_record || refusal != refusals.end());
    if (was_committed || (options.step && asked_for)) {
      const std::string reason = refusal != refusals.end() ? "refused before: " + refusal->reason
                                 : !info.has_record ? fmt::format("generation {}, which wrote it, has no record in {}/",
                                                                  info.key.generation, kGenerationsDirectory)
                                 : info.reason.empty() ? fmt::format("it is of step {}", info.key.step)
                                                       : fmt::format("{}: {}", state_name(info.state), info.reason);
      choice.evidence.push_back(fmt::format("{}: {}", info.name, reason));
    }
  }
  if (options.step) {
    choice.kind = Choice::Kind::kNothing;
  } else if (choice.evidence.empty() && was_ever_complete(catalog.generations)) {
    choice.evidence.push_back("the records of earlier lives speak of checkpoints, but none is there any more");
  }
  if (!choice.evidence.empty() && !options.allow_fresh) choice.kind = Choice::Kind::kNothing;
  return choice;
}

// One of a newer format that would come before the choice: it is never passed over in silence.
Status Recovery::check_supported(const Catalog& catalog, const Choice& choice) const {
  const auto unsupported = std::find_if(catalog.attempts.begin(), catalog.attempts.end(), [](const auto& info) {
    return info.state == AttemptState::kUnsupported && info.on_branch;
  });
  const auto place = static_cast<std::size_t>(unsupported - catalog.attempts.begin());
  const bool in_the_way = unsupported != catalog.attempts.end() && !options_.step &&
                          (choice.kind != Choice::Kind::kAttempt || place < choice.attempt);
  return in_the_way ? Status(make_error(Code::kUnsupported, unsupported->reason)) : Status();
}

Recovery::Recovery(Store& store, Board& board, RecoveryOptions options)
    : store_(store), board_(board), options_(std::move(options)) {}

std::string Recovery::key(std::string_view what) const { return fmt::format("start/{}/{}", round_, what); }

Result<Start> Recovery::begin() {
  if (options_.rank == 0) return share(coordinate());
  UNBROKEN_ASSIGN(const std::string text,
                  board_wait(board_, key("choice"), Deadline::after_seconds(options_.timeout_seconds * 2)));
  UNBROKEN_ASSIGN(current_, decode_start(text));
  return current_;
}

// S5.
Result<Start> Recovery::share(Result<Start> mine) {
  UNBROKEN_TRY(board_.set(key("choice"), mine ? encode_start(*mine) : encode_error(mine.error())));
  UNBROKEN_CRASH_POINT("start.5.ranks_told");
  if (mine) current_ = *mine;
  return mine;
}

Result<Catalog> Recovery::read_patiently(Deadline deadline) {
  while (true) {
    auto catalog = read_catalog(store_, Depth::kManifest);
    if (catalog || !catalog.error().retryable || deadline.passed()) return catalog;
    std::this_thread::sleep_for(kRetryInterval);
  }
}

// S2.
Result<Catalog> Recovery::read_settled(Deadline deadline) {
  std::string before;
  while (true) {
    UNBROKEN_ASSIGN(Catalog catalog, read_patiently(deadline));
    std::string states;
    // That there is nothing is not concluded from one look, either: attempts are looked at one after the other, and the
    // last may have gone before the next was committed.
    bool moving = choose(catalog, refused_, options_).kind == Choice::Kind::kNothing;
    for (const auto& info : catalog.attempts) {
      states += fmt::format("{} {}\n", info.name, state_name(info.state));
      moving = moving || (info.state == AttemptState::kRetired && info.on_branch);
    }
    if (!moving || states == before || deadline.passed()) return catalog;
    before = std::move(states);
  }
}

Result<Start> Recovery::coordinate() {
  const Deadline deadline = Deadline::after_seconds(options_.timeout_seconds);
  while (true) {
    auto start = start_once(deadline);
    if (start || !start.error().retryable || deadline.passed()) return start;
    std::this_thread::sleep_for(kRetryInterval);
  }
}

Result<Start> Recovery::start_once(Deadline deadline) {
  UNBROKEN_ASSIGN(Catalog catalog, read_settled(deadline));
  if (catalog.generations.empty()) UNBROKEN_TRY(check_root());
  const Choice first = choose(catalog, refused_, options_);
  UNBROKEN_TRY(check_supported(catalog, first));
  if (first.kind == Choice::Kind::kNothing && refused_.empty()) return nothing_to_load(first);
  UNBROKEN_TRY(claim(catalog));  // S1
  UNBROKEN_CRASH_POINT("start.1.claimed");
  UNBROKEN_ASSIGN(catalog, read_settled(deadline));  // S2
  UNBROKEN_ASSIGN(const Choice choice, choose_checked(catalog));
  UNBROKEN_CRASH_POINT("start.3.chosen");
  UNBROKEN_ASSIGN(Start start, record(catalog, choice));
  UNBROKEN_CRASH_POINT("start.4.recorded");
  if (choice.kind == Choice::Kind::kNothing) return nothing_to_load(choice);
  return start;
}

// A directory that is a checkpoint itself does not become a run's root.
Status Recovery::check_root() const {
  const auto marker = store_.stat(kMarkerName);
  if (!marker) return marker.error().code == Code::kNotFound ? Status() : Status(marker.error());
  return make_error(Code::kInvalidArgument,
                    fmt::format("start from {}: it is one checkpoint ({} is in it), not a run's root; give the run a "
                                "directory of its own; unbroken.load() reads this one",
                                store_.url(), kMarkerName));
}

Status Recovery::claim(const Catalog& catalog) {
  const std::uint64_t newest = newest_generation(catalog.generations);
  if (last_claimed_ != 0 && newest > last_claimed_) return overtaken_by(newest);
  // One that this start has taken before, when the store then did not answer, is its own still.
  if (!claim_)
    claim_ = {.number = newest + 1, .life_id = random_hex(kLifeIdBytes), .host = options_.host, .time_ms = now_ms()};
  last_claimed_ = claim_->number;
  return claim_generation(store_, *claim_);
}

Error Recovery::overtaken_by(std::uint64_t newer) const {
  return make_error(Code::kFenced, fmt::format("start from {}: {} has started meanwhile; only one start can own a run",
                                               store_.url(), describe_life(store_, newer)));
}

Error Recovery::nothing_to_load(const Choice& choice) const {
  std::string message = options_.step
                            ? fmt::format("start from step {} of {}: there is no usable checkpoint of that step",
                                          *options_.step, store_.url())
                            : fmt::format("start from {}: checkpoints are there, but none can be loaded", store_.url());
  for (const auto& line : choice.evidence) message += "\n  " + line;
  if (!options_.step) message += "\nhint: allow_fresh=True starts again at step 0";
  return make_error(Code::kNotFound, std::move(message));
}

// S3.
Result<Choice> Recovery::choose_checked(Catalog& catalog) {
  while (true) {
    Choice choice = choose(catalog, refused_, options_);
    UNBROKEN_TRY(check_supported(catalog, choice));
    if (choice.kind != Choice::Kind::kAttempt) return choice;
    AttemptInfo& info = catalog.attempts[choice.attempt];
    auto looked = inspect_attempt(store_, info.name, catalog.generations, Depth::kLengths);
    if (!looked && looked.error().code == Code::kNotFound) {
      info.state = AttemptState::kIncomplete;
      info.reason = "it was removed while this start looked";
      continue;
    }
    if (!looked) return std::move(looked).error();
    info = std::move(*looked);
    if (info.state == AttemptState::kComplete) {
      // A marker that was seen may not be durable yet: the life that wrote it may have been killed before its last
      // fsync.
      UNBROKEN_TRY(store_.sync_directory(info.name));
      return choice;
    }
    if (info.state == AttemptState::kDamaged) refused_.push_back({info.name, info.reason});
  }
}

// S4.
Result<Start> Recovery::record(const Catalog& catalog, const Choice& choice) {
  GenerationRecord record{.number = claim_->number,
                          .run_id = run_id_of(catalog.generations).value_or(""),
                          .life_id = claim_->life_id,
                          .origin = {},
                          .refused = refused_,
                          .ranks = options_.world_size,
                          .host = options_.host,
                          .time_ms = now_ms()};
  if (record.run_id.empty()) record.run_id = random_hex(kRunIdBytes);
  Start start{.generation = record.number, .run_id = record.run_id, .life_id = record.life_id};
  if (choice.kind == Choice::Kind::kAttempt) {
    const AttemptInfo& info = catalog.attempts[choice.attempt];
    record.run_id = start.run_id = info.manifest->run_id;
    record.origin = {.kind = Origin::Kind::kAttempt, .key = info.key, .attempt = info.name};
    start.fresh = false;
    start.key = info.key;
    start.attempt = info.name;
    start.manifest = manifest_body(*info.manifest);
  } else if (choice.kind == Choice::Kind::kNothing) {
    record.origin.kind = Origin::Kind::kNone;
  }
  start.refused = refused_;
  start.account = give_account(start, catalog, choice, options_.step.has_value(), store_);
  start.warnings = warn(start, catalog);
  // A start that slept since its claim may have chosen what a newer one made, and would be stopped at its first save.
  UNBROKEN_ASSIGN(const auto numbers, list_generation_numbers(store_));
  if (!numbers.empty() && numbers.back() > record.number) return overtaken_by(numbers.back());
  UNBROKEN_TRY(create_generation(store_, record));
  refused_.clear();
  claim_.reset();
  return start;
}

Result<std::optional<Start>> Recovery::settle(Verdict verdict, std::string_view reason) {
  const std::string own = dump({{"verdict", verdict_name(verdict)}, {"reason", reason}});
  UNBROKEN_TRY(board_.set(key(fmt::format("verdict/{}", options_.rank)), own));
  if (options_.rank == 0) {
    auto all_loaded = judge_verdicts();
    const std::string told = !all_loaded   ? encode_error(all_loaded.error())
                             : *all_loaded ? dump({{"go", true}})
                                           : dump({{"go", false}});
    UNBROKEN_TRY(board_.set(key("settled"), told));
    if (!all_loaded) return std::move(all_loaded).error();
    if (*all_loaded) return std::optional<Start>();
  } else {
    UNBROKEN_ASSIGN(const std::string text,
                    board_wait(board_, key("settled"), Deadline::after_seconds(2 * options_.load_timeout_seconds)));
    UNBROKEN_ASSIGN(const json note, parse_json_object(text, "the coordinator's verdict"));
    if (note.contains("error")) return decode_error(note);
    if (note.value("go", false)) return std::optional<Start>();
  }
  ++round_;
  UNBROKEN_ASSIGN(Start next, begin());
  return std::optional(std::move(next));
}

// True: all have loaded. False: the checkpoint is damaged and now refused. An error: all stop.
Result<bool> Recovery::judge_verdicts() {
  std::vector<std::string> keys;
  for (std::uint64_t rank = 0; rank < options_.world_size; ++rank) keys.push_back(key(fmt::format("verdict/{}", rank)));
  UNBROKEN_ASSIGN(const auto texts,
                  board_collect(board_, keys, Deadline::after_seconds(options_.load_timeout_seconds)));
  std::string damage;
  std::string failure;
  Code code = Code::kInternal;
  for (std::uint64_t rank = 0; rank < texts.size(); ++rank) {
    if (!texts[rank]) {
      failure += fmt::format("{}rank {} did not finish loading in time", failure.empty() ? "" : "; ", rank);
      code = Code::kDeadline;
      continue;
    }
    UNBROKEN_ASSIGN(const json note, parse_json_object(*texts[rank], "a verdict"));
    JsonFields fields(note, "a verdict");
    const std::string verdict = fields.text("verdict");
    const std::string said = fmt::format("rank {}: {}", rank, fields.text("reason"));
    UNBROKEN_TRY(fields.finish());
    if (verdict == verdict_name(Verdict::kLoaded)) continue;
    std::string& text = verdict == verdict_name(Verdict::kDamaged) ? damage : failure;
    text += (text.empty() ? "" : "; ") + said;
    if (&text == &failure) {
      code = verdict == verdict_name(Verdict::kUnreachable) ? Code::kUnavailable : Code::kInvalidArgument;
    }
  }
  if (!failure.empty()) {
    return make_error(code,
                      fmt::format("load {}: {}", current_.attempt.empty() ? "nothing" : current_.attempt, failure));
  }
  if (damage.empty()) return true;
  refused_ = {{current_.attempt, damage}};
  return false;
}

}  // namespace unbroken
