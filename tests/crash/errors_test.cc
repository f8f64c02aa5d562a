// The crash matrix for a process that lives on: every operation and every named point of a run, failing in every way. A
// fault costs the run at most what was under way, and that is reported as what it is.
#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "crash/scenario.h"
#include "store/memory/memory_store.h"

namespace unbroken {
namespace {

using Kind = CrashFault::Kind;
using State = SaveOutcome::State;

struct Case {
  std::size_t index = 0;
  CrashFault fault;
};

// What an operation or a point of the undisturbed run belongs to.
enum class Phase { kStart, kWriting, kPublishing, kSyncingMarker, kRetention, kReading, kElsewhere };

struct Meaning {
  Phase phase = Phase::kElsewhere;
  std::uint64_t step = 0;  // of the save
};

Meaning meaning_of(const Milestones& milestones, std::size_t index) {
  const CrashPlace& place = milestones.places[index];
  const bool changes = Operation{.name = place.what}.changes();
  if (place.is_point()) {
    if (place.where.starts_with("generation.") || place.where.starts_with("start.")) return {Phase::kStart};
    if (place.where.starts_with("retention.")) return {Phase::kRetention};
  } else if (!changes) {
    return {Phase::kReading};
  } else if (place.where.starts_with(kGenerationsDirectory)) {
    return {Phase::kStart};
  }
  for (const auto& commit : milestones.commits) {
    const std::string directory = fmt::format("step-{}-g{}", commit.step, commit.step == kSecondLifeStep ? 2 : 1);
    std::size_t begin = 0;
    while (milestones.places[begin].what != "make_directory" || milestones.places[begin].where != directory) ++begin;
    const Meaning saving{Phase::kWriting, commit.step};
    if (index >= begin && index < commit.published) return saving;
    if (index == commit.published) return {Phase::kPublishing, commit.step};
    if (index > commit.published && index <= commit.durable) return {Phase::kSyncingMarker, commit.step};
    if (place.is_point() && place.where == "commit.6.marker_durable" && index == commit.durable + 1) {
      return {Phase::kSyncingMarker, commit.step};
    }
  }
  // What is left syncs the root at a start, or removes.
  for (std::size_t next = index + 1; next < milestones.places.size(); ++next) {
    const CrashPlace& other = milestones.places[next];
    if (!other.is_point()) continue;
    const bool starting = other.where.starts_with("generation.") || other.where.starts_with("start.");
    return {starting ? Phase::kStart : Phase::kRetention};
  }
  return {Phase::kRetention};
}

std::vector<Case> all_errors(const Milestones& milestones, bool atomic_publish) {
  std::vector<Case> cases;
  for (std::size_t index = 0; index < milestones.places.size(); ++index) {
    const CrashPlace& place = milestones.places[index];
    const auto add = [&](CrashFault fault) { cases.push_back({index, fault}); };
    add({.kind = Kind::kFail, .code = Code::kIo});
    if (place.is_point()) continue;
    add({.kind = Kind::kFail, .code = Code::kUnavailable});
    if (!Operation{.name = place.what}.changes()) continue;
    add({.kind = Kind::kFail, .code = Code::kNoSpace});
    add({.kind = Kind::kReplyLost, .code = Code::kUnknown});
    add({.kind = Kind::kReplyLost, .code = Code::kUnavailable});
    if (place.what == "write_at") add({.kind = Kind::kTornFail, .code = Code::kNoSpace, .part = place.bytes / 2});
    if (place.what == "remove_directory") {
      for (const std::uint64_t part : {1, 3, 6}) add({.kind = Kind::kTornFail, .part = part});
    }
    if (!atomic_publish && place.what == "publish") {
      add({.kind = Kind::kTornFail, .code = Code::kUnknown, .part = place.bytes / 2});
      add({.kind = Kind::kTornFail, .code = Code::kNoSpace, .part = place.bytes / 2});
    }
  }
  return cases;
}

// The state that the coordinator must report for the save that was hit; empty where more than one is right.
std::optional<State> expected_state(const CrashPlace& place, const Meaning& meaning, const CrashFault& fault) {
  switch (meaning.phase) {
    case Phase::kWriting:
      // A vote that is cast counts, whatever its caster hears.
      if (place.where == "commit.4.voted") return std::nullopt;
      return State::kFailed;
    case Phase::kPublishing: {
      // An unclear answer is settled by reading. One that is certain is believed, when reading shows nothing.
      const bool unclear = fault.code == Code::kUnknown || fault.code == Code::kUnavailable;
      return fault.kind == Kind::kReplyLost || fault.kind == Kind::kTornFail || unclear ? State::kDurable
                                                                                        : State::kFailed;
    }
    case Phase::kSyncingMarker: return State::kUnknown;
    default: return State::kDurable;
  }
}

std::string check_reports(const ScenarioReport& report, const CrashPlace& place, const Meaning& meaning,
                          const CrashFault& fault) {
  for (const std::uint64_t step : {10, 20, 30, 40}) {
    const auto own = report.save_of(step, 0);
    const auto other = report.save_of(step, 1);
    const bool started =
        step == kSecondLifeStep ? report.second[0].start.has_value() : report.first[0].start.has_value();
    if (!started) {
      if (meaning.phase != Phase::kStart && meaning.phase != Phase::kReading) return "a life did not start";
      continue;
    }
    if (!own || !other) return fmt::format("step {} was not saved by all", step);
    const bool hit = meaning.step == step;
    if (!hit && own->state != State::kDurable && meaning.phase != Phase::kReading) {
      return fmt::format("the save of step {} is {}: {}", step, outcome_name(own->state), own->reason);
    }
    if (hit) {
      const auto expected = expected_state(place, meaning, fault);
      if (expected && own->state != *expected) {
        return fmt::format("step {} is reported as {} ({}), not as {}", step, outcome_name(own->state), own->reason,
                           outcome_name(*expected));
      }
    }
    if (own->state != State::kDurable && own->reason.empty()) return "a failure without a reason";
    if (other->state != own->state) {
      return fmt::format("step {} is {} to rank 0 and {} to rank 1: {}", step, outcome_name(own->state),
                         outcome_name(other->state), other->reason);
    }
  }
  return {};
}

// At most one save is lost to one fault.
std::string check_losses(const ScenarioReport& report) {
  int lost = 0;
  for (const std::uint64_t step : {10, 20, 30, 40}) {
    const auto save = report.save_of(step, 0);
    lost += save && save->state != State::kDurable;
  }
  return lost <= 1 ? std::string() : fmt::format("{} saves were lost to one fault", lost);
}

std::string check_case(const Milestones& milestones, const Case& one, const Scenario& scenario) {
  MemoryStore memory;
  FaultStore store(memory, scenario.store_options());
  const CrashPlace& place = milestones.places[one.index];
  ScenarioReport report;
  {
    CrashDriver driver(store);
    driver.arm(place, one.fault);
    report = run_scenario(store, scenario);
    // Whether a listing already sees what another rank is making is chance, and with it how often that is looked at.
    const bool chance = !place.is_point() && !Operation{.name = place.what}.changes();
    if (!driver.reached() && !chance) return "the place was not reached";
  }
  const Meaning meaning = meaning_of(milestones, one.index);
  if (auto wrong = check_reports(report, place, meaning, one.fault); !wrong.empty()) return wrong;
  if (auto wrong = check_losses(report); !wrong.empty()) return wrong;
  std::uint64_t least = 0;
  std::uint64_t most = 0;
  std::uint64_t before_second = 0;
  for (const std::uint64_t step : {10, 20, 30, 40}) {
    if (step == kSecondLifeStep) before_second = least;
    const auto save = report.save_of(step, 0);
    if (!save || save->state == State::kFailed) continue;
    most = step;
    if (save->state == State::kDurable) least = step;
  }
  for (const auto& life : report.second) {
    if (!life.wrong.empty()) return life.wrong;
    if (!life.start) continue;
    if (life.start->fresh != report.second[0].start->fresh || life.start->attempt != report.second[0].start->attempt) {
      return "the ranks loaded different ones";
    }
    const std::uint64_t step = life.start->fresh ? 0 : life.start->key.step;
    // One fault is a hiccup; it must not cost progress.
    if (step < before_second) {
      return fmt::format("life 2 went on from {}, {} was durable: {}", step, before_second, life.start->account);
    }
  }
  return check_aftermath(store, {.least = least, .most = most, .kept = 1});
}

class ErrorMatrix : public testing::TestWithParam<Scenario> {};

TEST_P(ErrorMatrix, WhateverFailsCostsOneSaveAtMostAndIsReportedAsWhatItIs) {
  const Milestones milestones = find_milestones(GetParam());
  ASSERT_EQ(milestones.commits.size(), 4u);
  const auto cases = all_errors(milestones, GetParam().atomic_publish);
  const auto chosen = sample_cases(cases.size(), 150);
  fmt::print("{} of {} errors at {} places\n", chosen.size(), cases.size(), milestones.places.size());
  EXPECT_THAT(check_cases(chosen.size(),
                          [&](std::size_t number) -> std::string {
                            const Case& one = cases[chosen[number]];
                            const std::string wrong = check_case(milestones, one, GetParam());
                            if (wrong.empty()) return {};
                            return fmt::format("{} [{} of {}] {}: {}", milestones.places[one.index].text(), one.index,
                                               milestones.places.size(), one.fault.text(), wrong);
                          }),
              testing::IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(Runs, ErrorMatrix,
                         testing::Values(Scenario{.keep_last = 1}, Scenario{.keep_last = 2},
                                         Scenario{.keep_last = 2, .atomic_publish = false}),
                         [](const auto& info) {
                           return fmt::format("KeepLast{}{}", info.param.keep_last,
                                              info.param.atomic_publish ? "" : "Torn");
                         });

}  // namespace
}  // namespace unbroken
