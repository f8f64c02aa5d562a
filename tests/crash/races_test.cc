// Two lives at once: an old one that saves and retains, for it does not know yet that it is dead, and a new one that
// starts, loads, saves and retains. Their operations are interleaved in every way with two switches, and in random ways
// with more; in some either is killed on its way. (Invariants 4 and 8.)
#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <thread>

#include "base/memory_board.h"
#include "crash/scenario.h"
#include "crash/turns.h"
#include "store/memory/memory_store.h"
#include "testing/seed.h"

namespace unbroken {
namespace {

using State = SaveOutcome::State;

constexpr std::uint64_t kOldStep = 30;
constexpr std::uint64_t kNewStep = 45;
constexpr int kOld = 0;
constexpr int kNew = 1;

struct Race {
  std::vector<Turns::Segment> plan;
  std::uint64_t old_dies_at = Turns::kToTheEnd;  // before its operation of that number
  std::uint64_t new_dies_at = Turns::kToTheEnd;
  std::optional<std::uint64_t> from_step{};  // what the new one asks for

  std::string text() const {
    std::string text;
    for (const auto& segment : plan)
      text += fmt::format("{}{} ", segment.actor == kOld ? "old " : "new ", segment.operations);
    if (old_dies_at != Turns::kToTheEnd) text += fmt::format("old dies at {} ", old_dies_at);
    if (new_dies_at != Turns::kToTheEnd) text += fmt::format("new dies at {} ", new_dies_at);
    if (from_step) text += fmt::format("from step {}", *from_step);
    return text;
  }
};

// The old life, with steps 10 and 20 saved.
class OldLife {
 public:
  explicit OldLife(Store& store) : store_(store) {
    Recovery recovery(store_, board_, {.host = "old", .timeout_seconds = 0});
    start_ = recovery.begin().value();
    recovery.settle(Verdict::kLoaded, "").value();
    saver_.emplace(store_, board_, start_, SaverOptions{.keep = {.last = 1}, .vote_timeout_seconds = 5});
    image_.emplace(SmallImage::create(0).value());
    save(10);
    save(20);
  }

  SaveOutcome save(std::uint64_t step) {
    const auto decision = saver_->decide(step, {.due = true}).value();
    SaveRequest request = small_request(step, decision, image_->stage(step, start_.generation).value());
    request.settle_timeout_seconds = 0;
    return saver_->commit(image_->image(), std::move(request));
  }
  void retain() { saver_->retain().ignore("what is left is what the test looks at"); }

 private:
  Store& store_;
  MemoryBoard board_;
  Start start_;
  std::optional<Saver> saver_;
  std::optional<SmallImage> image_;
};

struct Ran {
  SaveOutcome old_save;
  RankLife new_life;
  std::vector<Operation> old_log;
  std::vector<Operation> new_log;
};

Ran run(const Race& race, Store& store) {
  FaultStore old_store(store);
  FaultStore new_store(store);
  Ran ran;
  OldLife old_life(old_store);
  Turns turns(race.plan);
  old_store.set_script(turns.script(kOld, race.old_dies_at));
  new_store.set_script(turns.script(kNew, race.new_dies_at));
  {
    const std::jthread old_thread([&] {
      ran.old_save = old_life.save(kOldStep);
      if (ran.old_save.state == State::kDurable) old_life.retain();
      turns.leave(kOld);
    });
    const std::jthread new_thread([&] {
      ran.new_life = live(new_store, {.world_size = 1,
                                      .saves = {kNewStep},
                                      .keep = {.last = 1},
                                      .from_step = race.from_step,
                                      .timeout_seconds = 5,
                                      // The store of one that is killed never answers again.
                                      .settle_timeout_seconds = race.new_dies_at == Turns::kToTheEnd ? 5.0 : 0.0})[0];
      turns.leave(kNew);
    });
  }
  ran.old_log = old_store.log();
  ran.new_log = new_store.log();
  return ran;
}

std::string check_new_life(const Race& race, const Ran& ran) {
  if (race.new_dies_at != Turns::kToTheEnd) return {};
  const RankLife& life = ran.new_life;
  if (!life.start) {
    // The step that was asked for may be on its way out, and then it must be said.
    const bool refused = race.from_step && life.error && life.error->code == Code::kNotFound;
    return refused ? std::string() : "the new life did not start: " + (life.error ? life.error->message : "");
  }
  if (!life.wrong.empty()) return "the new life loaded: " + life.wrong;
  if (life.start->fresh) return "the new life started fresh: " + life.start->account;
  if (life.saves.empty()) return "the new life did not save";
  if (life.saves[0].state != State::kDurable) return "the new life's save: " + life.saves[0].reason;
  for (const auto& error : life.retention_errors) return "the new life's retention: " + error.message;
  return {};
}

std::string check_race(const Race& race) {
  MemoryStore store;
  const Ran ran = run(race, store);
  if (auto wrong = check_new_life(race, ran); !wrong.empty()) return wrong;
  // What was durable to the living one is what is loaded, whatever the dead one did late. Else something is, and it is
  // no older than what the old life had before.
  const bool saved = !ran.new_life.saves.empty() && ran.new_life.saves[0].state == State::kDurable;
  const std::uint64_t least = saved ? kNewStep : 20;
  return check_aftermath(store, {.least = least, .most = kNewStep, .kept = 1});
}

std::string check_each(const std::vector<Race>& races, std::size_t sampled) {
  const auto chosen = sample_cases(races.size(), sampled);
  fmt::print("{} of {} races\n", chosen.size(), races.size());
  std::string all;
  for (const auto& wrong : check_cases(chosen.size(), [&](std::size_t number) -> std::string {
         const Race& race = races[chosen[number]];
         const std::string found = check_race(race);
         return found.empty() ? found : fmt::format("{}: {}", race.text(), found);
       })) {
    all += wrong + "\n";
  }
  return all;
}

// Operations of each when nothing is in its way.
struct Lengths {
  std::uint64_t old_life = 0;
  std::uint64_t new_life = 0;
};

Lengths measure() {
  MemoryStore store;
  const Ran ran = run({}, store);
  return {.old_life = ran.old_log.size(), .new_life = ran.new_log.size()};
}

class Races : public testing::TestWithParam<std::optional<std::uint64_t>> {
 protected:
  void SetUp() override {
    lengths_ = measure();
    ASSERT_GT(lengths_.old_life, 30u);
    ASSERT_GT(lengths_.new_life, 40u);
  }
  Lengths lengths_;
};

// The old life stops anywhere, the new one comes as far as anywhere, the old one wakes and goes on to its end.
TEST_P(Races, AStoppedLifeThatWakesChangesNothingForTheNewOne) {
  std::vector<Race> races;
  for (std::uint64_t i = 0; i <= lengths_.old_life; ++i) {
    for (std::uint64_t j = 0; j <= lengths_.new_life; ++j) {
      races.push_back({.plan = {{kOld, i}, {kNew, j}}, .from_step = GetParam()});
    }
  }
  EXPECT_EQ(check_each(races, 400), "");
}

// The same, but the old life is killed some way after it woke: what it left half done must not harm.
TEST_P(Races, AStoppedLifeThatWakesAndIsKilledChangesNothingForTheNewOne) {
  std::mt19937_64 random(test_seed());
  std::vector<Race> races;
  for (int n = 0; n < 6000; ++n) {
    const std::uint64_t i = random() % lengths_.old_life;
    const std::uint64_t k = i + random() % (lengths_.old_life - i);
    races.push_back({.plan = {{kOld, i}, {kNew, random() % lengths_.new_life}, {kOld, k - i}, {kNew, Turns::kToTheEnd}},
                     .old_dies_at = k,
                     .from_step = GetParam()});
  }
  EXPECT_EQ(check_each(races, 300), "");
}

// The new life is killed anywhere: it was one more life in the history, and at least as much is there as before.
TEST_P(Races, ANewLifeThatIsKilledOnItsWayLeavesSomethingToLoad) {
  std::mt19937_64 random(test_seed());
  std::vector<Race> races;
  for (int n = 0; n < 6000; ++n) {
    const std::uint64_t j = random() % lengths_.new_life;
    const std::uint64_t k = j + random() % (lengths_.new_life - j);
    Race race{
        .plan = {{kOld, random() % lengths_.old_life}, {kNew, j}, {kOld, random() % lengths_.old_life}, {kNew, k - j}},
        .new_dies_at = k,
        .from_step = GetParam()};
    if (random() % 2 == 0) race.old_dies_at = random() % lengths_.old_life;
    races.push_back(race);
  }
  EXPECT_EQ(check_each(races, 300), "");
}

TEST_P(Races, RandomInterleavings) {
  std::mt19937_64 random(test_seed());
  std::vector<Race> races;
  for (int n = 0; n < 6000; ++n) {
    Race race{.plan = {}, .from_step = GetParam()};
    const std::uint64_t longest = 1 + random() % 12;
    for (int segment = 0; segment < 60; ++segment) race.plan.push_back({segment % 2, 1 + random() % longest});
    races.push_back(race);
  }
  EXPECT_EQ(check_each(races, 300), "");
}

INSTANTIATE_TEST_SUITE_P(Starts, Races, testing::Values(std::nullopt, std::optional<std::uint64_t>(20)),
                         [](const auto& info) { return info.param ? "FromAnOlderStep" : "FromTheNewest"; });

// A life that was overtaken while it was stopped must not commit, must say who overtook it, and must remove nothing.
TEST(Fence, ALifeThatWasOvertakenBeforeItsLastLookFailsNamingTheNewOne) {
  const Lengths lengths = measure();
  MemoryStore quiet;
  const Ran undisturbed = run({}, quiet);
  std::uint64_t last_look = 0;
  for (const auto& operation : undisturbed.old_log) {
    if (operation.name == "list" && operation.path == kGenerationsDirectory) last_look = operation.index;
    if (operation.name == "publish") break;
  }
  ASSERT_GT(last_look, 5u);
  for (std::uint64_t i = 0; i <= last_look; ++i) {
    MemoryStore store;
    const Ran ran = run({.plan = {{kOld, i}, {kNew, Turns::kToTheEnd}}}, store);
    ASSERT_EQ(ran.old_save.state, State::kFailed) << i;
    ASSERT_EQ(ran.old_save.code, Code::kFenced) << i << ": " << ran.old_save.reason;
    ASSERT_NE(ran.old_save.reason.find(ran.new_life.start->life_id), std::string::npos) << ran.old_save.reason;
    ASSERT_EQ(start_small(store)->key.step, kNewStep);
  }
  EXPECT_GT(lengths.old_life, last_look);
}

// --- Two starts at once ---

// Two starts, interleaved in every way with two switches: one wins; the other fails naming it, or is a later life.
TEST(TwoStarts, OneWinsAndTheOtherNamesIt) {
  std::uint64_t length = 0;
  {
    MemoryStore store;
    live(store, {.world_size = 1, .saves = {10, 20}});
    FaultStore counted(store);
    ASSERT_TRUE(start_small(counted));
    length = counted.log().size();
  }
  std::uint64_t fenced = 0;
  for (std::uint64_t i = 0; i <= length; ++i) {
    for (std::uint64_t j = 0; j <= length; ++j) {
      MemoryStore store;
      live(store, {.world_size = 1, .saves = {10, 20}});
      FaultStore stores[2] = {FaultStore(store), FaultStore(store)};
      Turns turns({{0, i}, {1, j}});
      std::optional<Result<Start>> starts[2];
      {
        std::vector<std::jthread> threads;
        for (int actor = 0; actor < 2; ++actor) {
          stores[actor].set_script(turns.script(actor));
          threads.emplace_back([&, actor] {
            starts[actor].emplace(start_small(stores[actor]));
            turns.leave(actor);
          });
        }
      }
      ASSERT_TRUE(*starts[0] || *starts[1]) << i << " " << j;
      for (int actor = 0; actor < 2; ++actor) {
        const auto& mine = *starts[actor];
        const auto& other = *starts[1 - actor];
        if (mine) {
          ASSERT_EQ((*mine).key.step, 20u);
          ASSERT_TRUE(!other || (*mine).generation != (*other).generation);
        } else {
          ++fenced;
          ASSERT_EQ(mine.error().code, Code::kFenced) << mine.error().message;
          ASSERT_NE(mine.error().message.find((*other).life_id), std::string::npos) << mine.error().message;
        }
      }
    }
  }
  EXPECT_GT(fenced, 0u);
}

// The same with processes on a real file system, which meet as chance has it.
TEST(TwoStarts, OfManyProcessesEveryOneIsALifeOfItsOwnOrFenced) {
  constexpr int kProcesses = 4;
  for (int round = 0; round < 10; ++round) {
    const ScratchRoot root;
    live(*root.open(), {.world_size = 1, .saves = {10, 20}});
    const auto wrong = check_cases(kProcesses, [&](std::size_t) -> std::string {
      const auto store = root.open();
      const auto start = start_small(*store);
      if (!start) return start.error().code == Code::kFenced ? std::string() : start.error().message;
      return start->key.step == 20 ? std::string() : start->account;
    });
    ASSERT_THAT(wrong, testing::IsEmpty());
    const auto generations = list_generations(*root.open()).value();
    ASSERT_GE(generations.size(), 2u);
    ASSERT_EQ(check_aftermath(*root.open(), {.least = 20, .most = 20, .kept = 2}), "");
  }
}

}  // namespace
}  // namespace unbroken
