#include "checkpoint/branch.h"

#include <fmt/core.h>

#include <algorithm>

namespace unbroken {

BranchVerdict judge_branch(const AttemptKey& key, std::string_view run_id, std::string_view life_id,
                           std::span<const GenerationEntry> generations) {
  const auto own = std::find_if(generations.begin(), generations.end(),
                                [&](const auto& entry) { return entry.number == key.generation; });
  if (own == generations.end() || own->claim_only) {
    return {false, fmt::format("generation {}, which wrote it, has no record in this root", key.generation)};
  }
  if (own->record && !life_id.empty() && own->record->life_id != life_id) {
    return {false, fmt::format("it was written by life {}, but generation {} is life {}", life_id, key.generation,
                               own->record->life_id)};
  }
  const auto run = run_id_of(generations);
  if (run && !run_id.empty() && *run != run_id) {
    return {false, fmt::format("it belongs to run {}, this root to run {}", run_id, *run)};
  }
  for (const auto& entry : generations) {
    if (entry.number <= key.generation || !entry.record) continue;
    const Origin& origin = entry.record->origin;
    if (origin.kind == Origin::Kind::kFresh) {
      return {false, fmt::format("generation {} started fresh after it", entry.number)};
    }
    if (origin.kind == Origin::Kind::kAttempt && key > origin.key) {
      return {false, fmt::format("generation {} went on from step {} ({}) instead", entry.number, origin.key.step,
                                 origin.attempt)};
    }
  }
  return {true, {}};
}

std::optional<std::string> run_id_of(std::span<const GenerationEntry> generations) {
  for (auto entry = generations.rbegin(); entry != generations.rend(); ++entry) {
    if (entry->record) return entry->record->run_id;
  }
  return std::nullopt;
}

std::vector<Refusal> all_refusals(std::span<const GenerationEntry> generations) {
  std::vector<Refusal> all;
  for (const auto& entry : generations) {
    if (!entry.record) continue;
    if (entry.record->origin.kind == Origin::Kind::kFresh) {
      all.clear();  // its own speak of what it gave up
      continue;
    }
    all.insert(all.end(), entry.record->refused.begin(), entry.record->refused.end());
  }
  return all;
}

bool was_ever_complete(std::span<const GenerationEntry> generations) {
  for (auto entry = generations.rbegin(); entry != generations.rend(); ++entry) {
    if (!entry->record) continue;
    if (entry->record->origin.kind == Origin::Kind::kFresh) return false;
    if (entry->record->origin.kind == Origin::Kind::kAttempt) return true;
  }
  return false;
}

std::uint64_t newest_generation(std::span<const GenerationEntry> generations) {
  return generations.empty() ? 0 : generations.back().number;
}

}  // namespace unbroken
