// The invariants of a run of checkpoints, each with tests that try to break it. Elsewhere: 2 and 3 in
// tests/cpp/checkpoint/recovery_test.cc, 5 and 7 in saver_test.cc, 6 in errors_test.cc, 8 in races_test.cc, and 1 and 4
// after every crash of the matrix (check_aftermath).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>

#include "crash/scenario.h"
#include "store/memory/memory_store.h"

namespace unbroken {
namespace {

using State = SaveOutcome::State;

// --- 1: complete => every file is there, until it is retired ---

// Two ranks on two nodes, each of which makes durable only what it has written itself, as clients of a network file
// system do.
struct TwoNodes {
  MemoryStore common;
  FaultStore first{common};
  FaultStore second{common};

  std::vector<RankLife> live_on(const LifePlan& plan) {
    const std::array<Store*, 2> stores = {&first, &second};
    return live(stores, plan);
  }
};

// Steps 2 and 3: what a rank has voted for is durable by its own doing.
TEST(Invariant1, ANodeThatLosesPowerAfterASaveTakesNothingOfItAlong) {
  for (const bool is_second : {false, true}) {
    TwoNodes nodes;
    const auto lives = nodes.live_on({.saves = {10}});
    ASSERT_EQ(lives[0].saves[0].state, State::kDurable) << lives[0].saves[0].reason;
    FaultStore& loses = is_second ? nodes.second : nodes.first;
    EXPECT_TRUE(loses.all_synced());
    ASSERT_TRUE(loses.lose_unsynced(1, Loss::kAll));
    EXPECT_EQ(check_aftermath(nodes.common, {.least = 10, .most = 10}), "") << "node " << is_second;
  }
}

// Step 4: no rank's files may be missing below a marker, however late the rank is.
TEST(Invariant1, TheMarkerWaitsForEveryRank) {
  TwoNodes nodes;
  nodes.second.set_script(fault_wherever(
      [](const Operation& operation) { return operation.name == "finish" || operation.name == "sync_directory"; },
      {.stall = std::chrono::milliseconds(50)}));
  bool too_early = false;
  nodes.first.set_script([&](const Operation& operation) {
    if (operation.name == "publish" && operation.path.ends_with(kMarkerName)) {
      const std::string directory = operation.path.substr(0, operation.path.find('/'));
      too_early = !nodes.second.all_synced() || !nodes.common.stat(join_path(directory, part_name(1))).has_value();
    }
    return Fault::pass();
  });
  const auto lives = nodes.live_on({.saves = {10}});
  ASSERT_EQ(lives[0].saves[0].state, State::kDurable) << lives[0].saves[0].reason;
  EXPECT_FALSE(too_early) << "the marker was published before rank 1's files were durable";
  EXPECT_EQ(check_aftermath(nodes.common, {.least = 10, .most = 10}), "");
}

// --- 2: a load never mixes attempts ---

// C9: the same step is saved again and again, by one life and by several.
TEST(Invariant2, TriesAtOneStepShareNoFile) {
  MemoryStore store;
  for (int life = 0; life < 3; ++life) {
    const auto lives = live(store, {.saves = {10, 10}});
    for (const auto& save : lives[0].saves) ASSERT_EQ(save.state, State::kDurable) << save.reason;
    ASSERT_EQ(lives[0].wrong, "");
  }
  EXPECT_THAT(check_small_root(store), testing::IsEmpty());
  EXPECT_EQ(store.list("")->size(), 7u) << "six attempts and the records";
}

// --- 4: once one is durable, at every later instant at least one is ---

// After every single operation of a run a copy of the store, as a kill there would leave it, has something to load.
TEST(Invariant4, AtEveryInstantThereIsSomethingToLoad) {
  MemoryStore memory;
  FaultStore store(memory);
  bool durable = false;
  std::vector<std::string> wrong;
  std::uint64_t instants = 0;
  store.set_script([&](const Operation& operation) {
    if (operation.name == "publish" && operation.path.ends_with(kMarkerName)) durable = true;
    if (!operation.changes() || !durable) return Fault::pass();
    Fault fault;
    fault.after = [&, what = operation.name + " " + operation.path] {
      ++instants;
      const auto found = find_attempt(memory, std::nullopt);
      if (!found) wrong.push_back(what + ": " + found.error().message);
    };
    return fault;
  });
  for (int life = 0; life < 3; ++life) {
    const std::uint64_t first = 1 + 4 * static_cast<std::uint64_t>(life);
    live(store, {.world_size = 1, .saves = {first, first + 1, first + 2, first + 3}, .keep = {.last = 1}});
  }
  EXPECT_THAT(wrong, testing::IsEmpty());
  EXPECT_GT(instants, 150u);
}

// C12: many failed saves after the last good one; retention must not take that one for old.
TEST(Invariant4, FailedSavesNeverPushOutTheLastGoodOne) {
  MemoryStore memory;
  FaultStore store(memory);
  ASSERT_EQ(live(store, {.saves = {10}, .keep = {.last = 1}})[0].saves[0].state, State::kDurable);
  store.set_script(fault_wherever(
      [](const Operation& operation) { return operation.name == "create" && operation.path.ends_with(kManifestName); },
      Fault::fail(Code::kNoSpace)));
  const auto failed = live(store, {.saves = {20, 30, 40, 50, 60}, .keep = {.last = 1}});
  for (const auto& save : failed[0].saves) EXPECT_EQ(save.state, State::kFailed);
  for (const auto& save : failed[0].saves) EXPECT_EQ(save.code, Code::kNoSpace) << save.reason;
  store.set_script({});
  EXPECT_EQ(check_aftermath(memory, {.least = 10, .most = 10}), "");
}

// --- 8: what a dead generation does late changes nothing ---

// With a real process that is stopped by a signal in the middle of its save and woken after the next life has gone on.
TEST(Invariant8, AStoppedProcessThatWakesChangesNothing) {
  const Scenario scenario{.keep_last = 1};
  const Milestones milestones = find_milestones(scenario);
  ASSERT_EQ(milestones.commits.size(), 4u);
  for (const char* point :
       {"commit.2.part_written", "commit.4.votes_counted", "commit.5.manifest_durable", "commit.6.generations_checked",
        "commit.6.marker_published", "retention.0.generations_checked", "retention.1.condemned"}) {
    const ScratchRoot root;
    ASSERT_EQ(live(*root.open(), {.saves = {10, 20}})[0].saves[1].state, State::kDurable);
    const pid_t child = ::fork();
    if (child == 0) {
      const auto posix = root.open();
      FaultStore store(*posix);
      CrashDriver driver(store);
      bool stopped = false;
      driver.watch([&](const CrashPlace& place) {
        if (stopped || !place.is_point() || place.where != point) return;
        stopped = true;
        ::raise(SIGSTOP);
      });
      live(store, {.saves = {30}, .keep = {.last = 1}});
      ::_exit(stopped ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, WUNTRACED), child);
    ASSERT_TRUE(WIFSTOPPED(status)) << point;
    const auto lives = live(*root.open(), {.saves = {45}, .keep = {.last = 1}});
    ASSERT_TRUE(lives[0].start) << point << ": " << lives[0].error->message;
    EXPECT_EQ(lives[0].wrong, "");
    EXPECT_EQ(lives[0].saves[0].state, State::kDurable) << point << ": " << lives[0].saves[0].reason;
    ASSERT_EQ(::kill(child, SIGCONT), 0);
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << point;
    EXPECT_EQ(check_aftermath(*root.open(), {.least = 45, .most = 45}), "") << point;
  }
}

}  // namespace
}  // namespace unbroken
