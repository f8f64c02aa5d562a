// The image of one rank's shard files in memory. A tensor's archive lies there as torch.save would write it, its data
// left open; staging copies the tensor's bytes into that gap, and writing hands the memory to the disk: no other copy
// is made.
//
// Tensors lie in files `__<rank>_<n>.distcp` of at most max_file_bytes; objects (whole torch.save archives, whose
// length changes from save to save) in one more file, each in a slot with room to grow: the archive is padded with a
// ZIP comment, so that a slot keeps its place and `.metadata` need not change.
// Threads: one thread at a time, with two exceptions: stage() uses several inside, and a thread that writes may run
// beside it: between begin_staging() and the end of stage() it waits, in await_staged(), for what it is about to write.
// An image belongs to the process that made it and refuses to work in a forked child (kInvalidArgument). Memory: the
// tensors' archives, rounded up to 2 MiB, and the objects.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "checkpoint/arena.h"
#include "checkpoint/manifest.h"

namespace unbroken {

struct CopyIn {
  std::size_t slot = 0;
  const std::byte* source = nullptr;
  std::uint64_t bytes = 0;
};

struct PlacedSlot {
  std::string file;
  Slot slot;
};

class Image;

// Collects the slots of an image. Slots are numbered from 0 in the order in which they are added.
class ImageBuilder {
 public:
  ImageBuilder(std::uint64_t rank, std::uint64_t max_file_bytes) : rank_(rank), max_file_bytes_(max_file_bytes) {}

  // `head` and `tail` are the archive's bytes before and after the tensor's. kInvalidArgument when the archive is
  // longer than a file may be.
  Result<std::size_t> add_tensor(std::string head, std::uint64_t data_length, std::string tail);
  // `length`: what the object's archive takes now.
  std::size_t add_object(std::uint64_t length);

  // Allocates and pre-faults the memory, and writes all heads and tails. Takes what was added.
  Result<Image> build(int threads) &&;

 private:
  friend class Image;
  struct TensorArchive {
    std::size_t number = 0;
    std::string head;
    std::uint64_t data_length = 0;
    std::string tail;
    std::size_t file = 0;
    Slot slot;
  };

  std::uint64_t rank_;
  std::uint64_t max_file_bytes_;
  std::size_t slots_ = 0;
  std::vector<TensorArchive> tensors_;
  std::vector<std::uint64_t> file_lengths_;
  std::vector<std::size_t> object_numbers_;
  std::vector<std::uint64_t> object_lengths_;
};

class Image {
 public:
  struct File {
    std::string name;
    std::uint64_t length = 0;
    std::span<const std::byte> bytes;  // the file, padded with zeros to kDirectAlignment
    std::vector<Slot> slots;           // by rising offset
  };

  std::uint64_t rank() const { return rank_; }
  bool usable() const { return arena_.usable(); }
  std::span<std::byte> arena() const { return arena_.bytes(); }

  PlacedSlot slot(std::size_t number) const;
  // Where a tensor slot's data goes. Aligned to 64 bytes.
  std::span<std::byte> data(std::size_t number) const;

  // Copies with `threads` threads, by rising place. kInvalidArgument when a copy is not exactly as long as its slot's
  // data; then, and for any other error, await_staged() fails, too, until the next begin_staging().
  Status stage(std::span<const CopyIn> copies, int threads);
  // From now on await_staged() waits for stage(), which must follow. What stage() does not copy must be in its place
  // already.
  void begin_staging();
  // Waits until stage() has filled `bytes` (of files()). kCancelled when it failed, kDeadline when it does not come.
  Status await_staged(std::span<const std::byte> bytes) const;

  // Places this save's objects, one archive for each object slot in the order of their numbers. True when places
  // changed.
  Result<bool> place_objects(std::span<const std::string_view> archives);
  // JSON: {"<slot number>": [offset, length], ...}, all in object_file_name().
  std::string object_slots() const;
  std::string object_file_name() const;

  // What is to be written. Valid until the next place_objects().
  std::vector<File> files() const;

 private:
  friend class ImageBuilder;
  struct Place {
    std::size_t file = 0;
    Slot slot;
    bool is_object = false;
  };
  struct TensorFile {
    std::uint64_t offset = 0;  // in the arena
    std::uint64_t length = 0;
  };

  struct Staging;
  struct Piece {
    std::byte* to = nullptr;
    const std::byte* from = nullptr;
    std::size_t bytes = 0;
  };

  Result<std::vector<Piece>> cut(std::span<const CopyIn> copies) const;
  Status lay_out_objects(std::span<const std::uint64_t> lengths);

  std::uint64_t rank_ = 0;
  Arena arena_;
  std::vector<TensorFile> tensor_files_;
  std::vector<Place> places_;                // by slot number
  std::vector<std::size_t> tensor_numbers_;  // by rising place
  std::vector<std::size_t> object_numbers_;  // by rising place
  Arena object_memory_;
  std::uint64_t object_bytes_ = 0;
  std::shared_ptr<Staging> staging_;
};

}  // namespace unbroken
