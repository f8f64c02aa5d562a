// Checkpoints in one directory, without a run: whole or not there, whatever fails, is killed or loses power.
#include "checkpoint/plain.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "base/bytes.h"
#include "checkpoint/catalog.h"
#include "checkpoint/shard.h"
#include "store/memory/memory_store.h"
#include "testing/fault_store.h"
#include "testing/seed.h"

namespace unbroken {
namespace {

constexpr std::uint64_t kTensorBytes = 5000;

// A rank's state is two tensors, each in a file of its own, full of `tag`.
Image image_of(std::uint64_t rank, char tag) {
  ImageBuilder builder(rank, kTensorBytes + 100);
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(builder.add_tensor("head", kTensorBytes, "tail"));
  Image image = std::move(builder).build(1).value();
  const std::string bytes(kTensorBytes, tag);
  std::vector<CopyIn> copies;
  for (std::size_t i = 0; i < 2; ++i) {
    copies.push_back({.slot = i, .source = bytes_of(bytes).data(), .bytes = bytes.size()});
  }
  EXPECT_TRUE(image.stage(copies, 1));
  return image;
}

struct Plan {
  char tag = 'a';
  std::uint64_t world_size = 2;
  bool overwrite = true;
  std::optional<std::uint64_t> only_rank{};
};

PlainNames names_of(std::optional<std::uint64_t> rank) { return rank ? PlainNames::of_rank(*rank) : PlainNames(); }

// What the drop-in does: the marker is the tag.
Status save(Store& store, const Plan& plan) {
  const PlainNames names = names_of(plan.only_rank);
  UNBROKEN_TRY(prepare_plain(store, names, plan.overwrite));
  for (std::uint64_t rank = 0; rank < plan.world_size; ++rank) {
    if (plan.only_rank && *plan.only_rank != rank) continue;
    UNBROKEN_TRY(write_plain_rank(store, image_of(rank, plan.tag), 1));
  }
  const std::string marker(20, plan.tag);
  return commit_plain(store, {.names = names, .world_size = plan.world_size, .only_rank = plan.only_rank}, marker);
}

PlainCommit of_ranks(std::uint64_t world_size) {
  PlainCommit commit;
  commit.world_size = world_size;
  return commit;
}

// The tag of the checkpoint that is there, whole in every byte; '-' where there is none; '?' where it is not whole.
char held(Store& store, std::optional<std::uint64_t> only_rank = {}) {
  const PlainNames names = names_of(only_rank);
  const auto marker = store.read(names.marker, 1000);
  if (!marker) return marker.error().code == Code::kNotFound ? '-' : '?';
  const auto reader = AttemptReader::open(store, "", names.manifest, names.marker);
  if (!reader || !(*reader)->verify(1, {})) return '?';
  const char tag = marker->front();
  for (std::uint64_t rank = 0; rank < (*reader)->manifest().parts.size(); ++rank) {
    if (!(*reader)->manifest().parts[rank].present()) continue;
    std::string bytes(kTensorBytes, '\0');
    const ReadRange range{
        .file = shard_file_name(rank, 0), .offset = 4, .into = std::as_writable_bytes(std::span(bytes))};
    if (!(*reader)->read(std::span(&range, 1), {.threads = 1})) return '?';
    if (bytes != std::string(kTensorBytes, tag)) return '?';
  }
  return tag;
}

std::set<std::string> names_in(Store& store) {
  std::set<std::string> names;
  const auto entries = store.list("").value();
  for (const auto& entry : entries) names.insert(entry.name);
  return names;
}

class PlainTest : public testing::Test {
 protected:
  Code code_of(const Status& status) { return status ? Code::kInternal : status.error().code; }

  MemoryStore memory_;
  FaultStore store_{memory_};
};

TEST_F(PlainTest, WhatWasSavedIsThereWithAllRanksAndOwnedByNoRun) {
  ASSERT_TRUE(save(store_, {.tag = 'a', .world_size = 3, .overwrite = false}));
  EXPECT_EQ(held(store_), 'a');
  const Manifest manifest = AttemptReader::open(store_, "").value()->manifest();
  EXPECT_EQ(manifest.parts.size(), 3u);
  for (const auto& part : manifest.parts) EXPECT_GE(part.data_bytes, kTensorBytes);
  EXPECT_EQ(manifest.run_id, "");
  EXPECT_EQ(manifest.life_id, "");
  EXPECT_EQ(manifest.key.generation, 0u);
  EXPECT_EQ(names_in(store_),
            (std::set<std::string>{".metadata", "manifest.json", "__0.json", "__0_0.distcp", "__0_1.distcp", "__1.json",
                                   "__1_0.distcp", "__1_1.distcp", "__2.json", "__2_0.distcp", "__2_1.distcp"}));
}

TEST_F(PlainTest, BelowARootItIsNoAttemptOfTheRun) {
  ASSERT_TRUE(save(memory_, {}));
  MemoryStore root;
  ASSERT_TRUE(root.make_directory("export"));
  for (const auto& name : names_in(memory_)) {
    ASSERT_TRUE(root.publish(join_path("export", name), bytes_of(memory_.read(name, 1U << 20U).value())));
  }
  const Catalog catalog = read_catalog(root, Depth::kChecksums).value();
  ASSERT_EQ(catalog.attempts.size(), 1u);
  EXPECT_EQ(catalog.attempts[0].state, AttemptState::kForeign);
  EXPECT_FALSE(catalog.attempts[0].on_branch);
  EXPECT_THAT(catalog.attempts[0].reason, testing::HasSubstr("belongs to no run"));
  EXPECT_FALSE(find_attempt(root, {}));
}

TEST_F(PlainTest, WhatIsThereIsRefusedUntouchedWithoutOverwrite) {
  ASSERT_TRUE(save(store_, {.tag = 'a'}));
  store_.set_script({});
  const Status status = save(store_, {.tag = 'b', .overwrite = false});
  EXPECT_EQ(code_of(status), Code::kAlreadyExists);
  EXPECT_THAT(status.error().message, testing::HasSubstr("overwrite=True"));
  for (const auto& operation : store_.log()) EXPECT_FALSE(operation.changes()) << operation.name;
  EXPECT_EQ(held(store_), 'a');
}

// The old marker must be gone for good before a byte of what it names goes.
TEST_F(PlainTest, OverwriteTakesTheMarkerAwayDurablyBeforeAnythingElse) {
  ASSERT_TRUE(save(store_, {.tag = 'a'}));
  store_.set_script({});
  ASSERT_TRUE(save(store_, {.tag = 'b'}));
  std::vector<std::string> changes;
  for (const auto& operation : store_.log()) {
    if (operation.changes()) changes.push_back(operation.name + " " + operation.path);
  }
  ASSERT_GE(changes.size(), 4u);
  EXPECT_EQ(changes[0], "remove .metadata");
  EXPECT_EQ(changes[1], "sync_directory ");
  EXPECT_EQ(changes[changes.size() - 2], "publish .metadata");
  EXPECT_EQ(changes.back(), "sync_directory ");
  EXPECT_EQ(held(store_), 'b');
}

// What the marker stands for is durable, names and all, when it is published.
TEST_F(PlainTest, AllIsDurableBeforeTheMarkerIsPublished) {
  bool published = false;
  store_.set_script([&](const Operation& operation) {
    Fault fault;
    if (operation.name != "publish" || operation.path != kMarkerName) return fault;
    published = true;
    fault.before = [&] { EXPECT_TRUE(store_.all_synced()); };
    return fault;
  });
  ASSERT_TRUE(save(store_, {}));
  EXPECT_TRUE(published);
}

TEST_F(PlainTest, ARanksFilesAreDurableWithTheirNamesWhenItHasWritten) {
  ASSERT_TRUE(prepare_plain(store_, {}, false));
  ASSERT_TRUE(write_plain_rank(store_, image_of(1, 'a'), 1));
  EXPECT_TRUE(store_.all_synced());
}

TEST_F(PlainTest, OfALargerWorldNothingIsLeft) {
  ASSERT_TRUE(save(store_, {.tag = 'a', .world_size = 12}));
  ASSERT_TRUE(save(store_, {.tag = 'b', .world_size = 1}));
  EXPECT_EQ(names_in(store_),
            (std::set<std::string>{".metadata", "manifest.json", "__0.json", "__0_0.distcp", "__0_1.distcp"}));
  EXPECT_EQ(held(store_), 'b');
}

TEST_F(PlainTest, FilesThatNoCheckpointHasAreLeftAlone) {
  const std::set<std::string> others = {"config.json", "__notes.txt", "_0.json", "model.safetensors", "0_0.distcp"};
  for (const auto& name : others) ASSERT_TRUE(store_.publish(name, bytes_of("theirs")));
  ASSERT_TRUE(store_.make_directory("__0_9.distcp"));
  ASSERT_TRUE(store_.make_directory("logs"));
  ASSERT_TRUE(save(store_, {.tag = 'a'}));
  ASSERT_TRUE(save(store_, {.tag = 'b'}));
  const auto names = names_in(store_);
  for (const auto& name : others) {
    EXPECT_TRUE(names.contains(name)) << name;
    EXPECT_EQ(store_.read(name, 100).value(), "theirs");
  }
  EXPECT_TRUE(names.contains("__0_9.distcp"));
  EXPECT_TRUE(names.contains("logs"));
}

TEST_F(PlainTest, WithoutAllRanksItIsNotCommitted) {
  ASSERT_TRUE(prepare_plain(store_, {}, false));
  ASSERT_TRUE(write_plain_rank(store_, image_of(0, 'a'), 1));
  ASSERT_TRUE(write_plain_rank(store_, image_of(2, 'a'), 1));
  EXPECT_EQ(code_of(commit_plain(store_, of_ranks(3), "marker")), Code::kNotFound);
  EXPECT_EQ(held(store_), '-');
  EXPECT_FALSE(names_in(store_).contains(std::string(kManifestName)));
}

TEST_F(PlainTest, APartThatIsNotWhatWasWrittenIsNotCommitted) {
  ASSERT_TRUE(prepare_plain(store_, {}, false));
  ASSERT_TRUE(write_plain_rank(store_, image_of(0, 'a'), 1));
  std::string document = store_.read("__0.json", 1U << 20U).value();
  document[document.size() / 2] ^= 4;
  ASSERT_TRUE(store_.publish("__0.json", bytes_of(document)));
  EXPECT_EQ(code_of(commit_plain(store_, of_ranks(1), "marker")), Code::kDamaged);
  EXPECT_EQ(held(store_), '-');
}

// A failed attempt leaves its files; the next one of the same process does not prepare anew for each rank.
TEST_F(PlainTest, ARankWritesOverWhatItsFailedAttemptLeft) {
  ASSERT_TRUE(prepare_plain(store_, {}, false));
  ASSERT_TRUE(write_plain_rank(store_, image_of(0, 'a'), 1));
  ASSERT_TRUE(write_plain_rank(store_, image_of(0, 'b'), 1));
  ASSERT_TRUE(commit_plain(store_, of_ranks(1), std::string(20, 'b')));
  EXPECT_EQ(held(store_), 'b');
}

// --- ranks that save alone -------------------------------------------------------------------------------------------

TEST_F(PlainTest, RanksThatSaveAloneEachHaveACheckpointOfTheirOwn) {
  for (const std::uint64_t rank : {0, 1, 11}) {
    const char tag = static_cast<char>('a' + rank);
    ASSERT_TRUE(save(store_, {.tag = tag, .world_size = 12, .overwrite = false, .only_rank = rank}));
  }
  EXPECT_EQ(held(store_), '-');
  for (const std::uint64_t rank : {0, 1, 11}) EXPECT_EQ(held(store_, rank), static_cast<char>('a' + rank));
  const Manifest manifest = AttemptReader::open(store_, "", "__1.manifest.json", "__1.metadata").value()->manifest();
  ASSERT_EQ(manifest.parts.size(), 12u);
  for (std::uint64_t rank = 0; rank < 12; ++rank) EXPECT_EQ(manifest.parts[rank].present(), rank == 1) << rank;
}

TEST_F(PlainTest, ARankThatSavesAloneTouchesNoOthers) {
  for (const std::uint64_t rank : {1, 11}) {
    ASSERT_TRUE(save(store_, {.tag = 'a', .world_size = 12, .overwrite = false, .only_rank = rank}));
  }
  EXPECT_EQ(code_of(save(store_, {.tag = 'b', .world_size = 12, .overwrite = false, .only_rank = 1})),
            Code::kAlreadyExists);
  ASSERT_TRUE(save(store_, {.tag = 'b', .world_size = 12, .only_rank = 1}));
  EXPECT_EQ(held(store_, 1), 'b');
  EXPECT_EQ(held(store_, 11), 'a');
}

TEST_F(PlainTest, TheMarkerOfAllRanksIsInTheWayOfOneThatSavesAlone) {
  ASSERT_TRUE(save(store_, {.tag = 'a'}));
  EXPECT_EQ(code_of(save(store_, {.tag = 'b', .overwrite = false, .only_rank = 0})), Code::kAlreadyExists);
  EXPECT_EQ(held(store_), 'a');
  ASSERT_TRUE(save(store_, {.tag = 'b', .only_rank = 0}));
  EXPECT_EQ(held(store_), '-') << "it would be read before the rank's own";
  EXPECT_EQ(held(store_, 0), 'b');
}

TEST_F(PlainTest, MarkersOfRanksAreInTheWayOfAllRanks) {
  ASSERT_TRUE(save(store_, {.tag = 'a', .only_rank = 1}));
  EXPECT_EQ(code_of(save(store_, {.tag = 'b', .overwrite = false})), Code::kAlreadyExists);
  EXPECT_EQ(held(store_, 1), 'a');
  ASSERT_TRUE(save(store_, {.tag = 'b'}));
  EXPECT_EQ(held(store_), 'b');
  EXPECT_EQ(held(store_, 1), '-');
}

// --- what goes wrong -------------------------------------------------------------------------------------------------

enum class Way { kFail, kReplyLost, kTorn, kKilledBefore, kKilledAfter, kKilledWithin, kPowerLost, kPowerLostByChance };

Fault fault_of(Way way) {
  switch (way) {
    case Way::kFail: return Fault::fail();
    case Way::kReplyLost: return Fault::reply_lost();
    case Way::kTorn: return Fault::torn(3);
    case Way::kKilledBefore:
    case Way::kPowerLostByChance: return Fault::killed_before();
    case Way::kKilledAfter:
    case Way::kPowerLost: return Fault::killed_after();
    case Way::kKilledWithin: return Fault::killed_within(3);
  }
  return {};
}

class PlainFaults : public testing::TestWithParam<Way> {
 protected:
  // What is there after a save that met the fault at that operation, and after all that follows from it.
  char after(const Plan& plan, std::uint64_t at, bool* reached) {
    const std::uint64_t seed = test_seed() + at;
    SCOPED_TRACE(testing::Message() << "operation " << at << ", seed " << seed);
    MemoryStore memory;
    FaultStore store(memory);
    EXPECT_TRUE(save(store, {.tag = 'a', .world_size = 3}));
    store.set_script(fault_at(at, fault_of(GetParam())));
    const Status saved = save(store, plan);
    *reached = store.log().size() > at;
    store.set_script({});
    if (GetParam() == Way::kPowerLost || GetParam() == Way::kPowerLostByChance) {
      EXPECT_TRUE(store.lose_unsynced(seed, GetParam() == Way::kPowerLost ? Loss::kAll : Loss::kRandom));
    } else if (store.dead()) {
      store.revive();
    }
    const char found = held(store);
    if (saved) {
      EXPECT_EQ(found, plan.tag) << "it was said to be there";
    }
    EXPECT_NE(found, '?') << "there is one that is not whole";
    // Whatever was left, the next save works.
    const Status next = save(store, {.tag = 'c', .world_size = 2});
    EXPECT_TRUE(next) << next.error().message;
    EXPECT_EQ(held(store), 'c');
    return found;
  }
};

TEST_P(PlainFaults, AtAnyOperationLeaveTheOldOneNoneOrTheNewOne) {
  std::string found;
  for (std::uint64_t at = 0;; ++at) {
    bool reached = false;
    const char now = after({.tag = 'b', .world_size = 2}, at, &reached);
    if (!reached) break;
    if (found.empty() || found.back() != now) found += now;
  }
  EXPECT_THAT(found, testing::AnyOf("a-b", "a-", "a-b-b")) << "first the old one, then none, then the new one";
}

TEST_P(PlainFaults, WithoutOverwriteTheOldOneStays) {
  for (std::uint64_t at = 0;; ++at) {
    bool reached = false;
    const char now = after({.tag = 'b', .world_size = 2, .overwrite = false}, at, &reached);
    EXPECT_EQ(now, 'a');
    if (!reached) break;
  }
}

INSTANTIATE_TEST_SUITE_P(AllWays, PlainFaults,
                         testing::Values(Way::kFail, Way::kReplyLost, Way::kTorn, Way::kKilledBefore, Way::kKilledAfter,
                                         Way::kKilledWithin, Way::kPowerLost, Way::kPowerLostByChance));

TEST_F(PlainTest, WhatWasReportedSurvivesTheLossOfPower) {
  ASSERT_TRUE(save(store_, {.tag = 'a'}));
  ASSERT_TRUE(store_.lose_unsynced(test_seed(), Loss::kAll));
  EXPECT_EQ(held(store_), 'a');
  ASSERT_TRUE(save(store_, {.tag = 'b', .only_rank = 1}));
  ASSERT_TRUE(store_.lose_unsynced(test_seed(), Loss::kAll));
  EXPECT_EQ(held(store_, 1), 'b');
}

}  // namespace
}  // namespace unbroken
