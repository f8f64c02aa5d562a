// States of attempts, on roots that a small run has written and that were then damaged.
#include "checkpoint/catalog.h"

#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>

#include "base/bytes.h"
#include "checkpoint/sealed_json.h"
#include "store/memory/memory_store.h"
#include "testing/fault_store.h"
#include "testing/small_run.h"

namespace unbroken {
namespace {

class CatalogTest : public testing::Test {
 protected:
  void SetUp() override {
    const auto lives = live(store_, {.saves = {10, 20, 30}});
    for (const auto& save : lives[0].saves) names_.push_back(save.attempt_path);
    for (const auto& save : lives[0].saves) ASSERT_EQ(save.state, SaveOutcome::State::kDurable) << save.reason;
  }
  AttemptInfo inspect(const std::string& name, Depth depth = Depth::kChecksums) {
    return inspect_attempt(store_, name, list_generations(store_).value(), depth).value();
  }
  std::string path(std::string_view file, std::size_t attempt = 2) { return join_path(names_[attempt], file); }
  std::string content(std::string_view file) { return store_.read(path(file), kMiB).value(); }
  void put(std::string_view file, std::string_view bytes) { ASSERT_TRUE(store_.publish(path(file), bytes_of(bytes))); }

  MemoryStore store_;
  std::vector<std::string> names_;
};

constexpr std::string_view kFiles[] = {"__0_0.distcp", "__0_1.distcp", "__1_0.distcp", "__1_1.distcp",
                                       "__0.json",     "__1.json",     ".metadata"};

TEST_F(CatalogTest, NewestFirstAndComplete) {
  const Catalog catalog = read_catalog(store_, Depth::kChecksums).value();
  ASSERT_EQ(catalog.attempts.size(), 3u);
  for (std::size_t i = 0; i < 3; ++i) {
    const AttemptInfo& info = catalog.attempts[i];
    EXPECT_EQ(info.name, names_[2 - i]);
    EXPECT_EQ(info.state, AttemptState::kComplete);
    EXPECT_TRUE(info.on_branch && info.has_marker && info.has_record);
    EXPECT_EQ(info.files, 8u);
    EXPECT_GT(info.bytes, 12000u);
  }
  EXPECT_EQ(catalog.generations.size(), newest_generation(catalog.generations));
}

// Invariant 1: whatever is done to any file is seen, and the file is named.
TEST_F(CatalogTest, EveryMissingShortLongOrChangedFileIsDamage) {
  for (const auto file : kFiles) {
    const std::string good = content(file);
    std::string flipped = good;
    flipped[good.size() / 2] ^= 1;
    for (const auto& bad : {good + "x", good.substr(0, good.size() - 1), std::string(), flipped}) {
      put(file, bad);
      const AttemptInfo info = inspect(names_[2]);
      // A marker that is too short was being written when the writer died.
      const bool torn = file == ".metadata" && bad.size() < good.size();
      EXPECT_EQ(info.state, torn ? AttemptState::kIncomplete : AttemptState::kDamaged) << file << " " << bad.size();
      EXPECT_TRUE(torn || info.reason.find(file) != std::string::npos) << info.reason;
      if (bad.size() != good.size() && !torn) {
        EXPECT_EQ(inspect(names_[2], Depth::kLengths).state, AttemptState::kDamaged)
            << "lengths show it, too: " << file;
      }
    }
    ASSERT_TRUE(store_.remove(path(file)));
    const AttemptInfo info = inspect(names_[2], Depth::kLengths);
    EXPECT_EQ(info.state, file == ".metadata" ? AttemptState::kIncomplete : AttemptState::kDamaged) << file;
    put(file, good);
    ASSERT_EQ(inspect(names_[2]).state, AttemptState::kComplete);
  }
}

TEST_F(CatalogTest, ADamagedOrMissingManifestIsDamage) {
  const std::string good = content("manifest.json");
  put("manifest.json", good.substr(1));
  EXPECT_EQ(inspect(names_[2], Depth::kManifest).state, AttemptState::kDamaged);
  ASSERT_TRUE(store_.remove(path("manifest.json")));
  EXPECT_EQ(inspect(names_[2], Depth::kManifest).state, AttemptState::kDamaged);
  ASSERT_TRUE(store_.remove(path(".metadata")));
  EXPECT_EQ(inspect(names_[2], Depth::kManifest).state, AttemptState::kIncomplete);
}

TEST_F(CatalogTest, ANewerFormatIsUnsupported) {
  auto body = nlohmann::json::parse(unseal_json(content("manifest.json"), "f").value());
  body["format"] = kFormatVersion + 1;
  put("manifest.json", seal_json(body.dump()));
  EXPECT_EQ(inspect(names_[2], Depth::kManifest).state, AttemptState::kUnsupported);
  EXPECT_EQ(find_attempt(store_, std::nullopt).error().code, Code::kUnsupported) << "never silently an older one";
  EXPECT_EQ(start_small(store_).error().code, Code::kUnsupported);
  EXPECT_EQ(find_attempt(store_, 10)->name, names_[0]);
}

TEST_F(CatalogTest, ARenamedDirectoryIsDamage) {
  const std::string other = attempt_directory({.step = 40, .generation = 1, .sequence = 0}, "0000000a");
  ASSERT_TRUE(store_.make_directory(other));
  const auto entries = store_.list(names_[2]).value();
  for (const auto& entry : entries) {
    ASSERT_TRUE(store_.publish(join_path(other, entry.name), bytes_of(content(entry.name))));
  }
  const AttemptInfo info = inspect(other);
  EXPECT_EQ(info.state, AttemptState::kDamaged);
  EXPECT_NE(info.reason.find(names_[2]), std::string::npos) << info.reason;
}

TEST_F(CatalogTest, StockCheckpointsAreForeignAndStrangersAreNotListed) {
  ASSERT_TRUE(store_.make_directory("pretrained"));
  ASSERT_TRUE(store_.publish("pretrained/.metadata", bytes_of("pickle")));
  ASSERT_TRUE(store_.make_directory("logs/step-1-g1-00000001"));
  ASSERT_TRUE(store_.publish("notes.txt", bytes_of("hello")));
  const Catalog catalog = read_catalog(store_, Depth::kLengths).value();
  ASSERT_EQ(catalog.attempts.size(), 4u);
  EXPECT_EQ(catalog.attempts.back().name, "pretrained");
  EXPECT_EQ(catalog.attempts.back().state, AttemptState::kForeign);
  EXPECT_EQ(find_attempt(store_, std::nullopt)->name, names_[2]);
}

// A life that was overtaken and killed between R1 and R2 leaves a `retired` in what the newer life has gone on from.
TEST_F(CatalogTest, RetiredOfALifeThatWasOvertakenIsVoidWhereTheNewerOneWentOnFromIt) {
  EXPECT_EQ(start_small(store_)->attempt, names_[2]);
  const auto retire = [&](std::size_t attempt, std::uint64_t generation) {
    const std::string document = encode(Retirement{.life_id = "life", .generation = generation, .time_ms = 0});
    ASSERT_TRUE(store_.publish(path("retired", attempt), bytes_of(document)));
  };
  retire(2, 1);
  EXPECT_EQ(inspect(names_[2]).state, AttemptState::kComplete);
  EXPECT_EQ(start_small(store_)->attempt, names_[2]);
  retire(1, 1);
  EXPECT_EQ(inspect(names_[1]).state, AttemptState::kRetired) << "nobody went on from that one";
  retire(2, newest_generation(list_generations(store_).value()));
  EXPECT_EQ(inspect(names_[2]).state, AttemptState::kRetired) << "the newest life knows what it does";
  ASSERT_TRUE(store_.publish(path("retired", 2), bytes_of("damaged")));
  EXPECT_EQ(inspect(names_[2]).state, AttemptState::kRetired) << "one that cannot be read is believed";
}

TEST_F(CatalogTest, AFileWhereAnAttemptShouldBeIsDamageAndNotNothing) {
  ASSERT_TRUE(store_.publish("step-50-g1-0000000f", bytes_of("moved away, say, with a link left behind")));
  const Catalog catalog = read_catalog(store_, Depth::kLengths).value();
  ASSERT_EQ(catalog.attempts.front().name, "step-50-g1-0000000f");
  EXPECT_EQ(catalog.attempts.front().state, AttemptState::kDamaged);
  EXPECT_EQ(find_attempt(store_, std::nullopt)->name, names_[2]);
}

TEST_F(CatalogTest, RetiredBeatsTheMarker) {
  put("retired", seal_json("{}"));
  EXPECT_EQ(inspect(names_[2]).state, AttemptState::kRetired);
  EXPECT_EQ(find_attempt(store_, std::nullopt)->name, names_[1]);
}

TEST_F(CatalogTest, FindPassesOverWhatIsDamagedAndSaysSoWhenNothingIsLeft) {
  std::string bad = content("__1_0.distcp");
  put("__1_0.distcp", bad.substr(1));
  EXPECT_EQ(find_attempt(store_, std::nullopt)->name, names_[1]);
  const auto none = find_attempt(store_, 30);
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code, Code::kNotFound);
  EXPECT_NE(none.error().message.find("__1_0.distcp"), std::string::npos) << none.error().message;
  EXPECT_FALSE(find_attempt(store_, 15));
}

TEST_F(CatalogTest, AStoreThatDoesNotAnswerIsAnErrorAndNeverAState) {
  FaultStore failing(store_);
  ASSERT_TRUE(read_catalog(failing, Depth::kLengths));
  const std::size_t operations = failing.log().size();
  for (std::size_t i = 0; i < operations; ++i) {
    failing.set_script(fault_at(i, Fault::fail(Code::kUnavailable)));
    const auto catalog = read_catalog(failing, Depth::kLengths);
    ASSERT_FALSE(catalog) << failing.log()[i].name << " " << failing.log()[i].path;
    EXPECT_EQ(catalog.error().code, Code::kUnavailable);
  }
}

TEST_F(CatalogTest, AnAttemptThatVanishesWhileItIsLookedAtIsNoError) {
  FaultStore racing(store_);
  ASSERT_TRUE(read_catalog(racing, Depth::kLengths));
  const std::size_t operations = racing.log().size();
  std::map<std::string, std::string> saved;
  for (const auto file : kFiles) saved.emplace(file, content(file));
  saved.emplace("manifest.json", content("manifest.json"));
  for (std::size_t i = 0; i < operations; ++i) {
    Fault vanish;
    vanish.before = [&] { store_.remove_directory(names_[2]).value(); };
    racing.set_script(fault_at(i, vanish));
    const auto catalog = read_catalog(racing, Depth::kLengths);
    ASSERT_TRUE(catalog) << catalog.error().message;
    for (const auto& info : catalog->attempts) {
      EXPECT_TRUE(info.name == names_[2] || info.state == AttemptState::kComplete) << info.name;
    }
    ASSERT_TRUE(store_.make_directory(names_[2]));
    for (const auto& [file, bytes] : saved) put(file, bytes);
  }
}

}  // namespace
}  // namespace unbroken
