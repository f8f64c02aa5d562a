#include "checkpoint/catalog.h"

#include <fmt/core.h>

#include <algorithm>
#include <map>

#include "base/parallel.h"
#include "checkpoint/patience.h"
#include "checkpoint/shard.h"

namespace unbroken {
namespace {

constexpr int kThreads = 2;

// Codes that speak of the attempt's bytes; all others say that they could not be looked at now.
bool is_damage(const Error& error) {
  return error.code == Code::kDamaged || error.code == Code::kNotFound || error.code == Code::kIo ||
         error.code == Code::kInvalidArgument;
}

void set_state(AttemptInfo& info, AttemptState state, std::string reason) {
  info.state = state;
  info.reason = std::move(reason);
}

bool has_record(std::uint64_t generation, std::span<const GenerationEntry> generations) {
  return std::any_of(generations.begin(), generations.end(),
                     [&](const auto& entry) { return entry.number == generation && !entry.claim_only; });
}

// Whether a life of this root wrote it: a copy of another run's may have the same number.
bool is_ours(const Manifest& manifest, std::span<const GenerationEntry> generations) {
  return std::any_of(generations.begin(), generations.end(), [&](const auto& entry) {
    return entry.number == manifest.key.generation && !entry.claim_only &&
           (!entry.record || (entry.record->life_id == manifest.life_id && entry.record->run_id == manifest.run_id));
  });
}

using Sizes = std::map<std::string, std::uint64_t, std::less<>>;

Status check_size(const Sizes& sizes, std::string_view attempt, std::string_view file, std::uint64_t length) {
  const auto found = sizes.find(file);
  if (found == sizes.end()) return make_error(Code::kDamaged, fmt::format("{} is missing", join_path(attempt, file)));
  if (found->second != length) {
    return make_error(Code::kDamaged,
                      fmt::format("{}/{} has {} bytes, {} were written", attempt, file, found->second, length));
  }
  return {};
}

Status check_lengths(AttemptReader& reader, const Sizes& sizes) {
  const auto& attempt = reader.attempt();
  if (auto metadata = reader.metadata(); !metadata) return std::move(metadata).error();
  const auto& parts = reader.manifest().parts;
  for (std::uint64_t rank = 0; rank < parts.size(); ++rank) {
    if (!parts[rank].present()) continue;
    UNBROKEN_TRY(check_size(sizes, attempt, part_name(rank), parts[rank].length));
  }
  return parallel_for(parts.size(), kThreads, [&](std::size_t rank) -> Status {
    if (!parts[rank].present()) return {};
    UNBROKEN_ASSIGN(const RankPart* part, reader.part(rank));
    for (const auto& file : part->files) UNBROKEN_TRY(check_size(sizes, attempt, file.name, file.length));
    return {};
  });
}

// A marker that is shorter than it should be was being written when the writer died; it never committed anything.
bool is_torn_marker(const Sizes& sizes, const Manifest& manifest) {
  const auto marker = sizes.find(kMarkerName);
  return marker != sizes.end() && marker->second < manifest.metadata_length;
}

Status inspect_committed(Store& store, const Sizes& sizes, std::span<const GenerationEntry> generations, Depth depth,
                         const Progress& progress, AttemptInfo& info) {
  UNBROKEN_ASSIGN(const auto reader, AttemptReader::open(store, info.name));
  info.manifest = reader->manifest();
  const auto named = parse_attempt_directory(info.name);
  if (named && (info.manifest->key.step != named->step || info.manifest->key.generation != named->generation ||
                info.manifest->attempt != named->attempt)) {
    return make_error(Code::kDamaged,
                      fmt::format("{}: the manifest is that of {}; the directory was renamed", info.name,
                                  attempt_directory(info.manifest->key, info.manifest->attempt)));
  }
  info.key = info.manifest->key;
  info.has_record = is_ours(*info.manifest, generations);
  const BranchVerdict verdict = judge_branch(info.key, info.manifest->run_id, info.manifest->life_id, generations);
  info.on_branch = verdict.on_branch;
  if (is_torn_marker(sizes, *info.manifest)) {
    set_state(info, AttemptState::kIncomplete, "the marker is torn: the save was cut off while it was committed");
    return {};
  }
  if (depth >= Depth::kLengths) UNBROKEN_TRY(check_lengths(*reader, sizes));
  if (depth >= Depth::kChecksums) UNBROKEN_TRY(reader->verify(kThreads, progress));
  if (named) {
    set_state(info, verdict.on_branch ? AttemptState::kComplete : AttemptState::kOrphan, verdict.reason);
  } else {
    info.on_branch = false;
    set_state(info, AttemptState::kForeign,
              info.manifest->run_id.empty()
                  ? "a whole checkpoint that belongs to no run: a DCP drop-in wrote it"
                  : "a whole checkpoint that is no attempt of this run: a copy, or another's");
  }
  return {};
}

std::optional<AttemptInfo> not_a_directory(std::string_view name, std::span<const GenerationEntry> generations) {
  const auto named = parse_attempt_directory(name);
  if (!named) return std::nullopt;
  AttemptInfo info{.name = std::string(name)};
  info.key = {.step = named->step, .generation = named->generation, .sequence = 0};
  info.on_branch = judge_branch(info.key, {}, {}, generations).on_branch;
  info.has_record = has_record(named->generation, generations);
  info.has_marker = true;  // what it leads to may be whole
  set_state(info, AttemptState::kDamaged, fmt::format("{} is a file or a link, not a directory", name));
  return info;
}

// Whether `retired` means something. It does not when a later life than the one that wrote it has gone on from this
// attempt: that life looked after its claim and saw no `retired`, so the older one wrote it too late, and was killed
// before it saw the claim and took it back (retention.cc). One that cannot be read is believed.
Result<bool> is_in_force(Store& store, std::string_view name, std::span<const GenerationEntry> generations) {
  const std::string path = join_path(name, kRetiredName);
  const auto document = read_patiently([&] { return store.read(path, kMaxJsonBytes); });
  if (!document && document.error().code == Code::kNotFound) return false;  // taken back since it was listed
  if (!document && !is_damage(document.error())) return document.error();
  const auto retirement = document ? decode_retirement(*document, path) : Result<Retirement>(document.error());
  if (!retirement) return true;
  return std::none_of(generations.begin(), generations.end(), [&](const auto& entry) {
    return entry.number > retirement->generation && entry.record &&
           entry.record->origin.kind == Origin::Kind::kAttempt && entry.record->origin.attempt == name;
  });
}

bool newer_first(const AttemptInfo& a, const AttemptInfo& b) {
  const bool a_foreign = a.state == AttemptState::kForeign;
  const bool b_foreign = b.state == AttemptState::kForeign;
  if (a_foreign != b_foreign) return b_foreign;
  if (a.key != b.key) return a.key > b.key;
  return a.name > b.name;
}

}  // namespace

std::string_view state_name(AttemptState state) {
  switch (state) {
    case AttemptState::kComplete: return "complete";
    case AttemptState::kIncomplete: return "incomplete";
    case AttemptState::kDamaged: return "damaged";
    case AttemptState::kOrphan: return "orphan";
    case AttemptState::kRetired: return "retired";
    case AttemptState::kUnsupported: return "unsupported";
    case AttemptState::kForeign: return "foreign";
  }
  return "unknown";
}

Result<AttemptInfo> inspect_attempt(Store& store, std::string_view name, std::span<const GenerationEntry> generations,
                                    Depth depth, const Progress& progress) {
  AttemptInfo info{.name = std::string(name)};
  UNBROKEN_ASSIGN(const auto entries, store.list(name));
  Sizes sizes;
  for (const auto& entry : entries) {
    if (entry.is_directory) continue;
    sizes.emplace(entry.name, entry.size);
    info.bytes += entry.size;
    info.files += 1;
  }
  const auto named = parse_attempt_directory(name);
  if (named) {
    info.key = {.step = named->step, .generation = named->generation, .sequence = 0};
    info.on_branch = judge_branch(info.key, {}, {}, generations).on_branch;
    info.has_record = has_record(named->generation, generations);
  }
  info.has_marker = sizes.contains(kMarkerName);
  if (!info.has_marker) {
    set_state(info, AttemptState::kIncomplete, "no marker: the save was not committed");
  } else if (!sizes.contains(kManifestName)) {
    if (named)
      set_state(info, AttemptState::kDamaged, fmt::format("{}/{} is missing", name, kManifestName));
    else
      set_state(info, AttemptState::kForeign, "a DCP checkpoint that Unbroken did not write");
  } else if (const Status status = inspect_committed(store, sizes, generations, depth, progress, info); !status) {
    if (status.error().code == Code::kUnsupported) {
      set_state(info, AttemptState::kUnsupported, status.error().message);
    } else if (is_damage(status.error())) {
      set_state(info, AttemptState::kDamaged, status.error().message);
    } else {
      return status.error();
    }
  }
  if (sizes.contains(kRetiredName)) {
    UNBROKEN_ASSIGN(const bool in_force, is_in_force(store, name, generations));
    if (in_force) set_state(info, AttemptState::kRetired, "retired by retention; it is about to be removed");
  }
  return info;
}

Result<Catalog> read_catalog(Store& store, Depth depth) {
  Catalog catalog;
  UNBROKEN_ASSIGN(catalog.generations, list_generations(store));
  UNBROKEN_ASSIGN(const auto entries, store.list(""));
  for (const auto& entry : entries) {
    if (entry.name == kGenerationsDirectory) continue;
    if (!entry.is_directory) {
      // Somebody moved it and left a link, say. Links are not followed, and a checkpoint must not just be gone for
      // that.
      if (auto misplaced = not_a_directory(entry.name, catalog.generations)) {
        catalog.attempts.push_back(std::move(*misplaced));
      }
      continue;
    }
    auto info = inspect_attempt(store, entry.name, catalog.generations, depth);
    if (!info) {
      if (info.error().code == Code::kNotFound) continue;  // removed since it was listed
      // Somebody else's, such as lost+found at a mount point.
      if (info.error().code == Code::kPermission && !parse_attempt_directory(entry.name)) continue;
      return std::move(info).error();
    }
    // A directory that is neither an attempt nor a checkpoint is none of our business.
    if (parse_attempt_directory(entry.name) || info->has_marker) catalog.attempts.push_back(std::move(*info));
  }
  std::sort(catalog.attempts.begin(), catalog.attempts.end(), newer_first);
  return catalog;
}

Result<AttemptInfo> find_attempt(Store& store, std::optional<std::uint64_t> step) {
  UNBROKEN_ASSIGN(const auto catalog, read_catalog(store, Depth::kManifest));
  std::string passed_over;
  for (const auto& candidate : catalog.attempts) {
    if (step && candidate.key.step != *step) continue;
    AttemptInfo info = candidate;
    if (candidate.state == AttemptState::kComplete) {
      UNBROKEN_ASSIGN(info, inspect_attempt(store, candidate.name, catalog.generations, Depth::kLengths));
      if (info.state == AttemptState::kComplete) return info;
    }
    if (info.state == AttemptState::kUnsupported) return make_error(Code::kUnsupported, info.reason);
    passed_over += fmt::format("\n  {}: {}: {}", info.name, state_name(info.state), info.reason);
  }
  return make_error(Code::kNotFound,
                    fmt::format("find a checkpoint{} in {}: there is no complete one on the run's branch{}",
                                step ? fmt::format(" of step {}", *step) : "", store.url(),
                                passed_over.empty() ? "" : "; passed over:" + passed_over));
}

}  // namespace unbroken
