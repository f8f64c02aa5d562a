// Writing and reading of shard files: bytes on the way to a store are checksummed, bytes on the way back are verified.
//
// Threads: see each. Blocking: both block for I/O. Errors: those of the store, and kDamaged naming file and offset.
// Crash: a killed writer leaves garbage that no manifest lists.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "checkpoint/image.h"
#include "checkpoint/manifest.h"
#include "store/store.h"

namespace unbroken {

// Writes all files of the image and then the rank's part of the manifest into the directory, durable but for their
// names. The bytes of all go out first and are made durable together at the end: a journal is then committed once, not
// once a file.
Result<PartEntry> write_rank(Store& store, std::string_view directory, const Image& image, int threads);

// Creates a small file, bytes durable; the name is durable after its directory is synced.
Status write_small_file(Store& store, const std::string& path, std::string_view content);

// One range of a shard file and where its bytes go.
struct ReadRange {
  std::string file;
  std::uint64_t offset = 0;
  std::span<std::byte> into;
};

struct ReadOptions {
  int threads = 2;
  // No other process of this machine is about to read the same bytes: what is not in the page cache need not go through
  // it, which costs a copy and the pages of others. More threads then keep the disk busy.
  bool alone = false;
};

// Verified reads of one attempt. Any thread.
class AttemptReader {
 public:
  // Reads and checks the root of the manifest. The store must outlive the reader.
  static Result<std::unique_ptr<AttemptReader>> open(Store& store, std::string_view attempt,
                                                     std::string_view manifest_name = kManifestName,
                                                     std::string_view marker_name = kMarkerName);

  const Manifest& manifest() const { return manifest_; }
  const std::string& attempt() const { return attempt_; }

  // `.metadata`, verified.
  Result<std::string> metadata();
  // A rank's part of the manifest, verified; read once.
  Result<const RankPart*> part(std::uint64_t rank);
  // The entry of a shard file. kNotFound when the manifest lists no such file.
  Result<const ShardFile*> file(std::string_view name);

  // Fills all ranges. Every chunk that a range touches is verified before the call returns; on an error the ranges hold
  // anything.
  Status read(std::span<const ReadRange> ranges, ReadOptions options);

  // Reads every byte of every file. `progress` gets the bytes done so far and all; it is called from several threads.
  Status verify(int threads, const std::function<void(std::uint64_t, std::uint64_t)>& progress);

 private:
  AttemptReader(Store& store, std::string attempt, std::string marker_name, Manifest manifest)
      : store_(store),
        attempt_(std::move(attempt)),
        marker_name_(std::move(marker_name)),
        manifest_(std::move(manifest)) {}

  Store& store_;
  std::string attempt_;
  std::string marker_name_;
  Manifest manifest_;
  std::mutex mutex_;  // guards parts_
  std::map<std::uint64_t, RankPart> parts_;
};

// Reads a file whole and checks length and CRC32C.
Result<std::string> read_checked(Store& store, const std::string& path, std::uint64_t length, std::uint32_t crc);

}  // namespace unbroken
