// Which checkpoints belong to the history that a run stands on. Pure functions; no I/O, no clock.
//
// A process thought dead can still finish a save, so "newest" alone is wrong. An attempt is *on the branch* when its
// life has a record, and its key is at most that of the start of every later life (a fresh start is below every
// checkpoint). So a step that was once given up never comes back, whichever node returns with it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/generation.h"
#include "checkpoint/manifest.h"

namespace unbroken {

struct BranchVerdict {
  bool on_branch = false;
  std::string reason;  // why not
};

// `run_id` and `life_id` are those of the attempt's manifest; empty when it cannot be read (then only the generation's
// number is compared). A record that cannot be read constrains nothing and vouches for its number; a claim does
// neither.
BranchVerdict judge_branch(const AttemptKey& key, std::string_view run_id, std::string_view life_id,
                           std::span<const GenerationEntry> generations);

// The run that the records speak of: of the newest that can be read. Empty when there is none.
std::optional<std::string> run_id_of(std::span<const GenerationEntry> generations);

// All refusals since the newest fresh start; earlier ones are of checkpoints that it gave up.
std::vector<Refusal> all_refusals(std::span<const GenerationEntry> generations);

// Whether the records say that some checkpoint was complete since the newest fresh start.
bool was_ever_complete(std::span<const GenerationEntry> generations);

// The highest number taken, 0 when none is.
std::uint64_t newest_generation(std::span<const GenerationEntry> generations);

}  // namespace unbroken
