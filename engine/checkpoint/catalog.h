// What lies under a run root: attempts and their states, records of lives.
//
// Reads only; claims nothing and changes nothing. Threads: any. Blocking: I/O. Errors: kUnavailable and kPermission end
// the listing (an attempt that cannot be looked at is never called absent); damage is a state, not an error.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "checkpoint/branch.h"
#include "checkpoint/generation.h"
#include "checkpoint/manifest.h"
#include "store/store.h"

namespace unbroken {

enum class AttemptState {
  kComplete,     // marker, manifest, and all that was looked at is as it was written; on the branch
  kIncomplete,   // no marker, or one that is torn: the save was never committed
  kDamaged,      // was committed; something is missing or differs
  kOrphan,       // whole, but of a branch that the run has left
  kRetired,      // condemned by retention; about to go
  kUnsupported,  // of a newer format version
  kForeign,      // a stock DCP checkpoint: marker, no manifest
};
std::string_view state_name(AttemptState state);

// How far an attempt is looked into. Each includes those before it.
enum class Depth {
  kManifest,   // the marker is there, the root of the manifest is whole
  kLengths,    // `.metadata` and every part of the manifest are whole; every file is there with its length
  kChecksums,  // every byte of every file
};

struct AttemptInfo {
  std::string name;  // the directory
  AttemptKey key{};  // the sequence is 0 where the manifest cannot be read
  AttemptState state = AttemptState::kIncomplete;
  std::string reason{};  // why it is not complete; names the file
  bool has_marker = false;
  bool has_record = false;  // the life that wrote it has a record here
  bool on_branch = false;
  std::uint64_t bytes = 0;  // of all files in the directory
  std::uint64_t files = 0;
  std::optional<Manifest> manifest{};
};

struct Catalog {
  std::vector<GenerationEntry> generations;  // rising
  std::vector<AttemptInfo> attempts;         // newest first; foreign ones last
};

using Progress = std::function<void(std::uint64_t done_bytes, std::uint64_t all_bytes)>;

Result<Catalog> read_catalog(Store& store, Depth depth);

// One directory, whatever its name.
Result<AttemptInfo> inspect_attempt(Store& store, std::string_view name, std::span<const GenerationEntry> generations,
                                    Depth depth, const Progress& progress = {});

// The newest complete attempt on the branch, or the newest of that step; checked to kLengths; damaged ones are passed
// over. kNotFound listing what was passed over and why; kUnsupported when the newest is of a newer format.
Result<AttemptInfo> find_attempt(Store& store, std::optional<std::uint64_t> step);

}  // namespace unbroken
