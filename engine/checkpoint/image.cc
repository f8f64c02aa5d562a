#include "checkpoint/image.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <mutex>
#include <nlohmann/json.hpp>

#include "base/parallel.h"
#include "store/store.h"

namespace unbroken {
namespace {

// torch.save aligns a tensor's data to 64 bytes within its archive; archives start at multiples of that, too.
constexpr std::uint64_t kArchiveAlignment = 64;
constexpr std::uint64_t kCopyPiece = 8 * kMiB;
constexpr auto kLongestStaging = std::chrono::minutes(10);

// The end record of a ZIP archive (APPNOTE.TXT, 4.3.16): a signature, 16 bytes, and the length of a comment.
constexpr std::size_t kEndRecord = 22;
constexpr std::string_view kEndSignature = "PK\x05\x06";
constexpr std::uint64_t kLongestComment = 65535;
// torch's reader looks for that record in windows of 4 KiB from the end, and fails when the record lies in a last
// window that would begin before the file does. An archive of over 8 KiB never gets there.
constexpr std::uint64_t kSmallArchive = 8 * kKiB;
constexpr std::uint64_t kLongestCommentOfSmall = 4000;

// Room for an object that takes `length` now: it may grow by a quarter, and padding stays within a ZIP comment.
std::uint64_t object_capacity(std::uint64_t length) {
  const std::uint64_t slack = std::clamp<std::uint64_t>(length / 4, 256, kLongestComment - kArchiveAlignment);
  return align_up(length + slack, kArchiveAlignment);
}

std::uint64_t longest_padding(std::uint64_t length) {
  return length < kSmallArchive ? kLongestCommentOfSmall : kLongestComment;
}

bool ends_with_plain_end_record(std::string_view archive) {
  if (archive.size() < kEndRecord) return false;
  const std::string_view record = archive.substr(archive.size() - kEndRecord);
  return record.starts_with(kEndSignature) && record[kEndRecord - 2] == '\0' && record[kEndRecord - 1] == '\0';
}

// Makes the archive that ends at `length` fill the slot: the comment's length is set, its bytes are zeros.
void pad_archive(std::span<std::byte> slot, std::uint64_t length) {
  const std::uint64_t padding = slot.size() - length;
  slot[length - 2] = static_cast<std::byte>(padding & 0xff);
  slot[length - 1] = static_cast<std::byte>(padding >> 8);
  std::memset(slot.data() + length, 0, padding);
}

}  // namespace

Result<std::size_t> ImageBuilder::add_tensor(std::string head, std::uint64_t data_length, std::string tail) {
  const std::uint64_t length = head.size() + data_length + tail.size();
  if (length > max_file_bytes_) {
    return make_error(Code::kInvalidArgument,
                      fmt::format("plan a checkpoint: a piece of {} is larger than a file may be ({})",
                                  format_bytes(length), format_bytes(max_file_bytes_)));
  }
  std::uint64_t offset = file_lengths_.empty() ? 0 : align_up(file_lengths_.back(), kArchiveAlignment);
  if (file_lengths_.empty() || offset + length > max_file_bytes_) {
    file_lengths_.push_back(0);
    offset = 0;
  }
  file_lengths_.back() = offset + length;
  const Slot slot{.offset = offset, .length = length, .data_offset = head.size(), .data_length = data_length};
  tensors_.push_back({.number = slots_,
                      .head = std::move(head),
                      .data_length = data_length,
                      .tail = std::move(tail),
                      .file = file_lengths_.size() - 1,
                      .slot = slot});
  return slots_++;
}

std::size_t ImageBuilder::add_object(std::uint64_t length) {
  object_numbers_.push_back(slots_);
  object_lengths_.push_back(length);
  return slots_++;
}

Result<Image> ImageBuilder::build(int threads) && {
  Image image;
  image.rank_ = rank_;
  image.staging_ = std::make_shared<Image::Staging>();
  std::uint64_t size = 0;
  for (const std::uint64_t length : file_lengths_) {
    image.tensor_files_.push_back({.offset = size, .length = length});
    size += align_up(length, kDirectAlignment);
  }
  UNBROKEN_ASSIGN(image.arena_, Arena::create(size, threads));
  image.places_.resize(slots_);
  for (const auto& tensor : tensors_) {
    image.places_[tensor.number] = {.file = tensor.file, .slot = tensor.slot, .is_object = false};
    image.tensor_numbers_.push_back(tensor.number);
    std::byte* const archive = image.arena().data() + image.tensor_files_[tensor.file].offset + tensor.slot.offset;
    std::memcpy(archive, tensor.head.data(), tensor.head.size());
    std::memcpy(archive + tensor.head.size() + tensor.data_length, tensor.tail.data(), tensor.tail.size());
  }
  image.object_numbers_ = object_numbers_;
  UNBROKEN_TRY(image.lay_out_objects(object_lengths_));
  return image;
}

Status Image::lay_out_objects(std::span<const std::uint64_t> lengths) {
  std::uint64_t needed = 0;
  for (const std::uint64_t length : lengths) needed += object_capacity(length);
  // First the memory, which may not be to be had, then the places in it.
  if (needed > object_memory_.bytes().size()) {
    UNBROKEN_ASSIGN(object_memory_, Arena::create(needed, 1));
  }
  std::uint64_t end = 0;
  for (std::size_t i = 0; i < object_numbers_.size(); ++i) {
    Place& place = places_[object_numbers_[i]];
    place = {.file = tensor_files_.size(),
             .slot = {.offset = end, .length = object_capacity(lengths[i]), .data_offset = 0, .data_length = 0},
             .is_object = true};
    end += place.slot.length;
  }
  object_bytes_ = end;
  return {};
}

PlacedSlot Image::slot(std::size_t number) const {
  const Place& place = places_.at(number);
  return {.file = shard_file_name(rank_, place.file), .slot = place.slot};
}

std::span<std::byte> Image::data(std::size_t number) const {
  const Place& place = places_.at(number);
  UNBROKEN_ASSERT(!place.is_object);
  return arena().subspan(tensor_files_[place.file].offset + place.slot.offset + place.slot.data_offset,
                         place.slot.data_length);
}

// How far stage() has come: everything in the arena below the mark is in its place.
struct Image::Staging {
  static constexpr const std::byte* kAll = nullptr;  // nothing is awaited

  std::mutex mutex;
  std::condition_variable moved;
  const std::byte* mark = kAll;
  bool failed = false;

  void set(const std::byte* new_mark, bool new_failed) {
    {
      const std::lock_guard lock(mutex);
      mark = new_mark;
      failed = new_failed;
    }
    moved.notify_all();
  }
};

Result<std::vector<Image::Piece>> Image::cut(std::span<const CopyIn> copies) const {
  std::vector<Piece> pieces;
  pieces.reserve(copies.size());
  for (const auto& copy : copies) {
    if (copy.slot >= places_.size() || places_[copy.slot].is_object ||
        copy.bytes != places_[copy.slot].slot.data_length) {
      return make_error(Code::kInvalidArgument,
                        fmt::format("stage a checkpoint: slot {} does not take {} bytes", copy.slot, copy.bytes));
    }
    std::byte* const to = data(copy.slot).data();
    for (std::uint64_t at = 0; at < copy.bytes; at += kCopyPiece) {
      pieces.push_back({to + at, copy.source + at, std::min(kCopyPiece, copy.bytes - at)});
    }
  }
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.to < b.to; });
  return pieces;
}

Status Image::stage(std::span<const CopyIn> copies, int threads) {
  // However this ends, who waits for the copy hears of it.
  struct Ending {
    Staging& staging;
    bool failed = true;
    ~Ending() { staging.set(Staging::kAll, failed); }
  } ending{*staging_};
  if (!usable()) {
    return make_error(Code::kInvalidArgument,
                      "stage a checkpoint: this process is a fork of the one that made the arena");
  }
  const auto pieces = cut(copies);
  if (!pieces) return pieces.error();
  // Neighbours go together, so that thousands of tiny tensors cost no more than their bytes.
  constexpr std::size_t kGroup = 64;
  std::vector<std::size_t> starts{0};
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < pieces->size(); ++i) {
    if (i - starts.back() >= kGroup || bytes >= kCopyPiece) {
      starts.push_back(i);
      bytes = 0;
    }
    bytes += (*pieces)[i].bytes;
  }
  starts.push_back(pieces->size());
  const std::size_t groups = starts.size() - 1;
  std::vector<char> done(groups, 0);
  std::size_t prefix = 0;  // guarded, like `done`, by the mutex
  Status status = parallel_for(groups, threads, [&](std::size_t group) -> Status {
    for (std::size_t i = starts[group]; i < starts[group + 1]; ++i) {
      const Piece& piece = (*pieces)[i];
      std::memcpy(piece.to, piece.from, piece.bytes);
    }
    {
      const std::lock_guard lock(staging_->mutex);
      done[group] = 1;
      if (group != prefix) return {};
      while (prefix < groups && done[prefix] != 0) ++prefix;
      if (prefix < groups && staging_->mark != Staging::kAll) staging_->mark = (*pieces)[starts[prefix]].to;
    }
    staging_->moved.notify_all();
    return {};
  });
  ending.failed = !status;
  return status;
}

void Image::begin_staging() { staging_->set(arena().data(), false); }

Status Image::await_staged(std::span<const std::byte> bytes) const {
  const std::byte* const begin = arena().data();
  const std::byte* const end = bytes.data() + bytes.size();
  const bool in_arena = !std::less<>()(bytes.data(), begin) && !std::less<>()(begin + arena().size(), end);
  std::unique_lock lock(staging_->mutex);
  const auto ready = [&] {
    return staging_->mark == Staging::kAll || !in_arena || !std::less<>()(staging_->mark, end);
  };
  if (!staging_->moved.wait_for(lock, kLongestStaging, ready)) {
    return make_error(Code::kDeadline, "write a checkpoint: the copy of the state has not come");
  }
  if (staging_->failed) return make_error(Code::kCancelled, "write a checkpoint: the state could not be copied");
  return {};
}

Result<bool> Image::place_objects(std::span<const std::string_view> archives) {
  if (!usable()) {
    return make_error(Code::kInvalidArgument,
                      "stage a checkpoint: this process is a fork of the one that made the arena");
  }
  if (archives.size() != object_numbers_.size()) {
    return make_error(Code::kInvalidArgument, fmt::format("stage a checkpoint: {} objects for {} slots",
                                                          archives.size(), object_numbers_.size()));
  }
  bool changed = false;
  std::vector<std::uint64_t> lengths;
  for (std::size_t i = 0; i < archives.size(); ++i) {
    if (!ends_with_plain_end_record(archives[i])) {
      return make_error(Code::kInvalidArgument,
                        "stage a checkpoint: an object is not an archive as torch.save writes it");
    }
    const std::uint64_t capacity = places_[object_numbers_[i]].slot.length;
    lengths.push_back(archives[i].size());
    changed =
        changed || archives[i].size() > capacity || capacity - archives[i].size() > longest_padding(archives[i].size());
  }
  if (changed) UNBROKEN_TRY(lay_out_objects(lengths));
  for (std::size_t i = 0; i < archives.size(); ++i) {
    const Slot& slot = places_[object_numbers_[i]].slot;
    const auto bytes = object_memory_.bytes().subspan(slot.offset, slot.length);
    std::memcpy(bytes.data(), archives[i].data(), archives[i].size());
    pad_archive(bytes, archives[i].size());
  }
  return changed;
}

std::string Image::object_slots() const {
  nlohmann::json slots = nlohmann::json::object();
  for (const std::size_t number : object_numbers_) {
    slots[std::to_string(number)] = {places_[number].slot.offset, places_[number].slot.length};
  }
  return slots.dump();
}

std::string Image::object_file_name() const { return shard_file_name(rank_, tensor_files_.size()); }

std::vector<Image::File> Image::files() const {
  std::vector<File> files;
  for (std::size_t i = 0; i < tensor_files_.size(); ++i) {
    const TensorFile& file = tensor_files_[i];
    files.push_back({.name = shard_file_name(rank_, i),
                     .length = file.length,
                     .bytes = arena().subspan(file.offset, align_up(file.length, kDirectAlignment)),
                     .slots = {}});
  }
  for (const std::size_t number : tensor_numbers_) files[places_[number].file].slots.push_back(places_[number].slot);
  if (!object_numbers_.empty()) {
    File file{.name = object_file_name(),
              .length = object_bytes_,
              .bytes = object_memory_.bytes().first(align_up(object_bytes_, kDirectAlignment)),
              .slots = {}};
    for (const std::size_t number : object_numbers_) file.slots.push_back(places_[number].slot);
    files.push_back(std::move(file));
  }
  return files;
}

}  // namespace unbroken
