// Checkpoints in a directory that no run owns: what stock DCP writes, and what ranks save alone.
//
// Stock DCP's have no checksums, and their marker is a pickle, which is not opened. What can be seen all the same is
// whether a file was cut off: a pickle and an archive of torch.save both end in a known way.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"
#include "cli/check.h"
#include "store/store.h"

namespace unbroken::cli {

// One marker in a directory: that of all ranks, or of one that saved alone (DCP's use_collectives=False).
struct RankMarker {
  std::uint64_t rank = 0;
  bool has_manifest = false;  // Unbroken wrote it
};
// Those of ranks that saved alone, by rank.
Result<std::vector<RankMarker>> markers_of_ranks(Store& store, const std::string& directory);

// What can be said of files that have no checksums.
struct FormReport {
  std::uint64_t files = 0;          // shard files
  std::uint64_t bytes = 0;          // of them
  std::uint64_t unknown = 0;        // those of them that are no archives of torch.save: compressed ones, say
  std::vector<Problem> problems{};  // what was cut off, or cannot be read
};
// `of`: "__" for the shard files of all ranks, "__3_" for those of rank 3.
FormReport check_form(Store& store, const std::string& directory, const std::string& marker, const std::string& of);

}  // namespace unbroken::cli
