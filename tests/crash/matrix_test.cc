// The crash matrix: every operation and every named point of a run x what can go wrong there.
#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "crash/scenario.h"
#include "testing/seed.h"

namespace unbroken {
namespace {

using Kind = CrashFault::Kind;

struct Case {
  std::size_t index = 0;
  CrashFault fault;
};

bool is_changing(const CrashPlace& place) { return Operation{.name = place.what}.changes(); }

class CrashMatrix : public testing::TestWithParam<Scenario> {
 protected:
  void SetUp() override { milestones_ = find_milestones(GetParam()); }

  std::string describe(const Case& one) const {
    return fmt::format("{} [{} of {}] {}", milestones_.places[one.index].text(), one.index, milestones_.places.size(),
                       one.fault.text());
  }

  // What is wrong after the process ended so, "" if nothing.
  std::string check_death(const Case& one) const;

  Milestones milestones_;
};

// Which steps may be loaded after the process ended so.
Expected expect_after(const Milestones& milestones, const Case& one, std::uint64_t kept) {
  const std::size_t before = one.index;
  const std::size_t after = one.index + 1;
  switch (one.fault.kind) {
    case Kind::kPowerAll:
      return {.least = milestones.newest_durable(before), .most = milestones.newest_durable(before), .kept = kept};
    case Kind::kPowerRandom:
      return {.least = milestones.newest_durable(before), .most = milestones.newest_published(before), .kept = kept};
    case Kind::kKillAfter: {
      const std::uint64_t step = milestones.newest_published(after);
      return {.least = step, .most = step, .kept = kept};
    }
    default: {
      const std::uint64_t step = milestones.newest_published(before);
      return {.least = step, .most = step, .kept = kept};
    }
  }
}

std::vector<Case> all_deaths(const Milestones& milestones, bool atomic_publish) {
  std::vector<Case> cases;
  for (std::size_t index = 0; index < milestones.places.size(); ++index) {
    const CrashPlace& place = milestones.places[index];
    const auto add = [&](Kind kind, std::uint64_t part = 0, std::uint64_t seed = 0) {
      cases.push_back({index, {.kind = kind, .part = part, .seed = seed}});
    };
    if (!place.is_point() && !is_changing(place))
      continue;  // a process that dies at a read changed nothing since the last change
    add(Kind::kKillBefore);
    add(Kind::kPowerAll);
    for (std::uint64_t seed = 0; seed < 3; ++seed) add(Kind::kPowerRandom, 0, test_seed() + seed);
    if (place.is_point()) continue;
    add(Kind::kKillAfter);
    if (place.what == "write_at") {
      for (const std::uint64_t part : {std::uint64_t{1}, place.bytes / 2, place.bytes - 1})
        add(Kind::kKillWithin, part);
    }
    const bool torn = !atomic_publish && (place.what == "publish" || place.what == "create_whole");
    if (torn) {
      for (const std::uint64_t part : {std::uint64_t{0}, std::uint64_t{1}, place.bytes / 2, place.bytes - 1}) {
        add(Kind::kKillWithin, part);
      }
    }
    if (place.what == "remove_directory") {
      for (std::uint64_t part = 1; part < 8; ++part) add(Kind::kKillWithin, part);
    }
  }
  return cases;
}

std::string CrashMatrix::check_death(const Case& one) const {
  const ScratchRoot root;
  const int status = run_in_child([&] {
    const auto posix = root.open();
    FaultStore store(*posix, GetParam().store_options());
    CrashDriver driver(store);
    driver.arm(milestones_.places[one.index], one.fault);
    run_scenario(store, GetParam());
  });
  if (status != kKilledExit) return fmt::format("{}: the child ended with {}", describe(one), status);
  const auto store = root.open();
  const std::string wrong = check_aftermath(*store, expect_after(milestones_, one, GetParam().keep_last));
  return wrong.empty() ? std::string() : describe(one) + ": " + wrong;
}

TEST_P(CrashMatrix, WhereverTheProcessEndsTheRightCheckpointIsLoaded) {
  ASSERT_EQ(milestones_.commits.size(), 4u);
  const auto cases = all_deaths(milestones_, GetParam().atomic_publish);
  const auto chosen = sample_cases(cases.size(), 200);
  fmt::print("{} of {} deaths at {} places\n", chosen.size(), cases.size(), milestones_.places.size());
  EXPECT_THAT(check_cases(chosen.size(), [&](std::size_t number) { return check_death(cases[chosen[number]]); }),
              testing::IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(Runs, CrashMatrix,
                         testing::Values(Scenario{.keep_last = 1}, Scenario{.keep_last = 2},
                                         Scenario{.keep_last = 2, .atomic_publish = false}),
                         [](const auto& info) {
                           return fmt::format("KeepLast{}{}", info.param.keep_last,
                                              info.param.atomic_publish ? "" : "Torn");
                         });

}  // namespace
}  // namespace unbroken
