// The run that the crash matrix disturbs, and what must be true after it.
//
// Life 1 starts fresh and saves steps 10, 20 and 30; life 2 goes on from 30 and saves 40; two ranks, retention after
// each save. Which step must be loaded after a fault follows from where the fault fell in the undisturbed run: before
// or after the marker of a step was published, before or after its name was durable.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "store/store.h"
#include "testing/crash_driver.h"
#include "testing/fault_store.h"
#include "testing/small_run.h"

namespace unbroken {

struct Scenario {
  std::uint64_t keep_last = 2;
  bool atomic_publish = true;  // without it a marker may be torn

  FaultStoreOptions store_options() const { return {.atomic_publish = atomic_publish}; }
};

inline constexpr std::uint64_t kFirstLifeSteps[] = {10, 20, 30};
inline constexpr std::uint64_t kSecondLifeStep = 40;

struct ScenarioReport {
  std::vector<RankLife> first;
  std::vector<RankLife> second;
  // Of one rank, over both lives; empty where the life did not get so far.
  std::optional<SaveOutcome> save_of(std::uint64_t step, std::uint64_t rank) const;
};
ScenarioReport run_scenario(Store& store, const Scenario& scenario);

// Where the undisturbed run did what decides about a step.
struct Milestones {
  std::vector<CrashPlace> places;
  struct Commit {
    std::uint64_t step = 0;
    std::size_t published = 0;  // index of the place where its marker is published
    std::size_t durable = 0;    // where its directory is synced after that
    std::size_t voted = 0;      // of the last vote before that
  };
  std::vector<Commit> commits;  // rising

  // The newest step whose marker was published by an operation of index < `end`; 0 when none was.
  std::uint64_t newest_published(std::size_t end) const;
  std::uint64_t newest_durable(std::size_t end) const;
  std::size_t second_life() const;  // index of the first place of life 2
};
Milestones find_milestones(const Scenario& scenario);

// A fresh root on a real file system, in memory where the machine has that; removed at the end.
class ScratchRoot {
 public:
  ScratchRoot();
  ~ScratchRoot();
  const std::string& path() const { return path_; }
  std::unique_ptr<Store> open() const;

 private:
  std::string path_;
};

// What must be true of a root after any one crash, whatever was going on: every marker stands above whole and right
// files; a start finds a step between `least` and `most` (0: fresh), its bytes are right, and two more starts find the
// same and change nothing but their records; the newest `keep_last` that were committed by then are whole; and a life
// goes on from there. Returns what is wrong, "" if nothing.
struct Expected {
  std::uint64_t least = 0;
  std::uint64_t most = 0;
  std::uint64_t kept = 1;  // so many complete ones at least, where so many were committed
};
std::string check_aftermath(Store& store, const Expected& expected);

// UNBROKEN_CRASH=full: all cases. Otherwise a sample of `most` of `count`, seeded.
std::vector<std::size_t> sample_cases(std::size_t count, std::size_t most);
bool full_matrix();

}  // namespace unbroken
