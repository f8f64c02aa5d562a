// What an attempt at one checkpoint consists of, and how its files and directory are named. docs/format.md is
// normative.
//
// The manifest has a root (`manifest.json`) and a part for each rank (`__<rank>.json`). A part lists that rank's shard
// files with the CRC32C of every chunk of kChunkBytes; the root lists the parts and `.metadata` by length and CRC32C,
// so that from the root every byte of the attempt is covered. Both are sealed JSON (sealed_json.h).
// Pure; any thread. Errors: kDamaged (not what was written), kUnsupported (a newer format version).
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "store/path.h"

namespace unbroken {

inline constexpr std::uint64_t kFormatVersion = 1;
inline constexpr std::uint64_t kChunkBytes = 4 * kMiB;
inline constexpr std::string_view kMarkerName = ".metadata";
inline constexpr std::string_view kManifestName = "manifest.json";
inline constexpr std::string_view kRetiredName = "retired";
inline constexpr std::uint64_t kMaxJsonBytes = 256 * kMiB;    // no honest document is longer
inline constexpr std::uint64_t kMaxMetadataBytes = 4 * kGiB;  // `.metadata` has an entry for each tensor of each rank

// The place of a checkpoint in the history of a run. Ordered: by step, then by generation, then by sequence.
struct AttemptKey {
  std::uint64_t step = 0;        // completed optimizer steps
  std::uint64_t generation = 0;  // the life that wrote it
  std::uint64_t sequence = 0;    // counts the attempts of that life
  auto operator<=>(const AttemptKey&) const = default;
};

// Where one archive (a tensor or an object as torch.save writes it) lies in a shard file. Bytes.
struct Slot {
  std::uint64_t offset = 0;       // of the archive in the file
  std::uint64_t length = 0;       // of the archive
  std::uint64_t data_offset = 0;  // of the tensor's bytes in the archive; 0 for an object
  std::uint64_t data_length = 0;  // of the tensor's bytes; 0 for an object
};

struct ShardFile {
  std::string name;
  std::uint64_t length = 0;
  std::vector<std::uint32_t> chunk_crcs;  // of every kChunkBytes; the last chunk may be shorter
  std::vector<Slot> slots;                // by rising offset
};

struct RankPart {
  std::uint64_t rank = 0;
  std::vector<ShardFile> files;
};

struct PartEntry {
  std::uint64_t length = 0;
  std::uint32_t crc = 0;
  std::uint64_t data_bytes = 0;  // of the rank's shard files together

  // No document has length 0: it stands for a rank that has no part in this checkpoint (plain.h).
  bool present() const { return length != 0; }
};

struct Manifest {
  std::string run_id;
  std::string life_id;
  AttemptKey key;
  std::string attempt;  // the random id in the directory's name
  std::string parent;   // the directory of the checkpoint that this life started from or committed before; "" = none
  std::int64_t time_ms = 0;  // Unix time, for people; nothing is decided by it
  std::uint64_t metadata_length = 0;
  std::uint32_t metadata_crc = 0;
  std::vector<PartEntry> parts;  // by rank: their number is the world size
  std::string mesh = "null";     // JSON
  std::string loader = "null";   // JSON: the loader's state; null when none was registered
  std::string versions = "{}";   // JSON
};

std::string shard_file_name(std::uint64_t rank, std::uint64_t number);  // "__3_0.distcp"
std::string part_name(std::uint64_t rank);                              // "__3.json"

// "step-1200-g7-4f1c9a2e"
std::string attempt_directory(const AttemptKey& key, std::string_view attempt);
struct AttemptName {
  std::uint64_t step = 0;
  std::uint64_t generation = 0;
  std::string attempt;
};
// Empty for a name that is not of that form.
std::optional<AttemptName> parse_attempt_directory(std::string_view name);

// `retired`: who condemned an attempt.
struct Retirement {
  std::string life_id;
  std::uint64_t generation = 0;
  std::int64_t time_ms = 0;  // Unix time, for people
};
std::string encode(const Retirement& retirement);
Result<Retirement> decode_retirement(std::string_view document, std::string_view name);

// The bodies, as JSON text.
std::string manifest_body(const Manifest& manifest);
Result<Manifest> parse_manifest_body(std::string_view body, std::string_view name);

// The whole documents, sealed.
std::string encode(const RankPart& part);
std::string encode(const Manifest& manifest);
Result<RankPart> decode_part(std::string_view document, std::string_view name);
Result<Manifest> decode_manifest(std::string_view document, std::string_view name);

}  // namespace unbroken
