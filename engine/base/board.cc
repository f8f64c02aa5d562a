#include "base/board.h"

#include <fmt/core.h>

#include <algorithm>
#include <thread>

namespace unbroken {
namespace {

// Starts quick, for the common case of ranks that are in step, and calms down to bound the load on the store.
class PollInterval {
 public:
  void sleep(const Deadline& deadline) {
    std::this_thread::sleep_for(std::min<std::chrono::microseconds>(interval_, deadline.left()));
    interval_ = std::min(interval_ * 3 / 2, kLongest);
  }

 private:
  static constexpr std::chrono::microseconds kLongest{20'000};
  std::chrono::microseconds interval_{200};
};

}  // namespace

Result<std::optional<std::string>> board_get(Board& board, const std::string& key) {
  UNBROKEN_ASSIGN(auto values, board.get(std::span(&key, 1)));
  return std::move(values.front());
}

Result<std::string> board_wait(Board& board, const std::string& key, Deadline deadline) {
  UNBROKEN_ASSIGN(auto values, board_collect(board, std::span(&key, 1), deadline));
  if (!values.front())
    return make_error(Code::kDeadline, fmt::format("wait for {} on the board: nothing came in time", key));
  return std::move(*values.front());
}

Result<std::vector<std::optional<std::string>>> board_collect(Board& board, std::span<const std::string> keys,
                                                              Deadline deadline) {
  std::vector<std::optional<std::string>> answers(keys.size());
  std::vector<std::string> missing(keys.begin(), keys.end());
  std::vector<std::size_t> places(keys.size());
  for (std::size_t i = 0; i < places.size(); ++i) places[i] = i;
  PollInterval interval;
  while (true) {
    UNBROKEN_ASSIGN(auto values, board.get(missing));
    std::vector<std::string> still_missing;
    std::vector<std::size_t> still_places;
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (values[i]) {
        answers[places[i]] = std::move(values[i]);
      } else {
        still_missing.push_back(std::move(missing[i]));
        still_places.push_back(places[i]);
      }
    }
    missing = std::move(still_missing);
    places = std::move(still_places);
    if (missing.empty() || deadline.passed()) return answers;
    interval.sleep(deadline);
  }
}

}  // namespace unbroken
