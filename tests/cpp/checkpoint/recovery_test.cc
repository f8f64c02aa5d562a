// Starts of several ranks: what they agree on, what is refused, and what a start that cannot go on says.
#include "checkpoint/recovery.h"

#include <gtest/gtest.h>

#include <functional>
#include <thread>

#include "base/bytes.h"
#include "base/memory_board.h"
#include "checkpoint/shard.h"
#include "store/memory/memory_store.h"
#include "testing/fault_store.h"
#include "testing/small_run.h"

namespace unbroken {
namespace {

constexpr std::uint64_t kWorld = 3;

struct Ended {
  std::optional<Start> start;
  std::optional<Error> error;
  int rounds = 0;
};

class RecoveryTest : public testing::Test {
 protected:
  using Load = std::function<std::pair<Verdict, std::string>(std::uint64_t rank, const Start&)>;

  void save(std::vector<std::uint64_t> steps) {
    const auto lives = live(store_, {.world_size = kWorld, .saves = std::move(steps)});
    for (const auto& saved : lives[0].saves) {
      ASSERT_EQ(saved.state, SaveOutcome::State::kDurable) << saved.reason;
      names_.push_back(saved.attempt_path);
    }
  }

  void damage(const std::string& attempt, std::string_view file) {
    const std::string path = join_path(attempt, file);
    std::string bytes = store_.read(path, kMiB).value();
    bytes[bytes.size() / 2] ^= 1;
    ASSERT_TRUE(store_.publish(path, bytes_of(bytes)));
  }

  // A start of all ranks, each of which loads as `load` says.
  std::vector<Ended> start(const Load& load, Store* store = nullptr, RecoveryOptions options = {}) {
    MemoryBoard board;
    std::vector<Ended> ended(kWorld);
    std::vector<std::jthread> ranks;
    options.world_size = kWorld;
    options.host = "test";
    options.timeout_seconds = std::min(options.timeout_seconds, 20.0);
    for (std::uint64_t rank = 0; rank < kWorld; ++rank) {
      ranks.emplace_back([&, rank, options]() mutable {
        options.rank = rank;
        Recovery recovery(store != nullptr ? *store : store_, board, options);
        auto begun = recovery.begin();
        while (begun) {
          ended[rank].start = *begun;
          ++ended[rank].rounds;
          const auto [verdict, reason] = load(rank, *begun);
          auto next = recovery.settle(verdict, reason);
          if (!next) {
            ended[rank].error = next.error();
            return;
          }
          if (!*next) return;
          begun = **next;
        }
        ended[rank].error = begun.error();
      });
    }
    ranks.clear();
    return ended;
  }

  std::pair<Verdict, std::string> load_own(std::uint64_t rank, const Start& start) {
    if (start.fresh) return {Verdict::kLoaded, ""};
    const Status status = check_small_bytes(store_, start.attempt, rank);
    if (status) return {Verdict::kLoaded, ""};
    return {Verdict::kDamaged, status.error().message};
  }
  Load honest() {
    return [this](std::uint64_t rank, const Start& start) { return load_own(rank, start); };
  }

  static void expect_same(const std::vector<Ended>& ended) {
    for (const auto& one : ended) {
      ASSERT_TRUE(one.start);
      EXPECT_EQ(one.start->attempt, ended[0].start->attempt);
      EXPECT_EQ(one.start->life_id, ended[0].start->life_id);
      EXPECT_EQ(one.start->generation, ended[0].start->generation);
      EXPECT_EQ(one.start->manifest, ended[0].start->manifest);
      EXPECT_EQ(one.start->account, ended[0].start->account);
      EXPECT_EQ(one.rounds, ended[0].rounds);
    }
  }

  MemoryStore store_;
  std::vector<std::string> names_;
};

TEST_F(RecoveryTest, AFreshRootIsAFreshStartOnAllRanks) {
  const auto ended = start(honest());
  expect_same(ended);
  EXPECT_TRUE(ended[0].start->fresh);
  EXPECT_NE(ended[0].start->account.find("fresh"), std::string::npos);
  EXPECT_EQ(start(honest())[0].start->run_id, ended[0].start->run_id) << "the run keeps its id";
}

TEST_F(RecoveryTest, ADirectoryThatIsACheckpointDoesNotBecomeARoot) {
  ASSERT_TRUE(store_.publish(kMarkerName, bytes_of("of another program")));
  for (const auto& one : start(honest())) {
    ASSERT_TRUE(one.error);
    EXPECT_EQ(one.error->code, Code::kInvalidArgument) << one.error->message;
  }
  EXPECT_EQ(store_.list("")->size(), 1u);
}

// What a life gave up counts again when its record cannot be read, and a checkpoint of another program is left alone.
TEST_F(RecoveryTest, AllRanksHearOfWhatIsUnusual) {
  save({10, 20});
  ASSERT_TRUE(store_.publish(generation_path(1), bytes_of("{")));
  const auto ended = start(honest());
  expect_same(ended);
  for (const auto& one : ended) {
    ASSERT_EQ(one.start->warnings.size(), 1u);
    EXPECT_NE(one.start->warnings[0].find(generation_path(1)), std::string::npos) << one.start->warnings[0];
  }
}

// Invariants 2 and 3.
TEST_F(RecoveryTest, OneRankThatFindsDamageTakesAllBackToTheSameOlderOne) {
  save({10, 20, 30});
  damage(names_[2], "__1_0.distcp");  // of the right length: only the rank that reads it can see it
  const auto ended = start(honest());
  expect_same(ended);
  EXPECT_EQ(ended[0].start->attempt, names_[1]);
  EXPECT_EQ(ended[0].rounds, 2);
  ASSERT_EQ(ended[0].start->refused.size(), 1u);
  EXPECT_EQ(ended[0].start->refused[0].attempt, names_[2]);
  EXPECT_NE(ended[0].start->refused[0].reason.find("rank 1"), std::string::npos);
  EXPECT_NE(ended[0].start->account.find("__1_0.distcp"), std::string::npos) << ended[0].start->account;
  // C18: never tried twice.
  const auto again = start(honest());
  EXPECT_EQ(again[0].start->attempt, names_[1]);
  EXPECT_EQ(again[0].rounds, 1);
}

TEST_F(RecoveryTest, FilesThatAreMissingAreFoundBeforeAnyRankLoads) {
  save({10, 20, 30});
  ASSERT_TRUE(store_.remove(names_[2] + "/__2_1.distcp"));
  damage(names_[1], "__0.json");
  const auto ended = start(honest());
  expect_same(ended);
  EXPECT_EQ(ended[0].start->attempt, names_[0]);
  EXPECT_EQ(ended[0].rounds, 1);
  EXPECT_EQ(ended[0].start->refused.size(), 2u);
}

TEST_F(RecoveryTest, NothingLoadableIsAnErrorThatListsEveryCandidateAndNeverStepZero) {
  save({10, 20});
  damage(names_[0], "__2_0.distcp");
  damage(names_[1], "__0_1.distcp");
  for (int time = 0; time < 2; ++time) {
    const auto ended = start(honest());
    for (const auto& one : ended) {
      ASSERT_TRUE(one.error);
      EXPECT_EQ(one.error->code, Code::kNotFound);
      EXPECT_NE(one.error->message.find(names_[0]), std::string::npos) << one.error->message;
      EXPECT_NE(one.error->message.find(names_[1]), std::string::npos) << one.error->message;
      EXPECT_NE(one.error->message.find("allow_fresh"), std::string::npos) << one.error->message;
    }
  }
  const auto fresh = start(honest(), nullptr, {.allow_fresh = true});
  expect_same(fresh);
  EXPECT_TRUE(fresh[0].start->fresh);
  EXPECT_TRUE(start(honest())[0].start->fresh) << "and from then on the run is a fresh one";
}

TEST_F(RecoveryTest, ARankWhoseProgramCannotTakeTheStateStopsAll) {
  save({10, 20});
  const auto ended = start([&](std::uint64_t rank, const Start&) {
    return rank == 1 ? std::pair(Verdict::kFailed, std::string("layer.weight has another shape"))
                     : std::pair(Verdict::kLoaded, std::string());
  });
  for (const auto& one : ended) {
    ASSERT_TRUE(one.error);
    EXPECT_EQ(one.error->code, Code::kInvalidArgument);
    EXPECT_NE(one.error->message.find("layer.weight"), std::string::npos);
    EXPECT_EQ(one.rounds, 1) << "no other checkpoint would help";
  }
  EXPECT_EQ(start(honest())[0].start->attempt, names_[1]) << "and nothing was given up";
}

TEST_F(RecoveryTest, AStoreThatARankCannotReachStopsAllAndGivesNothingUp) {
  save({10, 20});
  const auto ended = start([&](std::uint64_t rank, const Start&) {
    return std::pair(rank == 2 ? Verdict::kUnreachable : Verdict::kLoaded, std::string("no route to host"));
  });
  for (const auto& one : ended) EXPECT_EQ(one.error.value().code, Code::kUnavailable);
  EXPECT_EQ(start(honest())[0].start->attempt, names_[1]);
}

TEST_F(RecoveryTest, ARankThatNeverReportsIsNamed) {
  MemoryBoard board;
  Recovery coordinator(store_, board, {.world_size = 2, .host = "test", .load_timeout_seconds = 0.1});
  ASSERT_TRUE(coordinator.begin());
  const auto settled = coordinator.settle(Verdict::kLoaded, "");
  ASSERT_FALSE(settled);
  EXPECT_EQ(settled.error().code, Code::kDeadline);
  EXPECT_NE(settled.error().message.find("rank 1"), std::string::npos);
}

TEST_F(RecoveryTest, RanksHearTheCoordinatorsError) {
  save({10});
  FaultStore failing(store_);
  failing.set_script(fault_wherever([](const Operation& operation) { return operation.name == "list"; },
                                    Fault::fail(Code::kUnavailable)));
  const auto ended = start(honest(), &failing, {.timeout_seconds = 0.6});
  for (const auto& one : ended) EXPECT_EQ(one.error.value().code, Code::kUnavailable);
  EXPECT_EQ(start(honest())[0].start->attempt, names_[0]) << "unreachable is never absent";
}

TEST_F(RecoveryTest, AStoreThatHiccupsIsAskedAgain) {
  save({10});
  FaultStore failing(store_);
  failing.set_script(fault_on({.name = "list"}, Fault::fail(Code::kUnavailable)));
  const auto ended = start(honest(), &failing);
  expect_same(ended);
  EXPECT_EQ(ended[0].start->attempt, names_[0]);
}

TEST_F(RecoveryTest, TheStepThatIsAskedForOrAnError) {
  save({10, 20, 30});
  const auto ended = start(honest(), nullptr, {.step = 20});
  expect_same(ended);
  EXPECT_EQ(ended[0].start->attempt, names_[1]);
  EXPECT_EQ(start(honest())[0].start->attempt, names_[1]) << "what was above it is given up";
  const auto none = start(honest(), nullptr, {.step = 30});
  EXPECT_EQ(none[0].error.value().code, Code::kNotFound);
  EXPECT_NE(none[0].error->message.find("step 30"), std::string::npos);
  damage(names_[1], "__0_0.distcp");
  EXPECT_EQ(start(honest(), nullptr, {.step = 20})[0].error.value().code, Code::kNotFound) << "never another step";
}

TEST_F(RecoveryTest, AnotherWorldSizeLoadsTheSame) {
  save({10});
  for (const std::uint64_t world : {1, 2, 5}) {
    const auto lives = live(store_, {.world_size = world, .saves = {}});
    for (const auto& life : lives) {
      ASSERT_TRUE(life.start) << life.error->message;
      EXPECT_EQ(life.start->attempt, names_[0]);
      EXPECT_EQ(life.wrong, "");
    }
  }
}

}  // namespace
}  // namespace unbroken
