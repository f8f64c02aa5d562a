#include "cli/check.h"

#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <thread>

#include "base/bytes.h"
#include "base/parallel.h"
#include "store/path.h"

namespace unbroken::cli {
namespace {

constexpr unsigned kMaxThreads = 8;

int thread_count() { return static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1U, kMaxThreads)); }

Problem whole_file(std::string_view file, const Error& error) {
  return {.file = std::string(file), .code = error.code, .reason = error.message};
}

// Neighbouring chunks that are bad in the same way become one range.
std::vector<Problem> merge(std::vector<Problem> chunks) {
  std::sort(chunks.begin(), chunks.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
  std::vector<Problem> merged;
  for (auto& chunk : chunks) {
    const bool goes_on = !merged.empty() && merged.back().end == chunk.begin && merged.back().code == chunk.code &&
                         chunk.code == Code::kDamaged;
    if (goes_on)
      merged.back().end = chunk.end;
    else
      merged.push_back(std::move(chunk));
  }
  for (auto& problem : merged) {
    if (problem.code == Code::kDamaged) {
      problem.reason =
          fmt::format("bytes {} to {} are not what was written (checksum differs)", problem.begin, problem.end);
    }
  }
  return merged;
}

class Check {
 public:
  Check(Store& store, AttemptReader& reader, const PlainNames& names, const Progress& progress)
      : store_(store), reader_(reader), names_(names), progress_(progress) {
    for (const auto& part : reader.manifest().parts) all_bytes_ += part.data_bytes;
  }

  CheckReport run() && {
    if (const auto metadata = reader_.metadata(); !metadata) add(whole_file(names_.marker, metadata.error()));
    for (std::uint64_t rank = 0; rank < reader_.manifest().parts.size(); ++rank) {
      if (!reader_.manifest().parts[rank].present()) continue;  // it saved nothing here
      const auto part = reader_.part(rank);
      if (!part) {
        add(whole_file(part_name(rank), part.error()));
        passed(reader_.manifest().parts[rank].data_bytes);
        continue;
      }
      for (const auto& file : (*part)->files) check_file(file);
    }
    return std::move(report_);
  }

 private:
  void add(Problem problem) { report_.problems.push_back(std::move(problem)); }

  void passed(std::uint64_t bytes) {
    const std::uint64_t done = done_bytes_.fetch_add(bytes) + bytes;
    if (progress_) progress_(done, all_bytes_);
  }

  Status check_length(const ShardFile& file) {
    const std::string path = join_path(reader_.attempt(), file.name);
    const auto info = store_.stat(path);
    if (!info) return info.error();
    if (info->size == file.length) return {};
    return make_error(Code::kDamaged,
                      fmt::format("read {}: it has {} bytes, {} were written", path, info->size, file.length));
  }

  void check_file(const ShardFile& file) {
    ++report_.files;
    if (const Status length = check_length(file); !length) {
      add(whole_file(file.name, length.error()));
      passed(file.length);
      return;
    }
    std::mutex mutex;
    std::vector<Problem> bad;
    std::atomic<std::uint64_t> good_bytes{0};
    const std::size_t chunks = (file.length + kChunkBytes - 1) / kChunkBytes;
    parallel_for(chunks, thread_count(), [&](std::size_t chunk) -> Status {
      const std::uint64_t begin = chunk * kChunkBytes;
      const std::uint64_t bytes = std::min(kChunkBytes, file.length - begin);
      thread_local std::vector<std::byte> memory(kChunkBytes);
      const ReadRange range{.file = file.name, .offset = begin, .into = std::span(memory).first(bytes)};
      if (const Status read = reader_.read(std::span(&range, 1), {.threads = 1}); read) {
        good_bytes += bytes;
      } else {
        const std::lock_guard lock(mutex);
        bad.push_back({file.name, begin, begin + bytes, read.error().code, read.error().message});
      }
      passed(bytes);
      return {};
    }).ignore("the pieces never fail: they note what they found");
    report_.bytes += good_bytes;
    for (auto& problem : merge(std::move(bad))) add(std::move(problem));
  }

  Store& store_;
  AttemptReader& reader_;
  const PlainNames& names_;
  const Progress& progress_;
  std::uint64_t all_bytes_ = 0;
  std::atomic<std::uint64_t> done_bytes_{0};
  CheckReport report_;
};

}  // namespace

bool Problem::is_damage() const {
  return code == Code::kDamaged || code == Code::kNotFound || code == Code::kIo || code == Code::kInvalidArgument;
}

CheckReport check_every_byte(Store& store, const std::string& attempt, const PlainNames& names,
                             const Progress& progress) {
  const auto reader = AttemptReader::open(store, attempt, names.manifest, names.marker);
  if (!reader) return {.problems = {whole_file(names.manifest, reader.error())}};
  return Check(store, **reader, names, progress).run();
}

}  // namespace unbroken::cli
