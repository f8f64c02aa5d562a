// One save of one rank, from the image in memory to a checkpoint that exists. The protocol is stated in commit.cc.
//
// Threads: a rank's saves follow one another; commit_attempt() runs on a background thread of that rank. Blocking: for
// the I/O and for the other ranks, within the deadlines of the request. Errors: none are returned; the outcome says
// what became of the attempt. Crash: see the steps in commit.cc; older checkpoints are never touched before a newer one
// is durable.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/board.h"
#include "base/error.h"
#include "checkpoint/image.h"
#include "checkpoint/manifest.h"
#include "store/store.h"

namespace unbroken {

// The life that saves, and this rank's place in it. Rank 0 coordinates.
struct LifeContext {
  std::string run_id;
  std::string life_id;
  std::uint64_t generation = 0;
  std::uint64_t rank = 0;
  std::uint64_t world_size = 1;
};

struct SaveRequest {
  AttemptKey key;
  std::string attempt;                      // random id, equal on all ranks
  std::string parent;                       // directory of the checkpoint before this one, "" = none
  std::string structure;                    // hash of what is saved and where it lies; must be equal on all ranks
  std::optional<std::string> object_slots;  // JSON, when places differ from the plan
  std::string failure;                      // why this rank cannot take part, "" = it can
  // Coordinator: makes `.metadata` from what the votes say of places, an entry a rank.
  std::function<Result<std::string>(std::span<const std::optional<std::string>>)> metadata;
  std::string mesh = "null";
  std::string loader = "null";
  std::string versions = "{}";
  int threads = 2;
  const std::atomic<bool>* cancelled = nullptr;  // when it becomes true, others are waited for some seconds more
  double vote_timeout_seconds = 600;             // how long the coordinator waits for votes, counted from its own
  double settle_timeout_seconds = 60;            // how long an unclear marker is looked after
};

struct SaveOutcome {
  enum class State { kDurable, kFailed, kUnknown };
  State state = State::kFailed;
  Code code = Code::kInternal;         // of a failure
  std::string reason;                  // "" when durable; names ranks and causes
  std::string attempt_path;            // the directory
  std::uint64_t bytes = 0;             // written by this rank
  double write_seconds = 0;            // steps 2 and 3
  double commit_seconds = 0;           // steps 4 to 7
  std::vector<std::uint64_t> missing;  // coordinator: ranks that had not voted
  bool structure_differs = false;      // the next save must plan anew
};
std::string_view outcome_name(SaveOutcome::State state);

SaveOutcome commit_attempt(Store& store, Board& board, const LifeContext& life, const Image* image,
                           const SaveRequest& request);

// Whether the life may still write: its own record is there, and no newer one. kFenced, naming the newer life.
Status check_fence(Store& store, const LifeContext& life);

// Keys of an attempt on the board.
std::string attempt_key(const LifeContext& life, std::string_view attempt, std::string_view what);

// What one rank says at the end of its part.
struct Vote {
  std::string structure;
  PartEntry part;
  std::optional<std::string> object_slots;
  std::string error;  // "" = the rank's bytes are durable
  Code code = Code::kInternal;
};
std::string encode_vote(const Vote& vote);
Result<Vote> decode_vote(std::string_view text);

// What follows from the votes. Pure. `votes[r]` is empty for a rank that did not vote in time; `structure` is the
// coordinator's own, "" when it could not take part.
struct Count {
  bool carried = false;
  Code code = Code::kInternal;
  std::string reason;  // names every rank that failed, is missing or differs
  std::vector<std::uint64_t> missing;
  bool structure_differs = false;
};
Count count_votes(std::span<const std::optional<Vote>> votes, std::string_view structure);

}  // namespace unbroken
