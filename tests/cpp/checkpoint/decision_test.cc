#include "checkpoint/decision.h"

#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <functional>
#include <random>
#include <set>
#include <thread>

#include "base/memory_board.h"
#include "testing/seed.h"

namespace unbroken {
namespace {

using Action = StepDecision::Action;

LifeContext life_of(std::uint64_t rank, std::uint64_t world_size) {
  return {.run_id = "run", .life_id = "life", .generation = 1, .rank = rank, .world_size = world_size};
}

// Ranks that go through the same steps as threads, each by its own requests. Ranks are in lockstep as training is: none
// begins a step before all have begun the one before.
class Ranks {
 public:
  using Request = std::function<StepRequest(std::uint64_t rank, std::uint64_t step)>;

  explicit Ranks(std::uint64_t world_size, double timeout_seconds = 20)
      : world_size_(world_size), timeout_seconds_(timeout_seconds) {}

  // [step][rank], steps from 1. A rank leaves when it hears that it should stop.
  std::vector<std::vector<StepDecision>> run(std::uint64_t steps, const Request& request) {
    std::vector<std::vector<StepDecision>> heard(steps + 1, std::vector<StepDecision>(world_size_));
    std::barrier lockstep(static_cast<std::ptrdiff_t>(world_size_));
    std::vector<std::jthread> threads;
    for (std::uint64_t rank = 0; rank < world_size_; ++rank) {
      threads.emplace_back([&, rank] {
        Decider decider(board, life_of(rank, world_size_), timeout_seconds_);
        if (prepare) prepare(decider, rank);
        for (std::uint64_t step = 1; step <= steps; ++step) {
          lockstep.arrive_and_wait();
          auto decision = decider.decide(step, request(rank, step));
          if (!decision) {
            errors++;
            break;
          }
          heard[step][rank] = *decision;
          if (decision->action == Action::kStop) break;
        }
        lockstep.arrive_and_drop();
      });
    }
    threads.clear();
    return heard;
  }

  MemoryBoard board;
  std::function<void(Decider&, std::uint64_t)> prepare;
  std::atomic<int> errors = 0;

 private:
  std::uint64_t world_size_;
  double timeout_seconds_;
};

void expect_equal_on_all(const std::vector<std::vector<StepDecision>>& heard) {
  for (std::size_t step = 1; step < heard.size(); ++step) {
    for (const auto& decision : heard[step]) {
      ASSERT_EQ(decision.action, heard[step][0].action) << "step " << step;
      ASSERT_EQ(decision.attempt, heard[step][0].attempt) << "step " << step;
      ASSERT_EQ(decision.sequence, heard[step][0].sequence) << "step " << step;
      ASSERT_EQ(decision.plan_anew, heard[step][0].plan_anew) << "step " << step;
    }
  }
}

class DecisionTest : public testing::TestWithParam<std::uint64_t> {};

TEST_P(DecisionTest, NothingIsDecidedWhereNothingIsDue) {
  Ranks ranks(GetParam());
  const auto heard = ranks.run(5, [](auto, auto) { return StepRequest{}; });
  for (const auto& step : heard) {
    for (const auto& decision : step) EXPECT_EQ(decision.action, Action::kNone);
  }
}

TEST_P(DecisionTest, ADueStepIsSavedByAllUnderOneFreshName) {
  Ranks ranks(GetParam());
  const auto heard = ranks.run(9, [](auto, std::uint64_t step) { return StepRequest{.due = step % 3 == 0}; });
  expect_equal_on_all(heard);
  std::set<std::string> names;
  for (std::uint64_t step = 1; step <= 9; ++step) {
    EXPECT_EQ(heard[step][0].action, step % 3 == 0 ? Action::kSave : Action::kNone);
    if (step % 3 == 0) names.insert(heard[step][0].attempt);
  }
  EXPECT_EQ(names.size(), 3u);
  EXPECT_EQ(heard[9][0].sequence, 3u);
}

TEST_P(DecisionTest, ABusyCoordinatorDefersAndSavesAtTheFirstStepAfterItIsFree) {
  Ranks ranks(GetParam());
  const auto heard = ranks.run(8, [](std::uint64_t rank, std::uint64_t step) {
    return StepRequest{.due = step == 2, .wanted = rank == 0 && step > 2 && step < 6, .busy = rank == 0 && step < 5};
  });
  expect_equal_on_all(heard);
  EXPECT_EQ(heard[2][0].action, Action::kDeferred);
  EXPECT_EQ(heard[2][0].attempt, "");
  std::uint64_t saves = 0;
  for (std::uint64_t step = 3; step <= 8; ++step) saves += heard[step][0].action == Action::kSave;
  EXPECT_EQ(saves, 1u);
  // A world of one saves at once; others hear of it a step ahead.
  EXPECT_EQ(heard[GetParam() == 1 ? 5 : 6][0].action, Action::kSave);
}

TEST_P(DecisionTest, TimeIsKnownToTheCoordinatorAloneAndAllSaveTogether) {
  Ranks ranks(GetParam());
  const auto heard = ranks.run(
      6, [](std::uint64_t rank, std::uint64_t step) { return StepRequest{.wanted = rank == 0 && step == 3}; });
  expect_equal_on_all(heard);
  for (std::uint64_t step = 1; step <= 6; ++step) {
    EXPECT_EQ(heard[step][0].action == Action::kSave, step == (GetParam() == 1 ? 3u : 4u)) << step;
  }
}

TEST_P(DecisionTest, AnExplicitSaveIsNeverDeferred) {
  Ranks ranks(GetParam());
  const auto heard =
      ranks.run(3, [](auto, std::uint64_t step) { return StepRequest{.busy = true, .is_explicit = step == 2}; });
  expect_equal_on_all(heard);
  EXPECT_EQ(heard[2][0].action, Action::kSave);
}

TEST_P(DecisionTest, APlanThatDiffersIsMadeAnewByAll) {
  Ranks ranks(GetParam());
  const auto heard =
      ranks.run(2, [](std::uint64_t rank, auto) { return StepRequest{.due = true, .plan_anew = rank == 0}; });
  expect_equal_on_all(heard);
  EXPECT_TRUE(heard[1].back().plan_anew);
}

TEST_P(DecisionTest, AStopOfAnyRankIsAStopOfAllAtOneStep) {
  for (std::uint64_t who = 0; who < GetParam(); ++who) {
    Ranks ranks(GetParam());
    const auto heard = ranks.run(
        6, [&](std::uint64_t rank, std::uint64_t step) { return StepRequest{.stop = rank == who && step >= 3}; });
    expect_equal_on_all(heard);
    EXPECT_EQ(heard[GetParam() == 1 ? 3 : 4][0].action, Action::kStop);
    EXPECT_NE(heard[GetParam() == 1 ? 3 : 4][0].attempt, "") << "a stop saves, too";
    EXPECT_EQ(ranks.errors, 0);
  }
}

// Stops, times, busy arenas and due steps at random moments: no rank is ever left alone, and one stop is one stop.
TEST_P(DecisionTest, WhateverComesTogetherAllRanksDoTheSame) {
  constexpr std::uint64_t kLongestQueue = 10;
  const std::uint64_t seed = test_seed();
  for (std::uint64_t round = 0; round < 60; ++round) {
    std::mt19937_64 random(seed + round);
    const std::uint64_t every = 1 + random() % 5;
    std::vector<std::uint64_t> stops;  // by rank; a rank may never be asked
    for (std::uint64_t rank = 0; rank < GetParam(); ++rank) stops.push_back(5 + random() % 30);
    const std::uint64_t pattern = random();
    Ranks ranks(GetParam());
    const auto heard = ranks.run(25, [&](std::uint64_t rank, std::uint64_t step) {
      return StepRequest{.due = step % every == 0,
                         .wanted = rank == 0 && (pattern >> (step % 64) & 1) != 0,
                         .stop = step >= stops[rank],
                         .busy = rank == 0 && (pattern >> (step * 7 % 64) & 1) != 0};
    });
    expect_equal_on_all(heard);
    EXPECT_EQ(ranks.errors, 0) << "seed " << seed + round;
    const std::uint64_t first = *std::min_element(stops.begin(), stops.end());
    for (std::uint64_t step = 1; step <= 25; ++step) {
      const bool stopped = heard[step][0].action == Action::kStop;
      // Announced for the next step, or for a later one where saves were announced already.
      ASSERT_TRUE(!stopped || (step >= first && step <= first + kLongestQueue)) << "seed " << seed + round;
    }
    const bool any =
        std::any_of(heard.begin(), heard.end(), [](const auto& step) { return step[0].action == Action::kStop; });
    EXPECT_TRUE(any || first + kLongestQueue > 25) << "seed " << seed + round;
  }
}

TEST_P(DecisionTest, TheBoardDoesNotGrow) {
  Ranks ranks(GetParam());
  std::atomic<std::size_t> most = 0;
  ranks.run(300, [&](std::uint64_t rank, std::uint64_t step) {
    if (step > 10) most = std::max(most.load(), ranks.board.size());
    return StepRequest{.due = step % 2 == 0, .wanted = rank == 0 && step % 3 == 0};
  });
  EXPECT_LE(most.load(), 80u);
}

INSTANTIATE_TEST_SUITE_P(Worlds, DecisionTest, testing::Values(1, 2, 3),
                         [](const auto& info) { return "World" + std::to_string(info.param); });

TEST(Decision, RanksThatAreOutOfStepAreToldSo) {
  MemoryBoard board;
  Decider coordinator(board, life_of(0, 2), 5);
  Decider other(board, life_of(1, 2), 0.1);
  ASSERT_TRUE(coordinator.decide(7, {.due = true}));
  const auto heard = other.decide(8, {.due = true});
  ASSERT_FALSE(heard);
  EXPECT_EQ(heard.error().code, Code::kDeadline);
  EXPECT_NE(heard.error().message.find("step 8"), std::string::npos);
  EXPECT_NE(heard.error().message.find("equally often"), std::string::npos);
}

TEST(Decision, ARankThatMissedADecisionRefusesLateAndIsWithTheOthersAgain) {
  MemoryBoard board;
  Decider coordinator(board, life_of(0, 2), 5);
  Decider other(board, life_of(1, 2), 0.05);
  ASSERT_FALSE(other.decide(7, {.due = true})) << "the coordinator is late";
  const auto late = coordinator.decide(7, {.due = true});
  ASSERT_TRUE(late);
  coordinator.await_release(late->attempt, {1});
  EXPECT_EQ(coordinator.decide(8, {.due = true})->action, StepDecision::Action::kDeferred);
  ASSERT_TRUE(other.decide(8, {.due = true}));
  const auto vote = board_get(board, attempt_key(life_of(1, 2), late->attempt, "vote/1"));
  ASSERT_TRUE(vote && *vote);
  EXPECT_FALSE(decode_vote(**vote)->error.empty());
  const auto next = coordinator.decide(9, {.due = true});
  ASSERT_TRUE(next);
  EXPECT_EQ(next->action, StepDecision::Action::kSave);
  EXPECT_EQ(other.decide(9, {.due = true})->attempt, next->attempt);
}

TEST(Decision, WithoutTheCoordinatorItIsADeadlineAndNoHang) {
  MemoryBoard board;
  Decider other(board, life_of(1, 2), 0.05);
  const auto heard = other.decide(8, {.due = true});
  ASSERT_FALSE(heard);
  EXPECT_EQ(heard.error().code, Code::kDeadline);
}

TEST(Decision, APeriodicSaveIsDeferredWhileALateRankIsBusyAndAnExplicitOneWaits) {
  MemoryBoard board;
  const LifeContext life = life_of(0, 2);
  Decider coordinator(board, life, 5);
  coordinator.await_release("aaaa", {1});
  EXPECT_EQ(coordinator.decide(1, {.due = true})->action, Action::kDeferred);
  std::jthread late([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    board.set(attempt_key(life, "aaaa", "done/1"), "1").value();
  });
  EXPECT_EQ(coordinator.decide(2, {.due = true, .is_explicit = true})->action, Action::kSave);
  EXPECT_EQ(coordinator.decide(3, {.due = true})->action, Action::kSave);
}

// --- Votes ---

Vote good_vote() {
  return {.structure = "s", .part = {.length = 5, .crc = 7, .data_bytes = 9}, .object_slots = {}, .error = {}};
}

TEST(Votes, RoundTrip) {
  Vote vote = good_vote();
  vote.object_slots = R"({"0":[0,64]})";
  vote.part.crc = 0xffffffff;
  const auto read = decode_vote(encode_vote(vote));
  ASSERT_TRUE(read);
  EXPECT_EQ(read->structure, "s");
  EXPECT_EQ(read->part.length, 5u);
  EXPECT_EQ(read->part.crc, 0xffffffffu);
  EXPECT_EQ(read->object_slots, vote.object_slots);
  EXPECT_FALSE(decode_vote(encode_vote(good_vote()))->object_slots);
  Vote error{.structure = {}, .part = {}, .object_slots = {}, .error = "no \xff space", .code = Code::kNoSpace};
  EXPECT_EQ(decode_vote(encode_vote(error))->code, Code::kNoSpace);
}

TEST(Votes, ABrokenVoteIsAnErrorAndNothingElse) {
  const std::string text = encode_vote(good_vote());
  for (std::size_t i = 0; i < text.size(); ++i) {
    decode_vote(text.substr(0, i)).ignore("whatever it is, it must not throw");
    std::string changed = text;
    changed[i] = '[';
    decode_vote(changed).ignore("as above");
  }
  EXPECT_FALSE(decode_vote(""));
  EXPECT_FALSE(decode_vote("{}"));
}

// Every combination of good, failed, different and missing votes.
TEST(Votes, AreCarriedOnlyWhenAllAreThereGoodAndEqual) {
  for (std::uint64_t pattern = 0; pattern < 4 * 4 * 4 * 4; ++pattern) {
    std::vector<std::optional<Vote>> votes;
    std::vector<std::string> blamed;
    for (std::uint64_t rank = 0, rest = pattern; rank < 4; ++rank, rest /= 4) {
      votes.push_back(good_vote());
      if (rest % 4 == 1) {
        votes.back()->error = "EIO";
        votes.back()->code = Code::kIo;
      }
      if (rest % 4 == 2) votes.back()->structure = "other";
      if (rest % 4 == 3) votes.back().reset();
      if (rest % 4 != 0) blamed.push_back("rank " + std::to_string(rank));
    }
    const Count count = count_votes(votes, "s");
    ASSERT_EQ(count.carried, pattern == 0);
    ASSERT_EQ(count.code == Code::kInternal, pattern == 0) << count.reason;
    for (const auto& name : blamed) ASSERT_NE(count.reason.find(name), std::string::npos) << count.reason;
    for (std::uint64_t rank = 0, rest = pattern; rank < 4; ++rank, rest /= 4) {
      ASSERT_EQ(std::count(count.missing.begin(), count.missing.end(), rank), rest % 4 == 3);
    }
  }
}

TEST(Votes, ACoordinatorThatCouldNotTakePartBlamesNobodyElse) {
  std::vector<std::optional<Vote>> votes = {good_vote(), good_vote()};
  votes[0]->error = "cannot pickle";
  votes[0]->code = Code::kInvalidArgument;
  votes[0]->structure = "";
  const Count count = count_votes(votes, "");
  EXPECT_FALSE(count.carried);
  EXPECT_FALSE(count.structure_differs);
  EXPECT_EQ(count.reason.find("rank 1"), std::string::npos) << count.reason;
}

}  // namespace
}  // namespace unbroken
