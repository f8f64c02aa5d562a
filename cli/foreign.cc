#include "cli/foreign.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <string_view>

#include "checkpoint/manifest.h"
#include "checkpoint/plain.h"
#include "store/path.h"

namespace unbroken::cli {
namespace {

constexpr std::string_view kRankPrefix = "__";
constexpr std::string_view kShardSuffix = ".distcp";
constexpr std::uint8_t kPickleProtocol = 0x80;  // the first byte of a pickle of protocol 2 and up
constexpr std::uint8_t kPickleStop = '.';       // its last one
constexpr std::uint8_t kNewestPickle = 5;
constexpr std::array<std::uint8_t, 4> kArchiveBegin = {'P', 'K', 3, 4};  // a local file header, APPNOTE.TXT 4.3.7
constexpr std::array<std::uint8_t, 4> kEndRecord = {'P', 'K', 5, 6};     // end of central directory, 4.3.16
constexpr std::uint64_t kEndRecordBytes = 22;                            // without its comment
constexpr std::uint64_t kCommentBytes = 0xFFFF;                          // of its comment at most

using Bytes = std::vector<std::uint8_t>;

std::optional<std::uint64_t> rank_of_marker(std::string_view name) {
  if (!name.starts_with(kRankPrefix) || !name.ends_with(kMarkerName)) return std::nullopt;
  const std::string digits(name.substr(kRankPrefix.size(), name.size() - kRankPrefix.size() - kMarkerName.size()));
  std::uint64_t rank = 0;
  const char* end = digits.data() + digits.size();
  const auto [parsed, error] = std::from_chars(digits.data(), end, rank);
  const bool whole = !digits.empty() && error == std::errc() && parsed == end;
  return whole && PlainNames::of_rank(rank).marker == name ? std::optional(rank) : std::nullopt;
}

Result<Bytes> read_bytes(Reader& reader, std::uint64_t offset, std::uint64_t length) {
  Bytes bytes(length);
  UNBROKEN_TRY(reader.read_at(offset, std::as_writable_bytes(std::span(bytes))));
  return bytes;
}

Error cut_off(const std::string& path, std::string_view what) {
  return make_error(Code::kDamaged, fmt::format("read {}: {}; it was cut off or written over", path, what));
}

Status check_pickle(Store& store, const std::string& path) {
  UNBROKEN_ASSIGN(const auto reader, store.open(path, {}));
  if (reader->size() < 3) return cut_off(path, fmt::format("it has {} bytes", reader->size()));
  UNBROKEN_ASSIGN(const Bytes begin, read_bytes(*reader, 0, 2));
  UNBROKEN_ASSIGN(const Bytes end, read_bytes(*reader, reader->size() - 1, 1));
  if (begin[0] != kPickleProtocol || begin[1] > kNewestPickle) return cut_off(path, "it does not begin as a pickle");
  if (end[0] != kPickleStop) return cut_off(path, "it does not end as a pickle");
  return {};
}

// Whether the bytes end with an end record, of which the comment, if any, is the very end.
bool ends_an_archive(const Bytes& tail) {
  for (std::size_t at = tail.size() - kEndRecordBytes + 1; at-- > 0;) {
    if (!std::equal(kEndRecord.begin(), kEndRecord.end(), tail.begin() + static_cast<std::ptrdiff_t>(at))) continue;
    const std::size_t comment = tail[at + 20] + std::size_t{tail[at + 21]} * 256;
    if (at + kEndRecordBytes + comment == tail.size()) return true;
  }
  return false;
}

// True when it is an archive; false when it is something else, of which nothing can be said.
Result<bool> check_archives(Store& store, const std::string& path) {
  UNBROKEN_ASSIGN(const auto reader, store.open(path, {}));
  const std::uint64_t size = reader->size();
  if (size == 0) return true;  // of a rank that had nothing to write
  UNBROKEN_ASSIGN(const Bytes begin, read_bytes(*reader, 0, std::min<std::uint64_t>(size, kArchiveBegin.size())));
  if (!std::equal(begin.begin(), begin.end(), kArchiveBegin.begin())) return false;
  const std::uint64_t length = std::min(size, kEndRecordBytes + kCommentBytes);
  UNBROKEN_ASSIGN(const Bytes tail, read_bytes(*reader, size - length, length));
  if (length < kEndRecordBytes || !ends_an_archive(tail)) {
    return cut_off(path, "its last archive does not end");
  }
  return true;
}

}  // namespace

Result<std::vector<RankMarker>> markers_of_ranks(Store& store, const std::string& directory) {
  UNBROKEN_ASSIGN(const auto entries, store.list(directory));
  std::vector<RankMarker> markers;
  for (const auto& entry : entries) {
    const auto rank = entry.is_directory ? std::nullopt : rank_of_marker(entry.name);
    if (!rank) continue;
    const std::string manifest = PlainNames::of_rank(*rank).manifest;
    const bool has_manifest =
        std::any_of(entries.begin(), entries.end(), [&](const auto& other) { return other.name == manifest; });
    markers.push_back({.rank = *rank, .has_manifest = has_manifest});
  }
  std::sort(markers.begin(), markers.end(), [](const auto& a, const auto& b) { return a.rank < b.rank; });
  return markers;
}

FormReport check_form(Store& store, const std::string& directory, const std::string& marker, const std::string& of) {
  FormReport report;
  const auto add = [&](std::string_view file, const Error& error) {
    report.problems.push_back({.file = std::string(file), .code = error.code, .reason = error.message});
  };
  if (const Status status = check_pickle(store, join_path(directory, marker)); !status) add(marker, status.error());
  const auto entries = store.list(directory);
  if (!entries) {
    add(directory, entries.error());
    return report;
  }
  for (const auto& entry : *entries) {
    if (entry.is_directory || !entry.name.starts_with(of) || !entry.name.ends_with(kShardSuffix)) continue;
    ++report.files;
    report.bytes += entry.size;
    const auto known = check_archives(store, join_path(directory, entry.name));
    if (!known) add(entry.name, known.error());
    if (known && !*known) ++report.unknown;
  }
  return report;
}

}  // namespace unbroken::cli
