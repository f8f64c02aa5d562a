// How an attempt is removed (the tests cite these steps):
//   R0. The generations are looked at: a life that has been overtaken removes nothing. The names of the checkpoints
//       that stay are made durable: a marker that was seen is not yet one that survives a loss of power.
//   R1. `retired` is written into it, durably. It beats a marker: from here on no start will choose the attempt.
//   R2. The generations are looked at again. A start claims its number first and looks for `retired` second; retention
//       does the same two things in the opposite order. So of a retention and a start that race at least one sees the
//       other: a start that sees `retired` takes another checkpoint, a retention that sees a newer life takes its
//       `retired` back and stops. One that is killed before that leaves a `retired` that is void if the start has
//       chosen the attempt: see is_in_force() in catalog.cc.
//   R3. The marker is removed, durably, so that neither Unbroken nor stock DCP ever sees a marker above missing files.
//   R4. The directory is removed, and its name made to be gone durably.
#include "checkpoint/retention.h"

#include <fmt/core.h>

#include <algorithm>
#include <optional>

#include "base/crash_point.h"

namespace unbroken {
namespace {

// Replaces one that an older life has left: that one may be void.
Status condemn(Store& store, const LifeContext& life, const std::string& name) {
  const Retirement own{.life_id = life.life_id, .generation = life.generation, .time_ms = now_ms()};
  UNBROKEN_TRY(store.publish(join_path(name, kRetiredName), bytes_of(encode(own))));
  return store.sync_directory(name);
}

// Takes back what condemn() wrote, and not what another life has put in its place.
Status pardon(Store& store, const LifeContext& life, const std::string& name, Error fence) {
  const std::string path = join_path(name, kRetiredName);
  const auto document = store.read(path, kMaxJsonBytes);
  const auto there = document ? decode_retirement(*document, path) : Result<Retirement>(document.error());
  if (!there || there->life_id != life.life_id) return fence;
  const Status removed = store.remove(path);
  removed.ignore("it is void where the newer life has chosen this one, and true where it has not");
  if (removed) store.sync_directory(name).ignore("as above");
  return fence;
}

// The number of complete ones that must be counted before anything may go, checked file by file.
Result<std::vector<AttemptInfo>> check_counted(Store& store, Catalog catalog, const Keep& keep,
                                               const std::set<std::string>& known) {
  std::uint64_t counted = 0;
  for (auto& info : catalog.attempts) {
    if (info.state != AttemptState::kComplete) continue;
    if (!known.contains(info.name)) {
      UNBROKEN_ASSIGN(info, inspect_attempt(store, info.name, catalog.generations, Depth::kLengths));
      if (info.state != AttemptState::kComplete) continue;
    }
    UNBROKEN_TRY(store.sync_directory(info.name));
    if (++counted >= keep.last) break;
  }
  UNBROKEN_TRY(store.sync_directory(""));
  return std::move(catalog.attempts);
}

}  // namespace

std::vector<std::string> choose_to_remove(std::span<const AttemptInfo> attempts, const Keep& keep,
                                          std::uint64_t generation) {
  std::vector<std::string> chosen;
  if (keep.last == 0) return chosen;
  const auto newest = std::find_if(attempts.begin(), attempts.end(),
                                   [](const auto& info) { return info.state == AttemptState::kComplete; });
  if (newest == attempts.end()) return chosen;
  std::uint64_t counted = 0;
  for (const auto& info : attempts) {
    if (!info.has_record || info.key.generation > generation) continue;
    switch (info.state) {
      case AttemptState::kComplete: {
        const bool by_step = keep.every_steps != 0 && info.key.step % keep.every_steps == 0;
        if (++counted > keep.last && !by_step) chosen.push_back(info.name);
        break;
      }
      case AttemptState::kIncomplete:
      case AttemptState::kRetired: chosen.push_back(info.name); break;
      case AttemptState::kDamaged:
      case AttemptState::kOrphan:
        if (info.key.step <= newest->key.step) chosen.push_back(info.name);
        break;
      case AttemptState::kUnsupported:
      case AttemptState::kForeign: break;
    }
  }
  return chosen;
}

Status remove_attempt(Store& store, const LifeContext& life, const std::string& name) {
  UNBROKEN_TRY(condemn(store, life, name));
  UNBROKEN_CRASH_POINT("retention.1.condemned");
  if (Status fence = check_fence(store, life); !fence) return pardon(store, life, name, std::move(fence).error());
  UNBROKEN_CRASH_POINT("retention.2.generations_checked");
  Status unmarked = store.remove(join_path(name, kMarkerName));
  if (!unmarked && unmarked.error().code != Code::kNotFound) return unmarked;
  UNBROKEN_TRY(store.sync_directory(name));
  UNBROKEN_CRASH_POINT("retention.3.marker_removed");
  UNBROKEN_TRY(store.remove_directory(name));
  UNBROKEN_CRASH_POINT("retention.4.directory_removed");
  return store.sync_directory("");
}

Result<std::vector<std::string>> retain(Store& store, const LifeContext& life, const Keep& keep,
                                        const std::set<std::string>& known) {
  std::vector<std::string> removed;
  if (keep.last == 0) return removed;
  UNBROKEN_TRY(check_fence(store, life));
  UNBROKEN_CRASH_POINT("retention.0.generations_checked");
  UNBROKEN_ASSIGN(auto catalog, read_catalog(store, Depth::kManifest));
  UNBROKEN_ASSIGN(const auto attempts, check_counted(store, std::move(catalog), keep, known));
  // One that cannot be removed does not keep the others; but once a newer life is seen, nothing more goes.
  std::optional<Error> first;
  for (const auto& name : choose_to_remove(attempts, keep, life.generation)) {
    Status status = remove_attempt(store, life, name);
    if (status) {
      removed.push_back(name);
      continue;
    }
    if (status.error().code == Code::kFenced) return std::move(status).error();
    if (!first) first = std::move(status).error();
  }
  if (first) return std::move(*first);
  return removed;
}

Status remove_garbage(Store& store, const LifeContext& life, std::string_view under_way) {
  UNBROKEN_ASSIGN(const auto catalog, read_catalog(store, Depth::kManifest));
  const bool safe = std::any_of(catalog.attempts.begin(), catalog.attempts.end(),
                                [](const auto& info) { return info.state == AttemptState::kComplete; });
  for (const auto& info : catalog.attempts) {
    const bool ours = info.has_record && info.key.generation <= life.generation && info.name != under_way;
    // A retired one may be all that this life stands on, if an older one condemned it too late: see R2.
    const bool garbage = info.state == AttemptState::kIncomplete || (info.state == AttemptState::kRetired && safe);
    if (ours && garbage) UNBROKEN_TRY(remove_attempt(store, life, info.name));
  }
  return {};
}

}  // namespace unbroken
