// Single steps of the protocols that no crash of a whole run shows on its own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/bytes.h"
#include "base/memory_board.h"
#include "crash/scenario.h"
#include "store/memory/memory_store.h"

namespace unbroken {
namespace {

using State = SaveOutcome::State;

class Steps : public testing::Test {
 protected:
  void SetUp() override {
    const auto lives = live(store_, {.world_size = 1, .saves = {10, 20, 30}});
    for (const auto& save : lives[0].saves) names_.push_back(save.attempt_path);
    old_ = {.run_id = lives[0].start->run_id, .life_id = lives[0].start->life_id, .generation = 1};
  }
  bool is_retired(std::size_t attempt) { return memory_.stat(join_path(names_[attempt], kRetiredName)).has_value(); }
  // A newer life takes the run over.
  void overtake() { ASSERT_TRUE(start_small(memory_)); }

  MemoryStore memory_;
  FaultStore store_{memory_};
  std::vector<std::string> names_;
  LifeContext old_;
};

// G1, G5: the history is durable, its directory included, before anything is built on it.
TEST_F(Steps, TheWholeHistoryIsDurableWhenAStartReturns) {
  MemoryStore fresh;
  FaultStore store(fresh);
  ASSERT_TRUE(start_small(store));
  ASSERT_TRUE(store.lose_unsynced(1, Loss::kAll));
  const auto generations = list_generations(fresh);
  ASSERT_TRUE(generations) << generations.error().message;
  ASSERT_EQ(generations->size(), 1u);
  EXPECT_TRUE(generations->front().record) << generations->front().error;
}

// G3: what older lives see of a claim must not vanish again while the start goes by it.
TEST_F(Steps, TheClaimIsDurableBeforeTheStartLooks) {
  bool looked = false;
  store_.set_script([&](const Operation& operation) {
    Fault fault;
    if (operation.name != "list" || !operation.path.empty() || !memory_.stat(claim_path(2))) return fault;
    looked = true;
    fault.before = [&] { EXPECT_TRUE(store_.all_synced()); };
    return fault;
  });
  ASSERT_TRUE(start_small(store_));
  EXPECT_TRUE(looked);
}

// S4: a start that slept since its claim, and could choose what a newer one has made, records nothing.
TEST_F(Steps, AStartThatIsOvertakenAfterItsClaimEndsThere) {
  store_.set_script([&](const Operation& operation) {
    Fault fault;
    const bool claimed = memory_.stat(claim_path(2)).has_value() && !memory_.stat(claim_path(3));
    if (claimed && operation.name == "list") fault.before = [&] { overtake(); };
    return fault;
  });
  const auto start = start_small(store_);
  ASSERT_FALSE(start);
  EXPECT_EQ(start.error().code, Code::kFenced) << start.error().message;
  EXPECT_FALSE(memory_.stat(generation_path(2)));
  EXPECT_TRUE(memory_.stat(generation_path(3)));
}

// S3: a file that is missing is found before any rank begins to load.
TEST_F(Steps, WhatIsChosenIsCheckedFileByFile) {
  ASSERT_TRUE(memory_.remove(names_[2] + "/__0_0.distcp"));
  MemoryBoard board;
  Recovery recovery(store_, board, {.host = "test", .timeout_seconds = 1});
  const auto start = recovery.begin();
  ASSERT_TRUE(start) << start.error().message;
  EXPECT_EQ(start->attempt, names_[1]);
}

// C2, C3, C5: what the marker vouches for is durable before it is there, names included.
TEST_F(Steps, AllIsDurableBeforeTheMarkerIsPublished) {
  bool published = false;
  store_.set_script([&](const Operation& operation) {
    Fault fault;
    if (operation.name != "publish" || !operation.path.ends_with(kMarkerName)) return fault;
    published = true;
    fault.before = [&] { EXPECT_TRUE(store_.all_synced()); };
    return fault;
  });
  live(store_, {.world_size = 2, .saves = {40}});
  EXPECT_TRUE(published);
}

// C6: a life that slept between its look and its marker does not call a step durable that the newer one went on
// without.
TEST_F(Steps, ALifeThatIsOvertakenBeforeItsMarkerCallsTheStepNotDurableAndRemovesNothing) {
  std::string marker;
  store_.set_script([&](const Operation& operation) {
    Fault fault;
    if (marker.empty() && operation.name == "publish" && operation.path.ends_with(kMarkerName)) {
      marker = operation.path;
      fault.before = [&] { overtake(); };
    }
    return fault;
  });
  const auto lives = live(store_, {.world_size = 1, .saves = {40}});
  ASSERT_EQ(lives[0].saves.size(), 1u);
  EXPECT_EQ(lives[0].saves[0].state, State::kFailed);
  EXPECT_EQ(lives[0].saves[0].code, Code::kFenced) << lives[0].saves[0].reason;
  EXPECT_TRUE(memory_.stat(marker));
  const auto found = find_attempt(memory_, std::nullopt);
  ASSERT_TRUE(found) << found.error().message;
  EXPECT_EQ(found->key.step, 30u);
}

// A marker that is seen and may not survive a loss of power: its life ended, or was told of an error in its last fsync.
class StepsWithALooseMarker : public Steps {
 protected:
  void SetUp() override {
    Steps::SetUp();
    std::string published;
    store_.set_script([&](const Operation& operation) {
      if (operation.name == "publish" && operation.path.ends_with(kMarkerName))
        published = operation.path.substr(0, operation.path.find('/'));
      const bool last = operation.name == "sync_directory" && !published.empty() && operation.path == published;
      return last ? Fault::fail(Code::kIo) : Fault::pass();
    });
    const auto lives = live(store_, {.world_size = 1, .saves = {40}, .keep = {.last = 1}});
    store_.set_script({});
    ASSERT_EQ(lives[0].saves.size(), 1u);
    ASSERT_EQ(lives[0].saves[0].state, State::kUnknown) << lives[0].saves[0].reason;
    ASSERT_FALSE(store_.all_synced());
    loose_ = {.run_id = lives[0].start->run_id, .life_id = lives[0].start->life_id, .generation = 2};
  }
  // What is there after a loss of power.
  std::uint64_t newest_left() {
    EXPECT_TRUE(store_.lose_unsynced(1, Loss::kAll));
    const auto found = find_attempt(memory_, std::nullopt);
    EXPECT_TRUE(found) << found.error().message;
    return found ? found->key.step : 0;
  }
  LifeContext loose_;
};

// S3: what a run goes on from must not vanish below it.
TEST_F(StepsWithALooseMarker, WhatIsChosenIsDurableWhenAStartReturns) {
  const auto start = start_small(store_);
  ASSERT_TRUE(start) << start.error().message;
  ASSERT_EQ(start->key.step, 40u);
  EXPECT_EQ(newest_left(), 40u);
}

// R0, invariant 4: nothing older goes for one that could still vanish.
TEST_F(StepsWithALooseMarker, WhatStaysIsDurableBeforeAnythingGoes) {
  const auto retained = retain(store_, loose_, {.last = 1}, {});
  ASSERT_TRUE(retained) << retained.error().message;
  EXPECT_FALSE(retained->empty());
  EXPECT_EQ(newest_left(), 40u);
}

// R0: a life that has been overtaken does not so much as condemn.
TEST_F(Steps, ALifeThatHasBeenOvertakenRetainsNothing) {
  overtake();
  store_.set_script({});
  const auto retained = retain(store_, old_, {.last = 1}, {});
  ASSERT_FALSE(retained);
  EXPECT_EQ(retained.error().code, Code::kFenced);
  for (const auto& operation : store_.log())
    EXPECT_FALSE(operation.changes()) << operation.name << " " << operation.path;
}

// R1: `retired` is there, durably, before the marker goes.
TEST_F(Steps, AnAttemptIsCondemnedDurablyBeforeItsMarkerGoes) {
  bool removed = false;
  store_.set_script([&](const Operation& operation) {
    Fault fault;
    if (operation.name != "remove" || !operation.path.ends_with(kMarkerName)) return fault;
    removed = true;
    fault.before = [&] {
      EXPECT_TRUE(is_retired(0));
      EXPECT_TRUE(store_.all_synced());
    };
    return fault;
  });
  ASSERT_TRUE(remove_attempt(store_, old_, names_[0]));
  EXPECT_TRUE(removed);
}

// R2: a life that sees a newer one takes back what it has just written, and nothing else.
TEST_F(Steps, ALifeThatIsOvertakenWhileItRetiresTakesItBack) {
  store_.set_script([&](const Operation& operation) {
    Fault fault;
    if (operation.name == "publish" && operation.path.ends_with(kRetiredName)) fault.after = [&] { overtake(); };
    return fault;
  });
  const Status removed = remove_attempt(store_, old_, names_[0]);
  ASSERT_FALSE(removed);
  EXPECT_EQ(removed.error().code, Code::kFenced);
  EXPECT_FALSE(is_retired(0));
  EXPECT_TRUE(store_.all_synced());
  EXPECT_THAT(check_small_root(memory_), testing::IsEmpty());
}

TEST_F(Steps, ALifeThatIsOvertakenDoesNotTakeBackWhatTheNewerOneWrote) {
  const std::string newer = encode(Retirement{.life_id = "newer", .generation = 2, .time_ms = 0});
  store_.set_script([&](const Operation& operation) {
    Fault fault;
    if (operation.name != "publish" || !operation.path.ends_with(kRetiredName)) return fault;
    fault.after = [&, path = operation.path] {
      overtake();
      memory_.publish(path, bytes_of(newer)).value();
    };
    return fault;
  });
  ASSERT_FALSE(remove_attempt(store_, old_, names_[0]));
  EXPECT_TRUE(is_retired(0));
}

// R3: stock DCP looks for `.metadata` alone, so no file goes while one could be seen, or could come back.
TEST_F(Steps, TheMarkerIsGoneForGoodBeforeAnyFileGoes) {
  bool removed = false;
  store_.set_script([&](const Operation& operation) {
    Fault fault;
    if (operation.name != "remove_directory") return fault;
    removed = true;
    fault.before = [&] {
      EXPECT_EQ(memory_.stat(join_path(names_[0], kMarkerName)).error().code, Code::kNotFound);
      EXPECT_TRUE(store_.all_synced());
    };
    return fault;
  });
  ASSERT_TRUE(remove_attempt(store_, old_, names_[0]));
  EXPECT_TRUE(removed);
}

// R4: a removal that was reported does not come undone.
TEST_F(Steps, ARemovalIsDurable) {
  ASSERT_TRUE(remove_attempt(store_, old_, names_[0]));
  EXPECT_TRUE(store_.all_synced());
  ASSERT_TRUE(store_.lose_unsynced(1, Loss::kAll));
  EXPECT_EQ(memory_.stat(names_[0]).error().code, Code::kNotFound);
}

}  // namespace
}  // namespace unbroken
