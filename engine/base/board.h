// The board on which the ranks of one start talk: a small key-value store that all of them reach.
//
// In a run it is a clone of torch.distributed's own store; in tests it is memory (memory_board.h). With a
// world of one it may be memory, too. Values are small (a vote is about 200 bytes).
// Threads: every method may be called from any thread. Blocking: no method waits for another rank; waiting is polling,
// in the free functions below. Errors: kUnavailable (the store's host is gone). Crash: the board lives as long as the
// start that made it; nothing on it is needed to recover.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"

namespace unbroken {

class Board {
 public:
  virtual ~Board() = default;

  virtual Status set(std::string_view key, std::string_view value) = 0;
  // One answer per key, empty where nothing is set; one round trip for all of them where the store can do so.
  virtual Result<std::vector<std::optional<std::string>>> get(std::span<const std::string> keys) = 0;
  // Sets `key` to `value` if it is unset; returns what the key holds afterwards. Atomic over all ranks.
  virtual Result<std::string> set_if_absent(std::string_view key, std::string_view value) = 0;
  // Forgets keys; absent ones are no error.
  virtual Status erase(std::span<const std::string> keys) = 0;
};

// What one key holds now.
Result<std::optional<std::string>> board_get(Board& board, const std::string& key);

// Polls until `key` is set. kDeadline when it is not set in time.
Result<std::string> board_wait(Board& board, const std::string& key, Deadline deadline);

// Polls until all keys are set or the deadline passes; answers as get() does, so the caller sees which are missing.
Result<std::vector<std::optional<std::string>>> board_collect(Board& board, std::span<const std::string> keys,
                                                              Deadline deadline);

}  // namespace unbroken
