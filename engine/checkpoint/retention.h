// Removing checkpoints that are no longer needed, without ever removing the one that is. The protocol is in
// retention.cc.
//
// Threads: one at a time for a root (the coordinator of the living run, after a save became durable). Blocking: I/O.
// Errors: kFenced when a newer life has taken over (nothing more is removed); others leave what was not removed for the
// next time. Crash: an attempt that is condemned (`retired` is in it) never counts again and is removed by the next
// retention.
#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "checkpoint/catalog.h"
#include "checkpoint/commit.h"

namespace unbroken {

struct Keep {
  std::uint64_t last = 0;         // so many newest ones; 0 = all, nothing is ever removed
  std::uint64_t every_steps = 0;  // and those whose step is a multiple; 0 = none
};

// What to remove. Pure. `attempts` is newest first; those that are kComplete are taken to be so. Kept are: the newest
// complete ones, as `keep` says; whatever a life younger than `generation`, or no life of this run, has written; and
// what is not complete but newer than the newest complete one and damaged or orphaned (someone may want to look at it).
std::vector<std::string> choose_to_remove(std::span<const AttemptInfo> attempts, const Keep& keep,
                                          std::uint64_t generation);

// Chooses and removes. `known` are directories that this life has committed itself: their files need no look. Returns
// what was removed.
Result<std::vector<std::string>> retain(Store& store, const LifeContext& life, const Keep& keep,
                                        const std::set<std::string>& known);

// Removes what is no checkpoint and was written by this life or an older one: attempts that were never committed, and
// those that are retired. `under_way`: the directory of the one that other ranks may be writing already; no other may
// be under way.
Status remove_garbage(Store& store, const LifeContext& life, std::string_view under_way);

// Removes one attempt by the same steps. For `gc`.
Status remove_attempt(Store& store, const LifeContext& life, const std::string& name);

}  // namespace unbroken
