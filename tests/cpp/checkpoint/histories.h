// Made-up histories of a run: lives, their saves, markers that appear late, damage. The truth is kept beside the
// records, so that what the rules say can be compared with it.
#pragma once

#include <algorithm>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/catalog.h"

namespace unbroken {

struct PastAttempt {
  AttemptKey key;
  bool committed = false;  // its marker is there
  bool damaged = false;
  bool in_lineage = false;  // the truth: it is the start of the newest life, or lies before it
};

struct History {
  std::vector<GenerationEntry> generations;
  std::vector<PastAttempt> attempts;

  static std::string run_id() { return "run"; }
  static std::string life_id(std::uint64_t generation) { return "life" + std::to_string(generation); }
  static std::string name(const AttemptKey& key) {
    std::string id = "00000000";
    std::uint64_t sequence = key.sequence;
    for (std::size_t i = id.size(); i-- > 0; sequence /= 16) id[i] = "0123456789abcdef"[sequence % 16];
    return attempt_directory(key, id);
  }

  void start(Origin origin, std::vector<Refusal> refused = {}) {
    const std::uint64_t number = newest_generation(generations) + 1;
    // What lies above the origin is given up, for good.
    if (origin.kind != Origin::Kind::kNone) {
      for (auto& attempt : attempts) {
        if (origin.kind == Origin::Kind::kFresh || attempt.key > origin.key) attempt.in_lineage = false;
      }
    }
    generations.push_back({.number = number,
                           .record = GenerationRecord{.number = number,
                                                      .run_id = run_id(),
                                                      .life_id = life_id(number),
                                                      .origin = std::move(origin),
                                                      .refused = std::move(refused),
                                                      .ranks = 1,
                                                      .host = "host",
                                                      .time_ms = 0},
                           .error = {}});
  }
  void start_fresh() { start({.kind = Origin::Kind::kFresh, .key = {}, .attempt = {}}); }
  void start_from(const AttemptKey& key) { start({.kind = Origin::Kind::kAttempt, .key = key, .attempt = name(key)}); }

  // An attempt of the newest life.
  AttemptKey save(std::uint64_t step, bool committed = true) {
    const std::uint64_t generation = generations.back().number;
    const auto before = static_cast<std::uint64_t>(std::count_if(
        attempts.begin(), attempts.end(), [&](const auto& attempt) { return attempt.key.generation == generation; }));
    attempts.push_back({.key = {.step = step, .generation = generation, .sequence = before + 1},
                        .committed = committed,
                        .damaged = false,
                        .in_lineage = true});
    return attempts.back().key;
  }

  BranchVerdict judge(const AttemptKey& key) const {
    return judge_branch(key, run_id(), life_id(key.generation), generations);
  }

  AttemptInfo info(const PastAttempt& attempt) const {
    const BranchVerdict verdict = judge(attempt.key);
    AttemptInfo info{.name = name(attempt.key), .key = attempt.key};
    info.has_marker = attempt.committed;
    info.has_record = std::any_of(generations.begin(), generations.end(),
                                  [&](const auto& entry) { return entry.number == attempt.key.generation; });
    info.on_branch = verdict.on_branch;
    info.reason = verdict.reason;
    info.state = !attempt.committed  ? AttemptState::kIncomplete
                 : attempt.damaged   ? AttemptState::kDamaged
                 : verdict.on_branch ? AttemptState::kComplete
                                     : AttemptState::kOrphan;
    if (attempt.damaged) info.reason = "damaged";
    return info;
  }

  Catalog catalog() const {
    Catalog catalog{.generations = generations, .attempts = {}};
    for (const auto& attempt : attempts) catalog.attempts.push_back(info(attempt));
    std::sort(catalog.attempts.begin(), catalog.attempts.end(),
              [](const auto& a, const auto& b) { return a.key > b.key; });
    return catalog;
  }
};

}  // namespace unbroken
