#include "base/board.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "base/memory_board.h"

namespace unbroken {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;

Deadline long_enough() { return Deadline::after(hours(1)); }
Deadline at_once() { return Deadline::after(milliseconds(0)); }

// A board whose host goes away after a number of answers.
class FailingBoard final : public Board {
 public:
  explicit FailingBoard(int answers) : answers_(answers) {}
  Status set(std::string_view, std::string_view) override { return gone(); }
  Result<std::vector<std::optional<std::string>>> get(std::span<const std::string> keys) override {
    if (answers_-- <= 0) return gone();
    return std::vector<std::optional<std::string>>(keys.size());
  }
  Result<std::string> set_if_absent(std::string_view, std::string_view) override { return gone(); }
  Status erase(std::span<const std::string>) override { return gone(); }

 private:
  static Error gone() { return make_error(Code::kUnavailable, "get from the board: its host is gone"); }
  int answers_;
};

TEST(BoardTest, AnswersEachKeyInOrderAndLeavesUnsetOnesEmpty) {
  MemoryBoard board;
  ASSERT_TRUE(board.set("a", "1"));
  ASSERT_TRUE(board.set("b", std::string("\0\xff", 2)));
  ASSERT_TRUE(board.set("a", "2"));
  const std::vector<std::string> keys{"b", "none", "a", "a"};
  EXPECT_THAT(board.get(keys).value(),
              testing::ElementsAre(std::string("\0\xff", 2), std::nullopt, std::string("2"), std::string("2")));
  EXPECT_EQ(board_get(board, "a").value(), "2");
  EXPECT_EQ(board_get(board, "none").value(), std::nullopt);
}

TEST(BoardTest, TheFirstToSetAnAbsentKeyWinsAndAllLearnItsValue) {
  MemoryBoard board;
  EXPECT_EQ(board.set_if_absent("k", "first").value(), "first");
  EXPECT_EQ(board.set_if_absent("k", "second").value(), "first");
  ASSERT_TRUE(board.erase(std::vector<std::string>{"k", "never set"}));
  EXPECT_EQ(board.set_if_absent("k", "third").value(), "third");
}

TEST(BoardTest, OfManyThreadsThatSetAnAbsentKeyOneWins) {
  for (int round = 0; round < 50; ++round) {
    MemoryBoard board;
    std::vector<std::string> seen(4);
    {
      std::vector<std::jthread> threads;
      for (std::size_t i = 0; i < seen.size(); ++i) {
        threads.emplace_back([&, i] { seen[i] = board.set_if_absent("k", std::to_string(i)).value(); });
      }
    }
    EXPECT_THAT(seen, testing::Each(seen.front()));
    EXPECT_EQ(board_get(board, "k").value(), seen.front());
  }
}

TEST(BoardTest, WaitReturnsWhatAnotherRankSetsLater) {
  MemoryBoard board;
  std::atomic<bool> waiting = false;
  std::jthread other([&] {
    waiting.wait(false);
    board.set("k", "late").value();
  });
  waiting = true;
  waiting.notify_one();
  EXPECT_EQ(board_wait(board, "k", long_enough()).value(), "late");
}

TEST(BoardTest, WaitThatEndsInVainNamesTheKey) {
  MemoryBoard board;
  const auto missed = board_wait(board, "vote/3", Deadline::after(milliseconds(3)));
  ASSERT_FALSE(missed);
  EXPECT_EQ(missed.error().code, Code::kDeadline);
  EXPECT_TRUE(missed.error().retryable);
  EXPECT_THAT(missed.error().message, testing::HasSubstr("vote/3"));
}

TEST(BoardTest, CollectThatEndsInVainShowsWhoIsMissing) {
  MemoryBoard board;
  ASSERT_TRUE(board.set("vote/0", "yes"));
  ASSERT_TRUE(board.set("vote/2", "no"));
  const std::vector<std::string> keys{"vote/0", "vote/1", "vote/2"};
  EXPECT_THAT(board_collect(board, keys, Deadline::after(milliseconds(3))).value(),
              testing::ElementsAre(std::string("yes"), std::nullopt, std::string("no")));
}

TEST(BoardTest, CollectTakesWhatIsThereEvenWhenItsDeadlineHasPassed) {
  MemoryBoard board;
  ASSERT_TRUE(board.set("k", "v"));
  EXPECT_EQ(board_wait(board, "k", at_once()).value(), "v");
}

TEST(BoardTest, CollectKeepsThePlacesOfAnswersThatComeInAnyOrder) {
  MemoryBoard board;
  const std::vector<std::string> keys{"0", "1", "2", "3", "4"};
  std::jthread other([&] {
    for (const char* key : {"3", "0", "4", "1", "2"}) {
      std::this_thread::sleep_for(milliseconds(1));
      board.set(key, key).value();
    }
  });
  const auto answers = board_collect(board, keys, long_enough());
  EXPECT_THAT(answers.value(),
              testing::ElementsAreArray(std::vector<std::optional<std::string>>(keys.begin(), keys.end())));
}

TEST(BoardTest, CollectOfNothingIsNothing) {
  MemoryBoard board;
  EXPECT_TRUE(board_collect(board, {}, at_once()).value().empty());
}

TEST(BoardTest, AHostThatGoesAwayEndsTheWaitBeforeTheDeadline) {
  for (const int answers : {0, 3}) {
    FailingBoard board(answers);
    const auto failed = board_wait(board, "k", long_enough());
    ASSERT_FALSE(failed);
    EXPECT_EQ(failed.error().code, Code::kUnavailable);
  }
}

}  // namespace
}  // namespace unbroken
