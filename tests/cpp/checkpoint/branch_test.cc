#include "checkpoint/branch.h"

#include <gtest/gtest.h>

#include "cpp/checkpoint/histories.h"
#include "testing/seed.h"

namespace unbroken {
namespace {

TEST(Branch, WithoutARecordOfItsLifeNothingIsOnIt) {
  History history;
  const AttemptKey key{.step = 10, .generation = 1, .sequence = 1};
  const auto verdict = history.judge(key);
  EXPECT_FALSE(verdict.on_branch);
  EXPECT_NE(verdict.reason.find("generation 1"), std::string::npos);
}

TEST(Branch, TheSavesOfTheNewestLifeAreOnIt) {
  History history;
  history.start_fresh();
  EXPECT_TRUE(history.judge(history.save(10)).on_branch);
  EXPECT_TRUE(history.judge(history.save(20)).on_branch);
}

TEST(Branch, WhatALaterLifeDidNotGoOnFromIsOffIt) {
  History history;
  history.start_fresh();
  const auto ten = history.save(10);
  const auto twenty = history.save(20);
  history.start_from(ten);
  EXPECT_TRUE(history.judge(ten).on_branch);
  EXPECT_FALSE(history.judge(twenty).on_branch);
  EXPECT_NE(history.judge(twenty).reason.find("step 10"), std::string::npos);
  EXPECT_TRUE(history.judge(history.save(20)).on_branch) << "the same step, done again by the life that goes on";
}

TEST(Branch, ALateMarkerOfADeadLifeIsOffIt) {
  History history;
  history.start_fresh();
  const auto ten = history.save(10);
  const auto late = history.save(30, false);
  history.start_from(ten);
  history.save(20);
  history.attempts[1].committed = true;
  EXPECT_FALSE(history.judge(late).on_branch) << "although it is the newest step";
}

TEST(Branch, AStepThatWasGivenUpStaysSoHoweverManyLivesFollow) {
  History history;
  history.start_fresh();
  const auto ten = history.save(10);
  const auto given_up = history.save(20);
  history.start_from(ten);
  for (std::uint64_t step = 30; step < 100; step += 10) {
    const auto key = history.save(step);
    EXPECT_LT(given_up, key);
    history.start_from(key);
    EXPECT_FALSE(history.judge(given_up).on_branch) << step;
    EXPECT_TRUE(history.judge(ten).on_branch) << step;
  }
}

TEST(Branch, AFreshStartGivesUpAll) {
  History history;
  history.start_fresh();
  const auto ten = history.save(10);
  history.start_fresh();
  EXPECT_FALSE(history.judge(ten).on_branch);
  EXPECT_NE(history.judge(ten).reason.find("fresh"), std::string::npos);
  EXPECT_TRUE(history.judge(history.save(5)).on_branch);
  EXPECT_FALSE(history.judge(ten).on_branch);
}

TEST(Branch, AStartThatFoundNothingGivesUpNothing) {
  History history;
  history.start_fresh();
  const auto ten = history.save(10);
  history.start({.kind = Origin::Kind::kNone, .key = {}, .attempt = {}});
  EXPECT_TRUE(history.judge(ten).on_branch);
}

TEST(Branch, AnotherLifeOrRunUnderTheSameNumberIsOffIt) {
  History history;
  history.start_fresh();
  const auto ten = history.save(10);
  EXPECT_FALSE(judge_branch(ten, History::run_id(), "another life", history.generations).on_branch);
  EXPECT_FALSE(judge_branch(ten, "another run", History::life_id(1), history.generations).on_branch);
  EXPECT_TRUE(judge_branch(ten, {}, {}, history.generations).on_branch) << "no manifest: by the number alone";
}

TEST(Branch, AnUnreadableRecordConstrainsNothingAndVouchesForItsNumber) {
  History history;
  history.start_fresh();
  const auto ten = history.save(10);
  const auto twenty = history.save(20);
  history.start_from(ten);
  const auto fifteen = history.save(15);
  history.generations[1].record.reset();
  EXPECT_TRUE(history.judge(twenty).on_branch);
  EXPECT_TRUE(history.judge(fifteen).on_branch);
  EXPECT_EQ(run_id_of(history.generations), History::run_id());
  history.generations[0].record.reset();
  EXPECT_FALSE(run_id_of(history.generations));
  EXPECT_EQ(newest_generation(history.generations), 2u);
}

TEST(Branch, AClaimWithoutARecordConstrainsNothingAndVouchesForNothing) {
  History history;
  history.start_fresh();
  const auto ten = history.save(10);
  history.start_from(ten);
  const auto twenty = history.save(20);
  history.generations[1].record.reset();
  history.generations[1].claim_only = true;
  EXPECT_TRUE(history.judge(ten).on_branch);
  EXPECT_FALSE(history.judge(twenty).on_branch) << "its life never began";
  EXPECT_EQ(newest_generation(history.generations), 2u);
}

TEST(Branch, TheSameStepSavedTwiceByALifeIsOrderedBySequence) {
  History history;
  history.start_fresh();
  const auto first = history.save(10);
  const auto second = history.save(10);
  history.start_from(first);
  EXPECT_TRUE(history.judge(first).on_branch);
  EXPECT_FALSE(history.judge(second).on_branch);
}

TEST(Branch, OnlyStartsSinceTheNewestFreshOneSpeakOfCheckpoints) {
  History history;
  EXPECT_FALSE(was_ever_complete(history.generations));
  history.start_fresh();
  const auto ten = history.save(10);
  EXPECT_FALSE(was_ever_complete(history.generations));
  history.start_from(ten);
  EXPECT_TRUE(was_ever_complete(history.generations));
  history.start({.kind = Origin::Kind::kNone, .key = {}, .attempt = {}});
  EXPECT_TRUE(was_ever_complete(history.generations));
  history.start_fresh();
  EXPECT_FALSE(was_ever_complete(history.generations));
}

// --- Generated histories ---

// One event in a run's history, by chance. `given_up` collects every attempt that a start has left behind.
class RandomHistory {
 public:
  explicit RandomHistory(std::uint64_t seed) : random_(seed) {}

  void live() {
    start();
    std::uint64_t step = step_;
    for (std::uint64_t saves = random_() % 5; saves > 0; --saves) {
      step += random_() % 3 * 5;  // the same step may be saved twice
      history.save(step, !chance(4));
      if (chance(8)) history.attempts.back().damaged = true;
    }
    for (auto& attempt : history.attempts) {
      if (chance(10)) attempt.committed = true;  // a marker that appears late
      if (chance(20)) attempt.damaged = true;
    }
  }

  History history;
  std::set<AttemptKey> given_up;

 private:
  bool chance(std::uint64_t one_in) { return random_() % one_in == 0; }

  // As recovery does, and sometimes as a user who asks for a step, or for a fresh start.
  void start() {
    std::vector<const PastAttempt*> usable;
    for (const auto& attempt : history.attempts) {
      if (attempt.in_lineage && attempt.committed && !attempt.damaged) usable.push_back(&attempt);
    }
    if (usable.empty() || chance(25)) {
      if (chance(5)) {
        history.start({.kind = Origin::Kind::kNone, .key = {}, .attempt = {}});
      } else {
        history.start_fresh();
      }
      step_ = 0;
    } else {
      const auto newest =
          *std::max_element(usable.begin(), usable.end(), [](auto* a, auto* b) { return a->key < b->key; });
      const auto chosen = (chance(4) ? usable[random_() % usable.size()] : newest)->key;
      history.start_from(chosen);
      step_ = chosen.step;
    }
    for (const auto& attempt : history.attempts) {
      if (!attempt.in_lineage) given_up.insert(attempt.key);
    }
  }

  std::mt19937_64 random_;
  std::uint64_t step_ = 0;
};

TEST(BranchProperty, TheRuleIsTheTruthOfEveryHistory) {
  const std::uint64_t seed = test_seed();
  for (std::uint64_t i = 0; i < 3000; ++i) {
    RandomHistory made(seed + i);
    for (int life = 0; life < 8; ++life) {
      made.live();
      for (const auto& attempt : made.history.attempts) {
        ASSERT_EQ(made.history.judge(attempt.key).on_branch, attempt.in_lineage)
            << "history " << seed + i << ", life " << life << ", " << History::name(attempt.key);
      }
    }
  }
}

TEST(BranchProperty, AStepThatWasGivenUpNeverComesBack) {
  const std::uint64_t seed = test_seed();
  for (std::uint64_t i = 0; i < 3000; ++i) {
    RandomHistory made(seed + i);
    for (int life = 0; life < 8; ++life) {
      made.live();
      for (const auto& key : made.given_up) ASSERT_FALSE(made.history.judge(key).on_branch) << "history " << seed + i;
    }
  }
}

TEST(BranchProperty, RecordsThatCannotBeReadOnlyLoosenTheRule) {
  const std::uint64_t seed = test_seed();
  std::mt19937_64 random(seed);
  for (std::uint64_t i = 0; i < 1000; ++i) {
    RandomHistory made(seed + i);
    for (int life = 0; life < 8; ++life) made.live();
    History damaged = made.history;
    for (auto& entry : damaged.generations) {
      if (random() % 4 == 0) entry.record.reset();
    }
    for (const auto& attempt : made.history.attempts) {
      if (made.history.judge(attempt.key).on_branch) {
        ASSERT_TRUE(damaged.judge(attempt.key).on_branch) << "history " << seed + i;
      }
    }
  }
}

}  // namespace
}  // namespace unbroken
