#include "crash/scenario.h"

#include <fmt/core.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <numeric>
#include <random>

#include "store/memory/memory_store.h"
#include "testing/seed.h"

namespace unbroken {

std::optional<SaveOutcome> ScenarioReport::save_of(std::uint64_t step, std::uint64_t rank) const {
  const auto& lives = step == kSecondLifeStep ? second : first;
  const auto at = static_cast<std::size_t>(std::find(std::begin(kFirstLifeSteps), std::end(kFirstLifeSteps), step) -
                                           std::begin(kFirstLifeSteps)) %
                  std::size(kFirstLifeSteps);
  if (rank >= lives.size() || at >= lives[rank].saves.size()) return std::nullopt;
  return lives[rank].saves[at];
}

ScenarioReport run_scenario(Store& store, const Scenario& scenario) {
  LifePlan plan{.saves = {std::begin(kFirstLifeSteps), std::end(kFirstLifeSteps)},
                .keep = {.last = scenario.keep_last}};
  ScenarioReport report;
  report.first = live(store, plan);
  plan.saves = {kSecondLifeStep};
  report.second = live(store, plan);
  return report;
}

std::uint64_t Milestones::newest_published(std::size_t end) const {
  std::uint64_t newest = 0;
  for (const auto& commit : commits) newest = commit.published < end ? commit.step : newest;
  return newest;
}

std::uint64_t Milestones::newest_durable(std::size_t end) const {
  std::uint64_t newest = 0;
  for (const auto& commit : commits) newest = commit.durable < end ? commit.step : newest;
  return newest;
}

std::size_t Milestones::second_life() const {
  const auto at = std::find_if(places.begin(), places.end(), [](const CrashPlace& place) {
    return place.is_point() && place.where == "generation.1.directory_made" && place.nth == 1;
  });
  // The start begins with reading what is there, after the end of the first life's last retention.
  std::size_t index = static_cast<std::size_t>(at - places.begin());
  while (index > 0 && !(places[index - 1].is_point() && !places[index - 1].where.starts_with("start"))) --index;
  return index;
}

Milestones find_milestones(const Scenario& scenario) {
  MemoryStore memory;
  FaultStore store(memory, scenario.store_options());
  CrashDriver driver(store);
  const ScenarioReport report = run_scenario(store, scenario);
  for (const std::uint64_t step : {10, 20, 30, 40}) {
    const auto save = report.save_of(step, 0);
    if (save && save->state == SaveOutcome::State::kDurable) continue;
    fmt::print("the undisturbed run: step {} was not saved: {}\n", step,
               save ? save->reason : "its life did not start");
    return {};
  }
  Milestones milestones{.places = driver.places(), .commits = {}};
  const auto& places = milestones.places;
  for (std::size_t i = 0; i < places.size(); ++i) {
    if (places[i].what != "publish" || !places[i].where.ends_with("/.metadata")) continue;
    const std::string directory = places[i].where.substr(0, places[i].where.find('/'));
    Milestones::Commit commit{.step = std::stoull(directory.substr(5)), .published = i, .durable = i, .voted = i};
    while (!(places[commit.durable].what == "sync_directory" && places[commit.durable].where == directory))
      ++commit.durable;
    while (places[commit.voted].where != "commit.4.voted") --commit.voted;
    milestones.commits.push_back(commit);
  }
  return milestones;
}

ScratchRoot::ScratchRoot() {
  const char* const memory = "/dev/shm";
  std::string pattern = ::access(memory, W_OK) == 0 ? memory : testing::TempDir();
  pattern += "/unbroken-crash-XXXXXX";
  UNBROKEN_ASSERT(::mkdtemp(pattern.data()) != nullptr);
  path_ = pattern;
}

ScratchRoot::~ScratchRoot() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::unique_ptr<Store> ScratchRoot::open() const { return open_store(path_, {.create = true}).value(); }

namespace {

std::string check_start(Store& store, const Expected& expected, Start& start) {
  auto started = start_small(store);
  if (!started) return "start: " + started.error().message;
  start = std::move(*started);
  const std::uint64_t step = start.fresh ? 0 : start.key.step;
  if (step < expected.least || step > expected.most) {
    return fmt::format("step {} was loaded, expected {} to {}; {}", step, expected.least, expected.most, start.account);
  }
  return {};
}

std::string check_kept(Store& store, const Expected& expected) {
  const auto catalog = read_catalog(store, Depth::kChecksums);
  if (!catalog) return "catalog: " + catalog.error().message;
  std::uint64_t complete = 0;
  for (const auto& info : catalog->attempts) {
    complete += info.state == AttemptState::kComplete;
    if (info.state == AttemptState::kDamaged) return fmt::format("{} is damaged: {}", info.name, info.reason);
  }
  // Steps are committed at 10, 20, and so on.
  const std::uint64_t wanted = std::min(expected.kept, expected.least / 10);
  if (complete < wanted) return fmt::format("{} complete ones are left, expected {}", complete, wanted);
  return {};
}

}  // namespace

std::string check_aftermath(Store& store, const Expected& expected) {
  if (const auto wrong = check_small_root(store); !wrong.empty()) return "a marker above wrong files: " + wrong.front();
  if (auto wrong = check_kept(store, expected); !wrong.empty()) return wrong;
  Start first;
  if (auto wrong = check_start(store, expected, first); !wrong.empty()) return wrong;
  const std::string contents = list_contents(store);
  for (int again = 0; again < 2; ++again) {
    Start next;
    if (auto wrong = check_start(store, expected, next); !wrong.empty()) return "again: " + wrong;
    if (next.attempt != first.attempt) return fmt::format("{} first and {} then", first.attempt, next.attempt);
    if (next.generation <= first.generation || next.run_id != first.run_id) return "a start without a life of its own";
    if (list_contents(store) != contents) return "a start changed what is stored";
    first = next;
  }
  // The run goes on.
  constexpr std::uint64_t kNext = 50;
  const auto lives = live(store, {.saves = {kNext}, .keep = {.last = expected.kept}, .timeout_seconds = 10});
  for (const auto& life : lives) {
    if (life.error) return "the next life: " + life.error->message;
    if (!life.wrong.empty()) return "the next life loaded: " + life.wrong;
    if (life.saves.empty() || life.saves[0].state != SaveOutcome::State::kDurable) {
      return "the next save: " + (life.saves.empty() ? "none" : life.saves[0].reason);
    }
    for (const auto& error : life.retention_errors) return "the next retention: " + error.message;
  }
  Start last;
  return check_start(store, {.least = kNext, .most = kNext, .kept = 1}, last);
}

bool full_matrix() {
  const char* const wish = std::getenv("UNBROKEN_CRASH");
  return wish != nullptr && std::string_view(wish) == "full";
}

std::vector<std::size_t> sample_cases(std::size_t count, std::size_t most) {
  std::vector<std::size_t> cases(count);
  std::iota(cases.begin(), cases.end(), std::size_t{0});
  if (full_matrix() || count <= most) return cases;
  std::mt19937_64 random(test_seed());
  std::shuffle(cases.begin(), cases.end(), random);
  cases.resize(most);
  return cases;
}

}  // namespace unbroken
