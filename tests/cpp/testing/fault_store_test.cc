// What the fault store does to a caller. What a loss of power takes is in power_loss_test.cc.
#include "testing/fault_store.h"

#include <gtest/gtest.h>

#include <thread>

#include "base/bytes.h"
#include "store/memory/memory_store.h"

namespace unbroken {
namespace {

constexpr std::uint64_t kLimit = kMiB;

class FaultStoreTest : public testing::Test {
 protected:
  MemoryStore memory_;
  FaultStore store_{memory_};
};

std::vector<std::string> names_of(const std::vector<Operation>& log) {
  std::vector<std::string> names;
  for (const Operation& operation : log) names.push_back(operation.name + " " + operation.path);
  return names;
}

TEST_F(FaultStoreTest, CountsAndNamesEveryOperation) {
  ASSERT_TRUE(store_.make_directory("d"));
  {
    auto writer = store_.create("d/f", 5);
    ASSERT_TRUE(writer);
    ASSERT_TRUE((*writer)->write_at(0, bytes_of("hello")));
    ASSERT_TRUE((*writer)->finish(5));
  }
  ASSERT_TRUE(store_.publish("d/p", bytes_of("p")));
  ASSERT_TRUE(store_.create_whole("d/w", bytes_of("w")));
  ASSERT_TRUE(store_.sync_directory("d"));
  {
    auto reader = store_.open("d/f", {});
    ASSERT_TRUE(reader);
    std::byte one[1];
    ASSERT_TRUE((*reader)->read_at(0, one));
  }
  ASSERT_TRUE(store_.read("d/f", kLimit));
  ASSERT_TRUE(store_.stat("d/f"));
  ASSERT_TRUE(store_.list("d"));
  ASSERT_TRUE(store_.remove("d/f"));
  ASSERT_TRUE(store_.remove_directory("d"));
  const std::vector<std::string> expected = {"make_directory d", "create d/f",        "write_at d/f",     "finish d/f",
                                             "publish d/p",      "create_whole d/w",  "sync_directory d", "open d/f",
                                             "read_at d/f",      "read d/f",          "stat d/f",         "list d",
                                             "remove d/f",       "remove_directory d"};
  EXPECT_EQ(names_of(store_.log()), expected);
  const auto log = store_.log();
  for (std::size_t i = 0; i < log.size(); ++i) EXPECT_EQ(log[i].index, i);
  store_.set_script({});
  EXPECT_TRUE(store_.log().empty());
}

TEST_F(FaultStoreTest, KnowsWhichOperationsChangeSomething) {
  EXPECT_TRUE((Operation{.name = "sync_directory"}.changes()));
  EXPECT_TRUE((Operation{.name = "write_at"}.changes()));
  EXPECT_FALSE((Operation{.name = "read_at"}.changes()));
  EXPECT_FALSE((Operation{.name = "list"}.changes()));
}

TEST_F(FaultStoreTest, AFailedOperationDoesNothingAndSaysWhy) {
  store_.set_script(fault_on({.name = "publish"}, Fault::fail(Code::kNoSpace)));
  const Status status = store_.publish("m", bytes_of("new"));
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, Code::kNoSpace);
  EXPECT_NE(status.error().message.find("publish m"), std::string::npos);
  EXPECT_EQ(memory_.read("m", kLimit).error().code, Code::kNotFound);
  EXPECT_TRUE(store_.publish("m", bytes_of("new"))) << "the fault was for one operation";
}

TEST_F(FaultStoreTest, ALostReplyHidesAChangeThatHappened) {
  store_.set_script(fault_on({.name = "create_whole"}, Fault::reply_lost()));
  const Status status = store_.create_whole("m", bytes_of("new"));
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, Code::kUnknown);
  EXPECT_EQ(*memory_.read("m", kLimit), "new");
}

TEST_F(FaultStoreTest, ATornWriteLeavesAPrefix) {
  store_.set_script(fault_on({.name = "write_at"}, Fault::torn(3)));
  auto writer = store_.create("f", 8);
  ASSERT_TRUE(writer);
  EXPECT_FALSE((*writer)->write_at(0, bytes_of("abcdefgh")));
  EXPECT_EQ(*memory_.read("f", kLimit), "abc");
}

TEST_F(FaultStoreTest, ATornAtomicPublishLeavesTheOldState) {
  ASSERT_TRUE(store_.publish("m", bytes_of("old")));
  store_.set_script(fault_on({.name = "publish"}, Fault::torn(2)));
  EXPECT_FALSE(store_.publish("m", bytes_of("new")));
  EXPECT_EQ(*memory_.read("m", kLimit), "old");
}

TEST_F(FaultStoreTest, ATornPublishOfAPlaceWithoutAtomicPublishLeavesAPrefix) {
  FaultStore volume(memory_, {.atomic_publish = false});
  EXPECT_FALSE(volume.abilities().atomic_publish);
  ASSERT_TRUE(volume.publish("m", bytes_of("old")));
  volume.set_script(fault_on({.name = "publish"}, Fault::torn(2)));
  EXPECT_FALSE(volume.publish("m", bytes_of("new")));
  EXPECT_EQ(*memory_.read("m", kLimit), "ne");
}

TEST_F(FaultStoreTest, WithoutCreateIfAbsentTheSecondOverwritesAndIsToldThatItWon) {
  FaultStore place(memory_, {.create_if_absent = false});
  EXPECT_FALSE(place.abilities().create_if_absent);
  ASSERT_TRUE(place.create_whole("g", bytes_of("first")));
  ASSERT_TRUE(place.create_whole("g", bytes_of("second")));
  EXPECT_EQ(*memory_.read("g", kLimit), "second");
}

TEST_F(FaultStoreTest, ATornRemovalOfADirectoryTakesSomeOfItsEntries) {
  ASSERT_TRUE(store_.make_directory("d/e"));
  for (const char* name : {"d/a", "d/b", "d/e/x", "d/z"}) ASSERT_TRUE(store_.publish(name, bytes_of("x")));
  store_.set_script(fault_on({.name = "remove_directory"}, Fault::torn(3)));
  EXPECT_FALSE(store_.remove_directory("d"));
  const auto left = memory_.list("d");
  ASSERT_TRUE(left);
  ASSERT_EQ(left->size(), 1U);
  EXPECT_EQ(left->front().name, "z");
}

TEST_F(FaultStoreTest, AFailedFinishCondemnsTheObject) {
  store_.set_script(fault_on({.name = "finish"}, Fault::fail()));
  auto writer = store_.create("f", 1);
  ASSERT_TRUE(writer);
  const Status failed = (*writer)->finish(0);
  ASSERT_FALSE(failed);
  EXPECT_TRUE(failed.error().data_may_be_lost);
  EXPECT_FALSE((*writer)->finish(0)) << "trying again must not make it good";
}

TEST_F(FaultStoreTest, AKilledProcessDoesNothingAnyMore) {
  auto writer = store_.create("f", 4);
  ASSERT_TRUE(writer);
  store_.set_script(fault_on({.name = "publish"}, Fault::killed_before()));
  EXPECT_FALSE(store_.publish("m", bytes_of("m")));
  EXPECT_TRUE(store_.dead());
  EXPECT_EQ((*writer)->write_at(0, bytes_of("late")).error().code, Code::kUnavailable);
  EXPECT_EQ(store_.list("").error().code, Code::kUnavailable);
  EXPECT_FALSE(store_.create_whole("w", bytes_of("w")));
  EXPECT_EQ(store_.log().size(), 1U) << "the dead are not counted";
  EXPECT_EQ(memory_.list("")->size(), 1U);
  EXPECT_EQ(*memory_.read("f", kLimit), "");

  store_.revive();
  EXPECT_EQ(store_.list("")->size(), 1U);
  EXPECT_FALSE((*writer)->write_at(0, bytes_of("late"))) << "a writer does not outlive its process";
  EXPECT_FALSE((*writer)->finish(4));
  EXPECT_EQ(*memory_.read("f", kLimit), "");
}

TEST_F(FaultStoreTest, KilledAfterAndWithinLeaveWhatWasDone) {
  store_.set_script(fault_on({.name = "publish"}, Fault::killed_after()));
  EXPECT_FALSE(store_.publish("m", bytes_of("m")));
  EXPECT_EQ(*memory_.read("m", kLimit), "m");
  store_.revive();
  auto writer = store_.create("f", 4);
  ASSERT_TRUE(writer);
  store_.set_script(fault_on({.name = "write_at"}, Fault::killed_within(1)));
  EXPECT_FALSE((*writer)->write_at(0, bytes_of("abcd")));
  EXPECT_TRUE(store_.dead());
  EXPECT_EQ(*memory_.read("f", kLimit), "a");
}

TEST_F(FaultStoreTest, HooksRunBeforeAndAfterTheChange) {
  std::vector<bool> seen;
  Fault fault = Fault::pass();
  fault.before = [&] { seen.push_back(memory_.stat("m").has_value()); };
  fault.after = fault.before;
  store_.set_script(fault_on({.name = "publish"}, fault));
  ASSERT_TRUE(store_.publish("m", bytes_of("m")));
  EXPECT_EQ(seen, (std::vector<bool>{false, true}));
}

TEST_F(FaultStoreTest, AHookMayKillWhileAnotherOperationIsStalled) {
  Fault stalled = Fault::pass();
  stalled.stall = std::chrono::milliseconds(50);
  store_.set_script(fault_on({.name = "publish"}, stalled));
  std::jthread slow([&] { EXPECT_FALSE(store_.publish("m", bytes_of("m"))); });
  while (store_.log().empty()) std::this_thread::yield();
  store_.die();
  slow.join();
  EXPECT_EQ(memory_.read("m", kLimit).error().code, Code::kNotFound) << "the dead publish nothing";
}

TEST_F(FaultStoreTest, ScriptsPickByIndexByPlaceAndByPredicate) {
  store_.set_script(fault_at(1, Fault::fail()));
  EXPECT_TRUE(store_.publish("a", {}));
  EXPECT_FALSE(store_.publish("b", {}));
  EXPECT_TRUE(store_.publish("c", {}));
  store_.set_script(fault_on({.name = "publish", .path_part = "x", .nth = 1}, Fault::fail()));
  EXPECT_TRUE(store_.publish("x1", {}));
  EXPECT_TRUE(store_.publish("y", {}));
  EXPECT_FALSE(store_.publish("x2", {}));
  EXPECT_TRUE(store_.publish("x3", {}));
  store_.set_script(fault_wherever([](const Operation& operation) { return operation.bytes > 2; }, Fault::fail()));
  EXPECT_FALSE(store_.publish("z", bytes_of("123")));
  EXPECT_FALSE(store_.publish("z", bytes_of("123")));
  EXPECT_TRUE(store_.publish("z", bytes_of("12")));
}

TEST_F(FaultStoreTest, FaultsOnReadersReachTheCaller) {
  ASSERT_TRUE(store_.publish("m", bytes_of("m")));
  auto reader = store_.open("m", {});
  ASSERT_TRUE(reader);
  store_.set_script(fault_on({.name = "read_at"}, Fault::fail(Code::kUnavailable)));
  std::byte one[1];
  const Status failed = (*reader)->read_at(0, one);
  ASSERT_FALSE(failed);
  EXPECT_TRUE(failed.error().retryable);
  EXPECT_TRUE((*reader)->read_at(0, one));
}

}  // namespace
}  // namespace unbroken
