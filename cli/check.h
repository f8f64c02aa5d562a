// Reads every byte of an attempt against the checksums of its manifest, and finds all that differs, not just the first.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"
#include "checkpoint/catalog.h"
#include "checkpoint/plain.h"
#include "checkpoint/shard.h"
#include "store/store.h"

namespace unbroken::cli {

struct Problem {
  std::string file;         // in the attempt's directory
  std::uint64_t begin = 0;  // bytes of the file; begin = end: the file as a whole
  std::uint64_t end = 0;
  Code code = Code::kDamaged;
  std::string reason;

  // The bytes are not what was written; otherwise they could not be looked at.
  bool is_damage() const;
};

struct CheckReport {
  std::uint64_t bytes = 0;  // of shard files, read and found right
  std::uint64_t files = 0;  // shard files, right or not
  std::vector<Problem> problems;
};

// Blocks for I/O on several threads; `progress` is called from all of them. A file that is wrong in many places is one
// problem for each run of bad chunks. `names`: of the manifest and marker, which a rank that saved alone has of its
// own.
CheckReport check_every_byte(Store& store, const std::string& attempt, const PlainNames& names,
                             const Progress& progress);

}  // namespace unbroken::cli
