// The steps are those of commit.cc that need no life: 2 and 3 on every rank, then DCP's collective in place of 4, then
// 5 and 6.
#include "checkpoint/plain.h"

#include <fmt/core.h>

#include "base/crash_point.h"
#include "base/crc32c.h"
#include "checkpoint/generation.h"
#include "checkpoint/shard.h"

namespace unbroken {
namespace {

Status remove_if_there(Store& store, std::string_view name) {
  const Status removed = store.remove(name);
  return removed || removed.error().code == Code::kNotFound ? Status() : removed;
}

// The marker of all ranks, or of one that saved alone.
bool is_marker(std::string_view name) {
  return name == kMarkerName || (name.starts_with("__") && name.ends_with(kMarkerName));
}

// `of`: "__" for all ranks, or "__3" for rank 3.
bool is_checkpoint_file(std::string_view name, std::string_view of) {
  if (!name.starts_with(of)) return false;
  const std::string_view rest = name.substr(of.size());
  if (of == "__") return rest.ends_with(".distcp") || rest.ends_with(".json");
  return (rest.starts_with('_') && rest.ends_with(".distcp")) || rest == ".json";
}

Result<PartEntry> read_part_entry(Store& store, std::uint64_t rank) {
  const std::string name = part_name(rank);
  UNBROKEN_ASSIGN(const std::string document, store.read(name, kMaxJsonBytes));
  UNBROKEN_ASSIGN(const RankPart part, decode_part(document, name));
  PartEntry entry{.length = document.size(), .crc = crc32c(bytes_of(document)), .data_bytes = 0};
  for (const auto& file : part.files) entry.data_bytes += file.length;
  return entry;
}

}  // namespace

PlainNames PlainNames::of_rank(std::uint64_t rank) {
  return {.marker = fmt::format("__{}{}", rank, kMarkerName), .manifest = fmt::format("__{}.{}", rank, kManifestName)};
}

Status prepare_plain(Store& store, const PlainNames& names, bool overwrite) {
  UNBROKEN_ASSIGN(const auto entries, store.list(""));
  const bool alone = names.marker != kMarkerName;
  std::vector<std::string> markers;
  for (const auto& entry : entries) {
    // What the other ranks save alone is theirs; a marker of all ranks would be read before this rank's own.
    const bool counts = alone ? entry.name == names.marker || entry.name == kMarkerName : is_marker(entry.name);
    if (counts) markers.push_back(entry.name);
  }
  if (!markers.empty() && !overwrite) {
    return make_error(Code::kAlreadyExists, fmt::format("save to {}: a checkpoint is there already; give another path, "
                                                        "or overwrite=True to replace it",
                                                        store.url()));
  }
  for (const auto& marker : markers) UNBROKEN_TRY(remove_if_there(store, marker));
  UNBROKEN_TRY(store.sync_directory(""));
  UNBROKEN_CRASH_POINT("plain.1.marker_removed");
  UNBROKEN_TRY(remove_if_there(store, names.manifest));
  if (!markers.empty()) UNBROKEN_TRY(remove_if_there(store, kManifestName));
  const std::string_view of = alone ? std::string_view(names.marker).substr(0, names.marker.size() - kMarkerName.size())
                                    : std::string_view("__");
  for (const auto& entry : entries) {
    if (!entry.is_directory && is_checkpoint_file(entry.name, of)) UNBROKEN_TRY(remove_if_there(store, entry.name));
  }
  return store.sync_directory("");
}

Status write_plain_rank(Store& store, const Image& image, int threads) {
  // What a rank that saves alone, or an attempt that failed, has left of itself.
  for (const auto& file : image.files()) UNBROKEN_TRY(remove_if_there(store, file.name));
  UNBROKEN_TRY(remove_if_there(store, part_name(image.rank())));
  auto written = write_rank(store, "", image, threads);
  if (!written) return std::move(written).error();
  return store.sync_directory("");
}

Status commit_plain(Store& store, const PlainCommit& commit, std::string_view marker) {
  Manifest manifest{.run_id = {},
                    .life_id = {},
                    .key = {},
                    .attempt = {},
                    .parent = {},
                    .time_ms = now_ms(),
                    .metadata_length = marker.size(),
                    .metadata_crc = crc32c(bytes_of(marker)),
                    .parts = {},
                    .mesh = "null",
                    .loader = "null",
                    .versions = commit.versions};
  for (std::uint64_t rank = 0; rank < commit.world_size; ++rank) {
    manifest.parts.emplace_back();
    if (commit.only_rank && *commit.only_rank != rank) continue;
    UNBROKEN_ASSIGN(manifest.parts.back(), read_part_entry(store, rank));
  }
  UNBROKEN_TRY(write_small_file(store, commit.names.manifest, encode(manifest)));
  UNBROKEN_TRY(store.sync_directory(""));
  UNBROKEN_CRASH_POINT("plain.5.manifest_durable");
  UNBROKEN_TRY(store.publish(commit.names.marker, bytes_of(marker)));
  UNBROKEN_CRASH_POINT("plain.6.marker_published");
  return store.sync_directory("");
}

}  // namespace unbroken
