// A checkpoint in one given directory, without a run around it: what the DCP drop-ins write.
//
// It has the files and the manifest of an attempt, and the marker comes last, but no life owns it: run and life are
// empty, the generation is 0. DCP's own collectives stand where a run has its board. Here the store's root is the
// directory. Threads: any. Blocking: I/O. Errors: kAlreadyExists for a marker that is there and may not be overwritten;
// else the store's. Crash: before the marker is published the checkpoint does not exist; after it, it is whole.
// overwrite removes the old marker, durably, before anything else, so that a kill leaves the old checkpoint, none, or
// the new one.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/error.h"
#include "checkpoint/image.h"
#include "checkpoint/manifest.h"
#include "store/store.h"

namespace unbroken {

// Which marker and manifest: those of all ranks, or those of one rank that saves alone (DCP's use_collectives=False).
struct PlainNames {
  std::string marker = std::string(kMarkerName);
  std::string manifest = std::string(kManifestName);

  static PlainNames of_rank(std::uint64_t rank);
};

// Makes way, before any rank writes. Only files that a checkpoint has are removed; with a rank's own names only that
// rank's, and the marker of all ranks. For all ranks' names a marker of one rank is a checkpoint, too.
Status prepare_plain(Store& store, const PlainNames& names, bool overwrite);

// One rank's files and its part of the manifest, durable with their names.
Status write_plain_rank(Store& store, const Image& image, int threads);

struct PlainCommit {
  PlainNames names;
  std::uint64_t world_size = 1;
  std::optional<std::uint64_t> only_rank;  // the one that saves alone; the manifest then has no other's part
  std::string versions = "{}";             // JSON
};

// Reads what the ranks have written, and publishes manifest and marker.
Status commit_plain(Store& store, const PlainCommit& commit, std::string_view marker);

}  // namespace unbroken
