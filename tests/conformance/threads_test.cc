// Many callers at once.
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <cstring>
#include <thread>

#include "base/bytes.h"
#include "conformance/places.h"

namespace unbroken::conformance {
namespace {

class Threads : public StoreTest {
 protected:
  static constexpr int kThreads = 8;

  // Runs work(0) ... work(kThreads - 1) at once.
  static void at_once(const std::function<void(int)>& work) {
    std::barrier start(kThreads);
    std::vector<std::jthread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i] {
        start.arrive_and_wait();
        work(i);
      });
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Stores, Threads, testing::ValuesIn(all_places()), place_name);

TEST_P(Threads, ExactlyOneCreateWholeWins) {
  if (!store().abilities().create_if_absent) GTEST_SKIP() << "this place has no create-if-absent";
  for (int round = 0; round < 10; ++round) {
    const std::string path = "g" + std::to_string(round);
    std::atomic<int> winner{-1};
    std::atomic<int> wins{0};
    at_once([&](int i) {
      const Status done = store().create_whole(path, bytes_of(std::string(1000, static_cast<char>('a' + i))));
      if (done) {
        winner = i;
        ++wins;
      } else {
        EXPECT_TRUE(has_code(done, Code::kAlreadyExists));
      }
    });
    ASSERT_EQ(wins.load(), 1);
    ASSERT_EQ(content(path), std::string(1000, static_cast<char>('a' + winner)));
  }
  EXPECT_EQ(names("").size(), 10U);
}

TEST_P(Threads, ExactlyOneCreateWins) {
  for (int round = 0; round < 10; ++round) {
    std::atomic<int> wins{0};
    at_once([&](int) {
      const auto writer = store().create("o" + std::to_string(round), 1);
      if (writer) {
        ++wins;
      } else {
        EXPECT_TRUE(has_code(writer, Code::kAlreadyExists));
      }
    });
    ASSERT_EQ(wins.load(), 1);
  }
}

TEST_P(Threads, DisjointRangesOfOneObjectMayBeWrittenAtOnce) {
  // Half of the pieces aligned, half not.
  for (const std::size_t piece : {16 * kDirectAlignment, 16 * kDirectAlignment + 100}) {
    const std::string bytes = random_bytes(piece * 64 + 5, piece);
    const std::string path = "o" + std::to_string(piece);
    auto writer = store().create(path, bytes.size());
    ASSERT_TRUE(is_ok(writer));
    std::atomic<std::size_t> next{0};
    at_once([&](int) {
      alignas(kDirectAlignment) static thread_local std::byte buffer[17 * kDirectAlignment];
      for (std::size_t at = next.fetch_add(piece); at < bytes.size(); at = next.fetch_add(piece)) {
        const std::size_t length = std::min(piece, bytes.size() - at);
        std::memcpy(buffer, bytes.data() + at, length);
        EXPECT_TRUE(is_ok((*writer)->write_at(at, std::span(buffer).first(length))));
      }
    });
    ASSERT_TRUE(is_ok((*writer)->finish(bytes.size())));
    ASSERT_EQ(content(path), bytes);
  }
}

TEST_P(Threads, OneReaderServesManyThreads) {
  const std::string bytes = random_bytes(64 * kDirectAlignment, 3);
  publish("o", bytes);
  for (const bool direct : {false, true}) {
    auto reader = store().open("o", {.direct = direct});
    ASSERT_TRUE(is_ok(reader));
    at_once([&](int i) {
      alignas(kDirectAlignment) static thread_local std::byte buffer[8 * kDirectAlignment];
      const std::size_t at = static_cast<std::size_t>(i) * sizeof buffer;
      EXPECT_TRUE(is_ok((*reader)->read_at(at, buffer)));
      EXPECT_EQ(text_of(buffer), std::string_view(bytes).substr(at, sizeof buffer));
    });
  }
}

TEST_P(Threads, ReadersSeeTheOldOrTheNewObjectNeverAMixture) {
  if (!store().abilities().atomic_publish) GTEST_SKIP() << "this place has no atomic publish";
  const std::string old_one(300000, 'a');
  const std::string new_one(200000, 'b');
  publish("m", old_one);
  std::atomic<bool> stop{false};
  {
    const std::jthread publisher([&] {
      for (int i = 0; i < 40; ++i) {
        EXPECT_TRUE(is_ok(store().publish("m", bytes_of(i % 2 == 0 ? new_one : old_one))));
      }
      stop = true;
    });
    do {
      const auto seen = store().read("m", kMiB);
      EXPECT_TRUE(is_ok(seen));
      if (seen) {
        EXPECT_TRUE(*seen == old_one || *seen == new_one);
      }
    } while (!stop);
  }
  EXPECT_EQ(names(""), std::vector<std::string>{"m"});
}

TEST_P(Threads, DirectoriesMayBeMadeListedAndRemovedAtOnce) {
  at_once([&](int i) {
    for (int round = 0; round < 20; ++round) {
      EXPECT_TRUE(is_ok(store().make_directory("shared/a/b/c")));
      const std::string own = "shared/own" + std::to_string(i);
      EXPECT_TRUE(is_ok(store().make_directory(own)));
      const auto writer = store().create(own + "/o", 0);
      EXPECT_TRUE(is_ok(writer));
      EXPECT_TRUE(is_ok(store().list("shared")));
      EXPECT_TRUE(is_ok(store().remove_directory(own)));
    }
  });
  EXPECT_EQ(names("shared"), std::vector<std::string>{"a"});
}

}  // namespace
}  // namespace unbroken::conformance
