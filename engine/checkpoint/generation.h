// A life of a run: its claim, generations/<number>.claim, and its record, generations/<number>.json. Each is created
// once, whole, and never changed.
//
// A start takes its number by the claim, before it looks for a checkpoint: older lives that look see it and stop. The
// record says what it chose; a life begins when that is durable, before it reads one tensor. A claim without a record
// is a start that ended before it chose. Records are the log behind `unbroken why` and the input of the branch rule
// (branch.h). Threads: any; the functions block for I/O. Errors: kFenced when another start took the number, naming it;
// kUnavailable when the store cannot be reached (absence is never concluded). Crash: a claim or record is there whole
// or not at all (Store::create_whole).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "checkpoint/manifest.h"
#include "store/store.h"

namespace unbroken {

// Where a life began.
struct Origin {
  enum class Kind {
    kFresh,    // step 0, nothing loaded
    kAttempt,  // a checkpoint
    kNone,     // the start found nothing that it could load and ended; constrains nothing
  };
  Kind kind = Kind::kFresh;
  AttemptKey key;       // of the checkpoint
  std::string attempt;  // its directory
};

struct Refusal {
  std::string attempt;  // directory
  std::string reason;
};

struct GenerationRecord {
  std::uint64_t number = 0;
  std::string run_id;
  std::string life_id;
  Origin origin;
  std::vector<Refusal> refused;  // never tried again
  std::uint64_t ranks = 0;
  std::string host;
  std::int64_t time_ms = 0;  // Unix time, for people
};

// What a start puts down before it looks for a checkpoint.
struct GenerationClaim {
  std::uint64_t number = 0;
  std::string life_id;
  std::string host;
  std::int64_t time_ms = 0;  // Unix time, for people
};

// A number that is taken; without a record when that one cannot be read, or was never made (it then constrains
// nothing).
struct GenerationEntry {
  std::uint64_t number = 0;
  std::optional<GenerationRecord> record;
  std::string error;        // why there is no record
  bool claim_only = false;  // a start has not chosen yet, or ended before it did
};

inline constexpr std::string_view kGenerationsDirectory = "generations";

std::string generation_path(std::uint64_t number);
std::string claim_path(std::uint64_t number);
std::string encode(const GenerationRecord& record);
Result<GenerationRecord> decode_generation(std::string_view document, std::string_view name);

// All numbers that are taken, by a claim or a record, rising. No directory: none.
Result<std::vector<std::uint64_t>> list_generation_numbers(Store& store);
// One of them, with its record or the reason why that cannot be read.
Result<GenerationEntry> read_generation(Store& store, std::uint64_t number);
// All of them.
Result<std::vector<GenerationEntry>> list_generations(Store& store);

// Takes the number, durably. kFenced, naming the other life, when it is taken; success when it is ours already (an
// answer that was lost on the way).
Status claim_generation(Store& store, const GenerationClaim& claim);

// Makes the record durable, for a life that has claimed its number. The same errors.
Status create_generation(Store& store, const GenerationRecord& record);

// "generation 7 (life 3f2a…, host node-3, 2026-08-01 12:00:00 UTC)"
std::string describe(const GenerationClaim& claim);
std::string describe(const GenerationRecord& record);
// The life that has the number, described as well as can be.
std::string describe_life(Store& store, std::uint64_t number);
std::string format_time(std::int64_t time_ms);
std::int64_t now_ms();

// `bytes` random bytes as lower-case hexadecimal digits.
std::string random_hex(std::size_t bytes);

}  // namespace unbroken
