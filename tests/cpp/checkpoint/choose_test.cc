// What a start chooses (recovery.h) and what retention removes (retention.h), as pure functions.
#include <gtest/gtest.h>

#include <map>

#include "checkpoint/recovery.h"
#include "checkpoint/retention.h"
#include "cpp/checkpoint/histories.h"
#include "testing/seed.h"

namespace unbroken {
namespace {

using Kind = Choice::Kind;

std::string chosen_name(const Catalog& catalog, const Choice& choice) {
  switch (choice.kind) {
    case Kind::kFresh: return "fresh";
    case Kind::kNothing: return "nothing";
    case Kind::kAttempt: break;
  }
  return catalog.attempts.at(choice.attempt).name;
}

std::string choose_from(const History& history, const std::vector<Refusal>& refused = {},
                        const RecoveryOptions& options = {}) {
  const Catalog catalog = history.catalog();
  return chosen_name(catalog, choose(catalog, refused, options));
}

TEST(Choose, AnEmptyRootIsAFreshStart) { EXPECT_EQ(choose_from({}), "fresh"); }

TEST(Choose, ARunThatWasKilledBeforeItsFirstSaveStartsFresh) {
  History history;
  history.start_fresh();
  EXPECT_EQ(choose_from(history), "fresh");
  history.save(10, false);
  EXPECT_EQ(choose_from(history), "fresh") << "an incomplete one is no progress that could be lost";
  history.start_fresh();
  EXPECT_EQ(choose_from(history), "fresh");
}

TEST(Choose, TheNewestCompleteOne) {
  History history;
  history.start_fresh();
  const auto ten = history.save(10);
  const auto twenty = history.save(20);
  EXPECT_EQ(choose_from(history), History::name(twenty));
  history.save(30, false);
  EXPECT_EQ(choose_from(history), History::name(twenty)) << "one that was never committed is passed over";
  history.attempts[1].damaged = true;
  EXPECT_EQ(choose_from(history), History::name(ten));
}

TEST(Choose, ATornMarkerCommittedNothing) {
  History history;
  history.start_fresh();
  history.save(10, false);
  Catalog catalog = history.catalog();
  catalog.attempts[0].has_marker = true;  // and incomplete
  EXPECT_EQ(choose(catalog, {}, {}).kind, Kind::kFresh);
}

TEST(Choose, ManyIncompleteOnesDoNotHideTheLastGoodOne) {
  History history;
  history.start_fresh();
  const auto ten = history.save(10);
  for (std::uint64_t step = 20; step < 1000; step += 10) history.save(step, false);
  EXPECT_EQ(choose_from(history), History::name(ten));
}

TEST(Choose, ARefusedOneIsNeverTriedAgain) {
  History history;
  history.start_fresh();
  const auto ten = history.save(10);
  const auto twenty = history.save(20);
  EXPECT_EQ(choose_from(history, {{.attempt = History::name(twenty), .reason = "bad"}}), History::name(ten));
  history.start({.kind = Origin::Kind::kNone, .key = {}, .attempt = {}},
                {{.attempt = History::name(twenty), .reason = "bad"}});
  EXPECT_EQ(choose_from(history), History::name(ten)) << "also when another start refused it";
}

TEST(Choose, SomethingThereAndNothingLoadableIsNoFreshStart) {
  History history;
  history.start_fresh();
  const auto ten = history.save(10);
  history.attempts[0].damaged = true;
  const Catalog catalog = history.catalog();
  const Choice choice = choose(catalog, {}, {});
  ASSERT_EQ(choice.kind, Kind::kNothing);
  ASSERT_EQ(choice.evidence.size(), 1u);
  EXPECT_NE(choice.evidence[0].find(History::name(ten)), std::string::npos);
  EXPECT_NE(choice.evidence[0].find("damaged"), std::string::npos);
  EXPECT_EQ(choose_from(history, {}, {.allow_fresh = true}), "fresh") << "except where the user says so";
}

TEST(Choose, EveryOneRefusedIsNoFreshStart) {
  History history;
  history.start_fresh();
  const auto ten = history.save(10);
  EXPECT_EQ(choose_from(history, {{.attempt = History::name(ten), .reason = "bad"}}), "nothing");
}

TEST(Choose, CheckpointsThatVanishedAreNoFreshStart) {
  History history;
  history.start_fresh();
  history.start_from(history.save(10));
  history.attempts.clear();
  EXPECT_EQ(choose_from(history), "nothing");
}

TEST(Choose, CheckpointsWithoutTheRecordsOfTheirLivesAreNoFreshStart) {
  History history;
  history.start_fresh();
  history.save(10);
  history.generations.clear();
  EXPECT_EQ(choose_from(history), "nothing");
}

TEST(Choose, OrphansOfAFreshStartAreNoEvidence) {
  History history;
  history.start_fresh();
  history.save(10);
  history.start_fresh();
  EXPECT_EQ(choose_from(history), "fresh");
}

TEST(Choose, AForeignCheckpointIsLeftAlone) {
  Catalog catalog;
  catalog.attempts.push_back({.name = "pretrained", .state = AttemptState::kForeign});
  catalog.attempts.back().has_marker = true;
  EXPECT_EQ(choose(catalog, {}, {}).kind, Kind::kFresh);
}

TEST(Choose, TheStepThatIsAskedForOrNothing) {
  History history;
  history.start_fresh();
  const auto ten = history.save(10);
  history.save(20);
  EXPECT_EQ(choose_from(history, {}, {.step = 10}), History::name(ten));
  EXPECT_EQ(choose_from(history, {}, {.step = 15}), "nothing");
  EXPECT_EQ(choose_from({}, {}, {.step = 15}), "nothing") << "never fresh when a step was asked for";
  history.attempts[0].damaged = true;
  EXPECT_EQ(choose_from(history, {}, {.step = 10}), "nothing") << "and never another step";
}

// The newest complete one of the truth, or what follows from there being none.
std::string expected_choice(const History& history) {
  const PastAttempt* newest = nullptr;
  bool evidence = was_ever_complete(history.generations);
  for (const auto& attempt : history.attempts) {
    if (!attempt.in_lineage || !attempt.committed) continue;
    evidence = true;
    if (!attempt.damaged && (newest == nullptr || attempt.key > newest->key)) newest = &attempt;
  }
  if (newest != nullptr) return History::name(newest->key);
  return evidence ? "nothing" : "fresh";
}

// Lives that start as choose() says, on roots where saves fail, markers come late and files are damaged.
TEST(ChooseProperty, TheNewestOnTheBranchWheneverThereIsOne) {
  const std::uint64_t seed = test_seed();
  for (std::uint64_t i = 0; i < 3000; ++i) {
    std::mt19937_64 random(seed + i);
    History history;
    std::set<std::string> given_up;
    for (int life = 0; life < 8; ++life) {
      const Catalog catalog = history.catalog();
      const Choice choice = choose(catalog, {}, {});
      const std::string name = chosen_name(catalog, choice);
      ASSERT_EQ(name, expected_choice(history)) << "history " << seed + i << ", life " << life;
      ASSERT_FALSE(given_up.contains(name)) << "history " << seed + i << ", life " << life;
      std::uint64_t step = 0;
      if (choice.kind == Kind::kAttempt) {
        step = catalog.attempts[choice.attempt].key.step;
        history.start_from(catalog.attempts[choice.attempt].key);
      } else if (choice.kind == Kind::kFresh || random() % 2 == 0) {
        history.start_fresh();  // also what allow_fresh does
      } else {
        history.start({.kind = Origin::Kind::kNone, .key = {}, .attempt = {}});
      }
      for (const auto& attempt : history.attempts) {
        if (!attempt.in_lineage) given_up.insert(History::name(attempt.key));
      }
      for (std::uint64_t saves = random() % 5; saves > 0; --saves)
        history.save(step += 5 * (random() % 3), random() % 3 != 0);
      for (auto& attempt : history.attempts) {
        if (random() % 10 == 0) attempt.committed = true;
        if (random() % 15 == 0) attempt.damaged = true;
      }
    }
  }
}

// --- Retention ---

std::vector<std::string> remove_from(const History& history, Keep keep) {
  const Catalog catalog = history.catalog();
  return choose_to_remove(catalog.attempts, keep, newest_generation(history.generations));
}

TEST(ChooseToRemove, TheOldestGo) {
  History history;
  history.start_fresh();
  const auto ten = history.save(10);
  const auto twenty = history.save(20);
  history.save(30);
  EXPECT_TRUE(remove_from(history, {.last = 3}).empty());
  EXPECT_EQ(remove_from(history, {.last = 2}), (std::vector{History::name(ten)}));
  EXPECT_EQ(remove_from(history, {.last = 1}), (std::vector{History::name(twenty), History::name(ten)}));
  EXPECT_TRUE(remove_from(history, {.last = 0}).empty()) << "0 keeps all";
}

TEST(ChooseToRemove, StepsThatAreMultiplesStay) {
  History history;
  history.start_fresh();
  for (std::uint64_t step = 10; step <= 60; step += 10) history.save(step);
  const auto removed = remove_from(history, {.last = 1, .every_steps = 30});
  EXPECT_EQ(removed.size(), 4u);
  for (const auto& name : removed) {
    EXPECT_NE(parse_attempt_directory(name)->step % 30, 0u) << name;
    EXPECT_NE(parse_attempt_directory(name)->step, 60u);
  }
}

TEST(ChooseToRemove, WhatFailedDoesNotCountAsKept) {
  History history;
  history.start_fresh();
  history.save(10);
  for (std::uint64_t step = 20; step <= 60; step += 10) history.save(step, false);
  const auto removed = remove_from(history, {.last = 2});
  EXPECT_EQ(removed.size(), 5u) << "garbage goes, the one good checkpoint stays";
  EXPECT_EQ(std::count(removed.begin(), removed.end(), History::name(history.attempts[0].key)), 0);
}

TEST(ChooseToRemove, NothingGoesBeforeSomethingIsComplete) {
  History history;
  history.start_fresh();
  history.save(10, false);
  history.save(20);
  history.attempts[1].damaged = true;
  EXPECT_TRUE(remove_from(history, {.last = 1}).empty());
}

TEST(ChooseToRemove, WhatNoLifeOfThisRunWroteStays) {
  Catalog catalog;
  AttemptInfo mine{.name = "step-30-g1-00000001",
                   .key = {.step = 30, .generation = 1, .sequence = 1},
                   .state = AttemptState::kComplete};
  mine.has_record = true;
  AttemptInfo strange{.name = "step-20-g9-00000001",
                      .key = {.step = 20, .generation = 9, .sequence = 1},
                      .state = AttemptState::kOrphan};
  AttemptInfo foreign{.name = "pretrained", .key = {}, .state = AttemptState::kForeign};
  catalog.attempts = {mine, strange, foreign};
  EXPECT_TRUE(choose_to_remove(catalog.attempts, {.last = 1}, 10).empty());
}

// Every combination of states of four attempts, of lives around the one that retains, and of what is to be kept.
TEST(ChooseToRemoveProperty, NeverTheNewestCompleteOneNorAYoungerLifesNorTooMany) {
  constexpr std::array kStates = {AttemptState::kComplete, AttemptState::kIncomplete, AttemptState::kDamaged,
                                  AttemptState::kOrphan,   AttemptState::kRetired,    AttemptState::kUnsupported,
                                  AttemptState::kForeign};
  constexpr std::size_t kAttempts = 4;
  constexpr std::uint64_t kOwn = 2;
  std::size_t cases = 1;
  for (std::size_t i = 0; i < kAttempts; ++i) cases *= kStates.size() * 3;
  for (std::uint64_t number = 0; number < cases; ++number) {
    std::vector<AttemptInfo> attempts;
    std::uint64_t rest = number;
    for (std::size_t i = 0; i < kAttempts; ++i) {
      const std::uint64_t generation = 1 + rest / kStates.size() % 3;
      AttemptInfo info{.name = std::to_string(i),
                       .key = {.step = 40 - 10 * i, .generation = generation, .sequence = 1},
                       .state = kStates[rest % kStates.size()]};
      info.has_record = (number + i) % 5 != 0 || info.state == AttemptState::kComplete;
      attempts.push_back(info);
      rest /= kStates.size() * 3;
    }
    for (std::uint64_t last = 0; last <= 3; ++last) {
      for (const std::uint64_t every : {0, 20}) {
        const auto removed = choose_to_remove(attempts, {.last = last, .every_steps = every}, kOwn);
        const std::set<std::string> gone(removed.begin(), removed.end());
        ASSERT_EQ(gone.size(), removed.size());
        std::uint64_t kept = 0;
        bool newest = true;
        for (const auto& info : attempts) {
          const bool goes = gone.contains(info.name);
          const bool counts = info.state == AttemptState::kComplete;
          ASSERT_FALSE(goes && last == 0);
          ASSERT_FALSE(goes && info.key.generation > kOwn) << "a younger life's";
          ASSERT_FALSE(goes && !info.has_record) << "no life of this run wrote it";
          ASSERT_FALSE(goes && (info.state == AttemptState::kForeign || info.state == AttemptState::kUnsupported));
          ASSERT_FALSE(goes && counts && newest) << "the newest complete one";
          ASSERT_FALSE(goes && counts && every != 0 && info.key.step % every == 0);
          if (counts) newest = false;
          kept += counts && !goes && info.key.generation <= kOwn;
        }
        const auto complete =
            static_cast<std::uint64_t>(std::count_if(attempts.begin(), attempts.end(), [&](const auto& info) {
              return info.state == AttemptState::kComplete && info.key.generation <= kOwn;
            }));
        ASSERT_GE(kept, std::min(last, complete)) << "case " << number;
        if (every == 0 && last > 0) {
          ASSERT_EQ(kept, std::min(last, complete)) << "case " << number;
        }
      }
    }
  }
}

}  // namespace
}  // namespace unbroken
