#include "checkpoint/shard.h"

#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstring>
#include <functional>
#include <optional>

#include "base/crash_point.h"
#include "base/crc32c.h"
#include "base/parallel.h"
#include "checkpoint/arena.h"
#include "checkpoint/patience.h"

namespace unbroken {
namespace {

constexpr std::uint64_t chunk_count(std::uint64_t length) { return (length + kChunkBytes - 1) / kChunkBytes; }

// Files whose bytes are written and not yet durable. Few at a time, so that descriptors stay bounded.
class Unfinished {
 public:
  Status add(std::unique_ptr<Writer> writer, std::uint64_t length) {
    files_.emplace_back(std::move(writer), length);
    return files_.size() < kMostOpen ? Status() : finish();
  }
  Status finish() {
    for (const auto& [writer, length] : files_) UNBROKEN_TRY(writer->finish(length));
    files_.clear();
    return {};
  }

 private:
  static constexpr std::size_t kMostOpen = 16;
  std::vector<std::pair<std::unique_ptr<Writer>, std::uint64_t>> files_;
};

Result<ShardFile> write_file(Store& store, std::string_view directory, const Image::File& file, int threads,
                             const Image& image, Unfinished& unfinished) {
  const std::string path = join_path(directory, file.name);
  UNBROKEN_ASSIGN(auto writer, store.create(path, file.length));
  ShardFile entry{.name = file.name, .length = file.length, .chunk_crcs = {}, .slots = file.slots};
  entry.chunk_crcs.resize(chunk_count(file.length));
  UNBROKEN_TRY(parallel_for(entry.chunk_crcs.size(), threads, [&](std::size_t chunk) -> Status {
    const std::uint64_t offset = chunk * kChunkBytes;
    const std::uint64_t bytes = std::min(kChunkBytes, file.length - offset);
    // Whole blocks go out; finish() cuts the padding off.
    const auto blocks = file.bytes.subspan(offset, align_up(bytes, kDirectAlignment));
    UNBROKEN_TRY(image.await_staged(blocks));
    UNBROKEN_TRY(writer->write_at(offset, blocks));
    // After the write, so that the disk is busy before the processor is.
    entry.chunk_crcs[chunk] = crc32c(file.bytes.subspan(offset, bytes));
    return {};
  }));
  UNBROKEN_TRY(unfinished.add(std::move(writer), file.length));
  return entry;
}

// A piece of a chunk that a caller wants: where it begins in the chunk, and where it goes.
struct Piece {
  std::uint64_t offset = 0;
  std::span<std::byte> into;
};

// An open shard file: by way of the page cache and, where that is wanted, round it.
struct OpenShard {
  const ShardFile* file = nullptr;
  std::unique_ptr<Reader> reader;
  std::unique_ptr<Reader> direct;
};

struct ChunkRead {
  const OpenShard* shard = nullptr;
  std::uint64_t chunk = 0;
  std::vector<Piece> pieces;

  std::uint64_t begin() const { return chunk * kChunkBytes; }  // in the file
  std::uint64_t bytes() const { return std::min(kChunkBytes, shard->file->length - begin()); }
};

// So many chunks are being fetched while one is read: what keeps a disk busy that answers many requests at once.
constexpr std::size_t kChunksAhead = 6;
// So many read at a time round the page cache: while some copy to where the bytes go, the others keep the disk busy.
constexpr int kThreadsAlone = 4;
// A block is checksummed right after it was read, while it is in the processor's cache.
constexpr std::uint64_t kBlockBytes = 512 * kKiB;
// Shorter pieces go through a buffer, many at once: a system call costs more than copying them does.
constexpr std::uint64_t kStraightBytes = 64 * kKiB;

// Memory for one block, reused by a thread from call to call.
std::span<std::byte> bounce_buffer() {
  thread_local const auto memory = std::make_unique_for_overwrite<std::byte[]>(kBlockBytes);
  return {memory.get(), kBlockBytes};
}

// Memory for one chunk, in huge pages: of small ones a disk takes only so many in a request.
Result<std::span<std::byte>> chunk_buffer() {
  thread_local Arena memory;
  if (!memory.usable()) {
    UNBROKEN_ASSIGN(memory, Arena::create(kChunkBytes, 1));
  }
  return memory.bytes();
}

// Reads a chunk in order, each byte once: long pieces straight to where they go, and what lies between them through a
// buffer. Round the page cache all of it goes through a buffer, in one request, as the disk wants it. Pieces may
// overlap, as the targets of tied tensors do.
class ChunkReading {
 public:
  explicit ChunkReading(ChunkRead& task)
      : task_(task),
        direct_(task.shard->direct != nullptr && !task.shard->reader->is_cached(task.begin(), task.bytes())),
        reader_(direct_ ? *task.shard->direct : *task.shard->reader) {
    std::ranges::sort(task.pieces, {}, &Piece::offset);
  }

  // The checksum of the chunk's `bytes` bytes.
  Result<std::uint32_t> run(std::uint64_t bytes) {
    std::span<std::byte> whole;
    if (direct_) {
      UNBROKEN_ASSIGN(whole, chunk_buffer());
      UNBROKEN_TRY(fetch(0, whole.first(align_up(bytes, kDirectAlignment))));
    }
    while (at_ < bytes) {
      while (first_ < task_.pieces.size() && end_of(task_.pieces[first_]) <= at_) ++first_;
      const std::uint64_t end = std::min(bytes, at_ + kBlockBytes);
      if (direct_) {
        take(whole.subspan(at_, end - at_), nullptr);
      } else {
        UNBROKEN_TRY(step(end));
      }
    }
    return crc_;
  }

 private:
  static std::uint64_t end_of(const Piece& piece) { return piece.offset + piece.into.size(); }

  Status fetch(std::uint64_t at, std::span<std::byte> memory) {
    return read_patiently([&] { return reader_.read_at(task_.begin() + at, memory); });
  }

  // Reads one block, which ends at `end` at the latest.
  Status step(std::uint64_t end) {
    for (std::size_t i = first_; i < task_.pieces.size() && task_.pieces[i].offset < end; ++i) {
      const Piece& piece = task_.pieces[i];
      if (piece.into.size() < kStraightBytes || end_of(piece) <= at_) continue;
      if (piece.offset > at_) {
        end = piece.offset;
        break;
      }
      const auto target = piece.into.subspan(at_ - piece.offset, std::min(end, end_of(piece)) - at_);
      UNBROKEN_TRY(fetch(at_, target));
      take(target, &piece);
      return {};
    }
    const auto buffer = bounce_buffer().first(end - at_);
    UNBROKEN_TRY(fetch(at_, buffer));
    take(buffer, nullptr);
    return {};
  }

  // `block` comes next in the chunk. `target`: the piece whose memory it is.
  void take(std::span<const std::byte> block, const Piece* target) {
    crc_ = crc32c(block, crc_);
    const std::uint64_t end = at_ + block.size();
    for (std::size_t i = first_; i < task_.pieces.size() && task_.pieces[i].offset < end; ++i) {
      const Piece& piece = task_.pieces[i];
      const std::uint64_t from = std::max(at_, piece.offset);
      const std::uint64_t to = std::min(end, end_of(piece));
      if (&piece == target || from >= to) continue;
      std::memcpy(piece.into.data() + (from - piece.offset), block.data() + (from - at_), to - from);
    }
    at_ = end;
  }

  ChunkRead& task_;
  const bool direct_;
  Reader& reader_;
  std::uint64_t at_ = 0;   // in the chunk
  std::size_t first_ = 0;  // pieces before it are full
  std::uint32_t crc_ = 0;
};

Status read_chunk(ChunkRead& task, std::string_view attempt) {
  UNBROKEN_ASSIGN(const std::uint32_t crc, ChunkReading(task).run(task.bytes()));
  const ShardFile& file = *task.shard->file;
  if (crc != file.chunk_crcs[task.chunk]) {
    return make_error(Code::kDamaged,
                      fmt::format("read {}: bytes {} to {} are not what was written (checksum differs)",
                                  join_path(attempt, file.name), task.begin(), task.begin() + task.bytes()));
  }
  return {};
}

// Reads all, in order, and calls `done` with the bytes of each from the thread that read it.
Status read_chunks(std::span<ChunkRead> tasks, std::string_view attempt, ReadOptions options,
                   const std::function<void(std::uint64_t)>& done) {
  const auto announce = [&](std::size_t i) {
    if (i >= tasks.size() || tasks[i].shard->direct != nullptr) return;
    tasks[i].shard->reader->will_need(tasks[i].begin(), tasks[i].bytes());
  };
  for (std::size_t i = 0; i < kChunksAhead; ++i) announce(i);
  const int threads = options.alone ? std::max(options.threads, kThreadsAlone) : options.threads;
  return parallel_for(tasks.size(), threads, [&](std::size_t i) -> Status {
    announce(i + kChunksAhead);
    UNBROKEN_TRY(read_chunk(tasks[i], attempt));
    done(tasks[i].bytes());
    return {};
  });
}

Result<OpenShard> open_shard(Store& store, std::string_view attempt, const ShardFile& file, bool alone) {
  const std::string path = join_path(attempt, file.name);
  OpenShard shard{.file = &file, .reader = nullptr, .direct = nullptr};
  UNBROKEN_ASSIGN(shard.reader, read_patiently([&] { return store.open(path, {}); }));
  if (shard.reader->size() != file.length) {
    return make_error(Code::kDamaged, fmt::format("read {}: it has {} bytes, {} were written", path,
                                                  shard.reader->size(), file.length));
  }
  if (alone && store.abilities().direct_io) {
    UNBROKEN_ASSIGN(shard.direct, read_patiently([&] { return store.open(path, {.direct = true}); }));
  }
  return shard;
}

std::optional<std::uint64_t> rank_of_file(std::string_view name) {
  std::uint64_t rank = 0;
  if (!name.starts_with("__")) return std::nullopt;
  const char* end = name.data() + name.size();
  const auto [at, error] = std::from_chars(name.data() + 2, end, rank);
  if (error != std::errc() || at == end || *at != '_') return std::nullopt;
  return rank;
}

}  // namespace

Result<PartEntry> write_rank(Store& store, std::string_view directory, const Image& image, int threads) {
  if (!image.usable()) {
    return make_error(Code::kInvalidArgument,
                      "write a checkpoint: this process is a fork of the one that made the arena");
  }
  RankPart part{.rank = image.rank(), .files = {}};
  PartEntry entry;
  Unfinished unfinished;
  for (const auto& file : image.files()) {
    UNBROKEN_ASSIGN(auto written, write_file(store, directory, file, threads, image, unfinished));
    entry.data_bytes += written.length;
    part.files.push_back(std::move(written));
  }
  UNBROKEN_CRASH_POINT("commit.2.shards_written");
  const std::string document = encode(part);
  if (document.size() > kMaxJsonBytes) {
    return make_error(Code::kUnsupported, fmt::format("write {}: {} are more than can be read again",
                                                      part_name(image.rank()), format_bytes(document.size())));
  }
  entry.length = document.size();
  entry.crc = crc32c(bytes_of(document));
  UNBROKEN_ASSIGN(auto writer, store.create(join_path(directory, part_name(image.rank())), document.size()));
  UNBROKEN_TRY(writer->write_at(0, bytes_of(document)));
  UNBROKEN_TRY(unfinished.add(std::move(writer), document.size()));
  UNBROKEN_TRY(unfinished.finish());
  UNBROKEN_CRASH_POINT("commit.2.part_written");
  return entry;
}

Status write_small_file(Store& store, const std::string& path, std::string_view content) {
  UNBROKEN_ASSIGN(const auto writer, store.create(path, content.size()));
  UNBROKEN_TRY(writer->write_at(0, bytes_of(content)));
  return writer->finish(content.size());
}

Result<std::string> read_checked(Store& store, const std::string& path, std::uint64_t length, std::uint32_t crc) {
  UNBROKEN_ASSIGN(const auto info, read_patiently([&] { return store.stat(path); }));
  if (info.size != length) {
    return make_error(Code::kDamaged,
                      fmt::format("read {}: it has {} bytes, {} were written", path, info.size, length));
  }
  UNBROKEN_ASSIGN(std::string content, read_patiently([&] { return store.read(path, length); }));
  if (content.size() != length || crc32c(bytes_of(content)) != crc) {
    return make_error(Code::kDamaged, fmt::format("read {}: the checksum differs from what was written", path));
  }
  return content;
}

Result<std::unique_ptr<AttemptReader>> AttemptReader::open(Store& store, std::string_view attempt,
                                                           std::string_view manifest_name,
                                                           std::string_view marker_name) {
  const std::string path = join_path(attempt, manifest_name);
  UNBROKEN_ASSIGN(const std::string document, read_patiently([&] { return store.read(path, kMaxJsonBytes); }));
  UNBROKEN_ASSIGN(Manifest manifest, decode_manifest(document, path));
  return std::unique_ptr<AttemptReader>(
      new AttemptReader(store, std::string(attempt), std::string(marker_name), std::move(manifest)));
}

Result<std::string> AttemptReader::metadata() {
  return read_checked(store_, join_path(attempt_, marker_name_), manifest_.metadata_length, manifest_.metadata_crc);
}

Result<const RankPart*> AttemptReader::part(std::uint64_t rank) {
  const std::lock_guard lock(mutex_);
  if (const auto found = parts_.find(rank); found != parts_.end()) return &found->second;
  if (rank >= manifest_.parts.size() || !manifest_.parts[rank].present()) {
    return make_error(Code::kNotFound, fmt::format("read {}: there is no rank {} in it", attempt_, rank));
  }
  const std::string path = join_path(attempt_, part_name(rank));
  const PartEntry& entry = manifest_.parts[rank];
  UNBROKEN_ASSIGN(const std::string document, read_checked(store_, path, entry.length, entry.crc));
  UNBROKEN_ASSIGN(RankPart part, decode_part(document, path));
  if (part.rank != rank)
    return make_error(Code::kDamaged, fmt::format("read {}: it is the part of rank {}", path, part.rank));
  for (const auto& file : part.files) {
    if (rank_of_file(file.name) != rank) {
      return make_error(Code::kDamaged, fmt::format("read {}: it lists {}, which is not this rank's", path, file.name));
    }
  }
  return &parts_.emplace(rank, std::move(part)).first->second;
}

Result<const ShardFile*> AttemptReader::file(std::string_view name) {
  const auto rank = rank_of_file(name);
  if (!rank)
    return make_error(Code::kNotFound, fmt::format("read {}: {} is not the name of a shard file", attempt_, name));
  UNBROKEN_ASSIGN(const RankPart* part, this->part(*rank));
  for (const auto& file : part->files) {
    if (file.name == name) return &file;
  }
  return make_error(Code::kNotFound, fmt::format("read {}: the manifest does not list {}", attempt_, name));
}

Status AttemptReader::read(std::span<const ReadRange> ranges, ReadOptions options) {
  struct Wanted {
    OpenShard shard;
    std::map<std::uint64_t, std::vector<Piece>> chunks;
  };
  std::map<std::string_view, Wanted> files;
  for (const auto& range : ranges) {
    auto& [shard, chunks] = files[range.file];
    if (shard.file == nullptr) {
      UNBROKEN_ASSIGN(const ShardFile* listed, file(range.file));
      UNBROKEN_ASSIGN(shard, open_shard(store_, attempt_, *listed, options.alone));
    }
    const std::uint64_t length = shard.file->length;
    if (range.into.size() > length || range.offset > length - range.into.size()) {
      return make_error(Code::kDamaged, fmt::format("read {}: bytes {} to {} lie outside the file ({} bytes)",
                                                    join_path(attempt_, range.file), range.offset,
                                                    range.offset + range.into.size(), length));
    }
    for (std::uint64_t done = 0; done < range.into.size();) {
      const std::uint64_t at = range.offset + done;
      const std::uint64_t bytes = std::min(kChunkBytes - at % kChunkBytes, range.into.size() - done);
      chunks[at / kChunkBytes].push_back({at % kChunkBytes, range.into.subspan(done, bytes)});
      done += bytes;
    }
  }
  std::vector<ChunkRead> tasks;
  for (auto& [name, wanted] : files) {
    for (auto& [chunk, pieces] : wanted.chunks) tasks.push_back({&wanted.shard, chunk, std::move(pieces)});
  }
  return read_chunks(tasks, attempt_, options, [](std::uint64_t) {});
}

Status AttemptReader::verify(int threads, const std::function<void(std::uint64_t, std::uint64_t)>& progress) {
  if (auto content = metadata(); !content) return std::move(content).error();
  std::uint64_t total = 0;
  for (const auto& entry : manifest_.parts) total += entry.data_bytes;
  std::atomic<std::uint64_t> done{0};
  for (std::uint64_t rank = 0; rank < manifest_.parts.size(); ++rank) {
    if (!manifest_.parts[rank].present()) continue;
    UNBROKEN_ASSIGN(const RankPart* part, this->part(rank));
    for (const auto& file : part->files) {
      UNBROKEN_ASSIGN(const OpenShard shard, open_shard(store_, attempt_, file, true));
      std::vector<ChunkRead> tasks;
      for (std::uint64_t chunk = 0; chunk < chunk_count(file.length); ++chunk) tasks.push_back({&shard, chunk, {}});
      UNBROKEN_TRY(read_chunks(tasks, attempt_, {.threads = threads, .alone = true}, [&](std::uint64_t bytes) {
        const std::uint64_t now = done.fetch_add(bytes) + bytes;
        if (progress) progress(now, total);
      }));
    }
  }
  return {};
}

}  // namespace unbroken
