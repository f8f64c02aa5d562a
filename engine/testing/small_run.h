// A small training run for tests: ranks are threads, and what a rank saves follows from (step, generation, rank), so
// that every byte of every checkpoint can be checked and no two attempts hold the same.
//
// Each rank has two tensors in one shard file and an object, whose length changes with the step, in another. Lives go
// through the real engine: Recovery, Decider, commit and retention. Any thread; blocks for I/O and for the ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/board.h"
#include "checkpoint/catalog.h"
#include "checkpoint/image.h"
#include "checkpoint/recovery.h"
#include "checkpoint/saver.h"
#include "store/store.h"

namespace unbroken {

// The state of one rank at one step, in an image.
class SmallImage {
 public:
  static Result<SmallImage> create(std::uint64_t rank);

  // Puts the state there; SaveRequest::object_slots of that save.
  Result<std::optional<std::string>> stage(std::uint64_t step, std::uint64_t generation);
  const Image* image() const { return &image_; }

 private:
  explicit SmallImage(Image image, std::uint64_t rank) : image_(std::move(image)), rank_(rank) {}

  Image image_;
  std::uint64_t rank_;
};

// A request for one save of a small run, but for what Saver fills in.
SaveRequest small_request(std::uint64_t step, const StepDecision& decision, std::optional<std::string> object_slots);

// Whether the files of that rank, or of all, hold what was saved at the step and in the generation that the manifest
// names. kDamaged names the file.
Status check_small_bytes(Store& store, std::string_view attempt, std::optional<std::uint64_t> rank = {});

// Every directory with a whole marker, retired or not, must be a whole checkpoint with the right bytes. One line for
// each that is not.
std::vector<std::string> check_small_root(Store& store);

struct LifePlan {
  std::uint64_t world_size = 2;
  std::vector<std::uint64_t> saves{};  // steps
  Keep keep{};
  std::optional<std::uint64_t> from_step{};
  bool allow_fresh = false;
  double timeout_seconds = 20;        // of every wait for another rank
  double settle_timeout_seconds = 1;  // of every wait for the store
};

struct RankLife {
  std::optional<Start> start{};  // empty: `error` says why
  std::optional<Error> error{};
  std::string wrong{};  // what was loaded and not right
  std::vector<SaveOutcome> saves{};
  std::vector<std::string> retired{};
  std::vector<Error> retention_errors{};
};

// One life: start, load, save. Rank r works on stores[r], or all on stores[0] if there is but one. A rank whose start
// fails ends its life; saves that fail do not.
std::vector<RankLife> live(std::span<Store* const> stores, const LifePlan& plan);
std::vector<RankLife> live(Store& store, const LifePlan& plan);

// A start of one rank that loads all ranks' bytes and saves nothing.
Result<Start> start_small(Store& store, std::optional<std::uint64_t> from_step = {});

// Every file below the root with its content's checksum, but for the records of lives.
std::string list_contents(Store& store);

}  // namespace unbroken
