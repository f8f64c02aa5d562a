#include "checkpoint/generation.h"

#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/bytes.h"
#include "checkpoint/sealed_json.h"
#include "store/memory/memory_store.h"
#include "testing/fault_store.h"

namespace unbroken {
namespace {

GenerationRecord some_record(std::uint64_t number = 7, std::string life_id = "life") {
  return {.number = number,
          .run_id = "run",
          .life_id = std::move(life_id),
          .origin = {.kind = Origin::Kind::kAttempt,
                     .key = {.step = 30, .generation = 5, .sequence = 2},
                     .attempt = "step-30-g5-00000001"},
          .refused = {{.attempt = "step-40-g5-00000002", .reason = "a flipped bit"}},
          .ranks = 4,
          .host = "node \xff 3",
          .time_ms = 1'700'000'000'000};
}

TEST(Generation, RoundTrip) {
  for (const auto kind : {Origin::Kind::kFresh, Origin::Kind::kAttempt, Origin::Kind::kNone}) {
    GenerationRecord record = some_record();
    record.origin.kind = kind;
    const auto read = decode_generation(encode(record), "f");
    ASSERT_TRUE(read) << read.error().message;
    EXPECT_EQ(read->number, 7u);
    EXPECT_EQ(read->run_id, "run");
    EXPECT_EQ(read->life_id, "life");
    EXPECT_EQ(read->origin.kind, kind);
    if (kind == Origin::Kind::kAttempt) {
      EXPECT_EQ(read->origin.key, record.origin.key);
      EXPECT_EQ(read->origin.attempt, record.origin.attempt);
    }
    ASSERT_EQ(read->refused.size(), 1u);
    EXPECT_EQ(read->refused[0].reason, "a flipped bit");
    EXPECT_EQ(read->ranks, 4u);
    EXPECT_EQ(read->time_ms, record.time_ms);
  }
}

TEST(Generation, HostileRecordsAreErrorsAndNothingElse) {
  const auto body = nlohmann::json::parse(unseal_json(encode(some_record()), "f").value());
  const auto flat = body.flatten();
  for (const auto& [path, value] : flat.items()) {
    for (const nlohmann::json& strange :
         {nlohmann::json(nullptr), nlohmann::json(-1), nlohmann::json("x"), nlohmann::json::array({1})}) {
      auto changed = body;
      changed[nlohmann::json::json_pointer(path)] = strange;
      const auto read = decode_generation(seal_json(changed.dump()), "f");
      if (!read) {
        ASSERT_TRUE(read.error().code == Code::kDamaged || read.error().code == Code::kUnsupported) << changed;
      }
    }
  }
  auto newer = body;
  newer["format"] = kFormatVersion + 1;
  EXPECT_EQ(decode_generation(seal_json(newer.dump()), "f").error().code, Code::kUnsupported);
  EXPECT_EQ(decode_generation("", "f").error().code, Code::kDamaged);
}

GenerationClaim some_claim(std::uint64_t number = 7, std::string life_id = "life") {
  return {.number = number, .life_id = std::move(life_id), .host = "node", .time_ms = 0};
}

// A whole life: claimed and recorded.
Status begin_life(Store& store, std::uint64_t number = 7, const std::string& life_id = "life") {
  UNBROKEN_TRY(claim_generation(store, some_claim(number, life_id)));
  return create_generation(store, some_record(number, life_id));
}

class GenerationStoreTest : public testing::Test {
 protected:
  void put(const std::string& name, std::string_view content) {
    ASSERT_TRUE(memory_.make_directory(kGenerationsDirectory));
    ASSERT_TRUE(memory_.publish(join_path(kGenerationsDirectory, name), bytes_of(content)));
  }

  MemoryStore memory_;
  FaultStore store_{memory_};
};

TEST_F(GenerationStoreTest, NothingThereIsNoGeneration) {
  EXPECT_TRUE(list_generations(store_).value().empty());
  ASSERT_TRUE(store_.make_directory(kGenerationsDirectory));
  EXPECT_TRUE(list_generations(store_).value().empty());
}

TEST_F(GenerationStoreTest, AreListedByNumberAndStrangeFilesAreNot) {
  for (const std::uint64_t number : {10, 9, 1'000'000}) ASSERT_TRUE(begin_life(store_, number));
  for (const char* name :
       {"7.json", "0000x7.json", "000007.jso", "000007", "+00007.json", "-00007.json", "000007.json.bak", "7.claim"}) {
    put(name, "strange");
  }
  ASSERT_TRUE(memory_.make_directory("generations/000008.json"));
  EXPECT_EQ(list_generation_numbers(store_).value(), (std::vector<std::uint64_t>{9, 10, 1'000'000}));
  const auto entries = list_generations(store_).value();
  ASSERT_EQ(entries.size(), 3u);
  for (const auto& entry : entries) EXPECT_TRUE(entry.record) << entry.error;
}

TEST_F(GenerationStoreTest, ADamagedRecordKeepsItsNumberAndSaysWhy) {
  put("000003.json", "torn");
  put("000004.json", encode(some_record(5)));
  const auto entries = list_generations(store_).value();
  ASSERT_EQ(entries.size(), 2u);
  for (const auto& entry : entries) {
    EXPECT_FALSE(entry.record);
    EXPECT_NE(entry.error, "");
  }
}

TEST_F(GenerationStoreTest, AClaimWithoutARecordTakesItsNumberAndConstrainsNothing) {
  ASSERT_TRUE(claim_generation(store_, some_claim(7, "claimant")));
  const auto entries = list_generations(store_).value();
  ASSERT_EQ(entries.size(), 1u);
  EXPECT_EQ(entries[0].number, 7u);
  EXPECT_FALSE(entries[0].record);
  EXPECT_NE(entries[0].error.find("claimant"), std::string::npos) << entries[0].error;
  EXPECT_NE(describe_life(store_, 7).find("claimant"), std::string::npos);
  EXPECT_EQ(describe_life(store_, 8), "generation 8");
}

TEST_F(GenerationStoreTest, AStoreThatDoesNotAnswerIsAnErrorAndNeverAbsence) {
  ASSERT_TRUE(begin_life(store_));
  for (const char* operation : {"list", "read"}) {
    store_.set_script(fault_on({.name = operation}, Fault::fail(Code::kUnavailable)));
    const auto entries = list_generations(store_);
    ASSERT_FALSE(entries) << operation;
    EXPECT_EQ(entries.error().code, Code::kUnavailable);
  }
}

TEST_F(GenerationStoreTest, OfTwoThatTakeANumberOneWinsAndTheOtherNamesIt) {
  ASSERT_TRUE(claim_generation(store_, some_claim(7, "first")));
  EXPECT_TRUE(claim_generation(store_, some_claim(7, "first"))) << "an answer that was lost on the way";
  const Status lost = claim_generation(store_, some_claim(7, "second"));
  ASSERT_FALSE(lost);
  EXPECT_EQ(lost.error().code, Code::kFenced);
  EXPECT_NE(lost.error().message.find("first"), std::string::npos) << lost.error().message;
  ASSERT_TRUE(create_generation(store_, some_record(7, "first")));
  EXPECT_TRUE(create_generation(store_, some_record(7, "first")));
  EXPECT_EQ(create_generation(store_, some_record(7, "second")).error().code, Code::kFenced);
  EXPECT_EQ(read_generation(store_, 7)->record->life_id, "first");
}

TEST_F(GenerationStoreTest, ALostReplyIsSettledByReading) {
  for (const char* file : {".claim", ".json"}) {
    for (const Code code : {Code::kUnknown, Code::kAlreadyExists, Code::kUnavailable, Code::kDeadline}) {
      MemoryStore memory;
      FaultStore store(memory);
      store.set_script(fault_on({.name = "create_whole", .path_part = file}, Fault::reply_lost(code)));
      EXPECT_TRUE(begin_life(store)) << file << " " << code_name(code);
    }
  }
}

TEST_F(GenerationStoreTest, WhatCouldNotBeMadeIsAnError) {
  for (const char* file : {".claim", ".json"}) {
    MemoryStore memory;
    FaultStore store(memory);
    store.set_script(fault_on({.name = "create_whole", .path_part = file}, Fault::fail(Code::kNoSpace)));
    EXPECT_EQ(begin_life(store).error().code, Code::kNoSpace) << file;
  }
  for (std::uint64_t nth = 0; nth < 2; ++nth) {
    MemoryStore memory;
    FaultStore store(memory);
    store.set_script(fault_on({.name = "sync_directory", .path_part = "generations", .nth = nth}, Fault::fail()));
    EXPECT_FALSE(begin_life(store)) << "what may vanish must not be built on: " << nth;
  }
}

TEST_F(GenerationStoreTest, SurvivesALossOfPowerOnceItIsThere) {
  ASSERT_TRUE(claim_generation(store_, some_claim(7)));
  ASSERT_TRUE(store_.lose_unsynced(1, Loss::kAll));
  EXPECT_EQ(list_generation_numbers(store_).value(), std::vector<std::uint64_t>{7});
  ASSERT_TRUE(create_generation(store_, some_record(7)));
  ASSERT_TRUE(store_.lose_unsynced(1, Loss::kAll));
  EXPECT_TRUE(read_generation(store_, 7)->record);
}

TEST_F(GenerationStoreTest, WithoutCreateIfAbsentTwoStartsAreDetected) {
  FaultStore weak(memory_, {.create_if_absent = false});
  ASSERT_TRUE(claim_generation(weak, some_claim(7, "first")));
  // The second overwrites the first, which finds out when it looks.
  EXPECT_TRUE(claim_generation(weak, some_claim(7, "second")));
  weak.set_script([&](const Operation& operation) {
    Fault fault;
    if (operation.name != "create_whole" || operation.path != claim_path(8)) return fault;
    fault.after = [&] {
      // Another start writes over it.
      MemoryStore elsewhere;
      claim_generation(elsewhere, some_claim(8, "other")).value();
      memory_.publish(claim_path(8), bytes_of(elsewhere.read(claim_path(8), kMiB).value())).value();
    };
    return fault;
  });
  const Status lost = claim_generation(weak, some_claim(8, "mine"));
  ASSERT_FALSE(lost);
  EXPECT_EQ(lost.error().code, Code::kFenced);
}

TEST(GenerationRace, OfManyThreadsOneTakesTheNumber) {
  for (int round = 0; round < 30; ++round) {
    MemoryStore store;
    std::atomic<int> winners = 0;
    std::atomic<int> losers = 0;
    std::barrier start(4);
    {
      std::vector<std::jthread> threads;
      for (int i = 0; i < 4; ++i) {
        threads.emplace_back([&, i] {
          start.arrive_and_wait();
          const Status status = claim_generation(store, some_claim(1, std::to_string(i)));
          if (status) {
            ++winners;
          } else if (status.error().code == Code::kFenced) {
            ++losers;
          }
        });
      }
    }
    EXPECT_EQ(winners, 1);
    EXPECT_EQ(losers, 3);
  }
}

TEST(GenerationText, TimesAreReadable) {
  EXPECT_EQ(format_time(0), "1970-01-01 00:00:00 UTC");
  EXPECT_EQ(format_time(1'785'585'600'999), "2026-08-01 12:00:00 UTC");
  EXPECT_NE(describe(some_record()).find("generation 7"), std::string::npos);
  EXPECT_NE(random_hex(8), random_hex(8));
  EXPECT_EQ(random_hex(4).size(), 8u);
}

}  // namespace
}  // namespace unbroken
