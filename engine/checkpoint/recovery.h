// One start of a run: which checkpoint it goes on from, decided by one rank for all of them. The steps are in
// recovery.cc.
//
// Threads: the training thread of each rank. Blocking: I/O and the other ranks, within the timeout. Errors are the same
// on all ranks: kFenced (another start took the run), kUnavailable (the store cannot be reached: progress is never
// given up for that), kNotFound (something is there and nothing can be loaded; lists each candidate with its reason),
// kUnsupported. Crash: a start that dies after its record is one more life in the history; the next start chooses
// again.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/board.h"
#include "base/deadline.h"
#include "base/error.h"
#include "checkpoint/catalog.h"
#include "checkpoint/generation.h"
#include "store/store.h"

namespace unbroken {

struct RecoveryOptions {
  std::uint64_t rank = 0;  // 0 coordinates
  std::uint64_t world_size = 1;
  std::string host{};
  std::optional<std::uint64_t> step{};  // go on from this step, not from the newest
  bool allow_fresh = false;             // start fresh although something is there that cannot be loaded
  double timeout_seconds = 300;         // for the store and for the coordinator's word
  double load_timeout_seconds = 7200;   // for all ranks to have loaded
};

// What was decided; the same on all ranks.
struct Start {
  std::uint64_t generation = 0;
  std::string run_id;
  std::string life_id;
  bool fresh = true;
  AttemptKey key{};        // of the checkpoint; zeros when fresh
  std::string attempt{};   // its directory; "" when fresh
  std::string manifest{};  // the body of its manifest's root; "" when fresh
  std::vector<Refusal> refused{};
  std::string account{};                // what was chosen and why, in sentences
  std::vector<std::string> warnings{};  // what the user must hear of although the start went well
};

enum class Verdict {
  kLoaded,
  kDamaged,      // a byte range has no good copy
  kUnreachable,  // the store did not answer in time
  kFailed,       // this rank's program cannot take the state (another model, say): no other checkpoint would help
};

// What a start can choose from. Pure.
struct Choice {
  enum class Kind { kAttempt, kFresh, kNothing };
  Kind kind = Kind::kFresh;
  std::size_t attempt = 0;            // index into the catalog
  std::vector<std::string> evidence;  // for kNothing: each candidate with the reason why it cannot be loaded
};
Choice choose(const Catalog& catalog, const std::vector<Refusal>& refused, const RecoveryOptions& options);

class Recovery {
 public:
  Recovery(Store& store, Board& board, RecoveryOptions options);

  Result<Start> begin();
  // After every rank has loaded, or failed to. Nothing: all have loaded, the run goes on. A Start: all ranks drop what
  // they have and load that one. An error: all ranks stop.
  Result<std::optional<Start>> settle(Verdict verdict, std::string_view reason);

 private:
  Result<Start> share(Result<Start> mine);
  Result<Start> coordinate();
  Result<Start> start_once(Deadline deadline);
  Status claim(const Catalog& catalog);
  Result<Choice> choose_checked(Catalog& catalog);
  Result<Start> record(const Catalog& catalog, const Choice& choice);
  Result<Catalog> read_patiently(Deadline deadline);
  Result<Catalog> read_settled(Deadline deadline);
  Status check_supported(const Catalog& catalog, const Choice& choice) const;
  Status check_root() const;
  Error overtaken_by(std::uint64_t newer) const;
  Error nothing_to_load(const Choice& choice) const;
  Result<bool> judge_verdicts();
  std::string key(std::string_view what) const;

  Store& store_;
  Board& board_;
  RecoveryOptions options_;
  std::uint64_t round_ = 0;
  Start current_;
  std::optional<GenerationClaim> claim_;  // the number that this start has taken and not recorded yet
  std::uint64_t last_claimed_ = 0;
  std::vector<Refusal> refused_;  // in this start, to be recorded
};

}  // namespace unbroken
