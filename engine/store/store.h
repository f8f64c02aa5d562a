// A Store is a place for objects under one root: a directory, later a volume or a bucket. All of Unbroken's I/O on
// checkpoints goes through this contract; tests/conformance holds every driver to it.
//
// Paths are relative to the root, '/'-separated, without empty, "." or ".." components (kInvalidArgument otherwise);
// "" is the root itself. Nothing outside the root is reached and no symbolic link below it is followed.
//
// Threads: every method of a Store and of its readers and writers may be called from any thread, a Writer's finish()
// once and last. Blocking: all methods block for I/O. A Store outlives its readers and writers.
//
// Errors: kNotFound means that the object is known to be absent; when a store cannot tell it says kUnavailable
// (retryable). kNoSpace, kPermission, kIo name path and cause. kUnknown comes only from operations that publish
// (publish, create_whole, sync_directory): the change may or may not be there; the caller settles that by reading.
//
// Durability: "durable" means that it survives the loss of power. Bytes are durable after Writer::finish(), publish()
// or create_whole() return; *names* (an entry that was created, replaced or removed) after sync_directory() of their
// directory returns. Where Abilities::directories is false a name is durable with its bytes and sync_directory() does
// nothing. A killed process leaves what it did up to then; an unfinished writer leaves a file of any length or none;
// publish() and create_whole() leave the old state or the new one, and maybe a temporary name that list() hides.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace unbroken {

struct ObjectInfo {
  std::string name;        // the last path component
  std::uint64_t size = 0;  // bytes; 0 for a directory
  bool is_directory = false;
};

// What a place can do; found out when it is opened, by trying.
struct Abilities {
  bool create_if_absent = true;  // create_whole() lets exactly one of several callers win
  bool atomic_publish = true;    // publish() is never seen half done
  bool directories = true;       // directories exist and their entries need sync_directory()
  bool direct_io = false;        // unbuffered reads and writes work (blocks of kDirectAlignment)
};

inline constexpr std::size_t kDirectAlignment = 4096;

// One object being written. Destroyed without finish(): what was written stays as garbage, unpublished.
class Writer {
 public:
  virtual ~Writer() = default;
  // Writes at `offset`; disjoint ranges may be written by several threads at once. Fast when offset, address and
  // length are multiples of kDirectAlignment (the last block of an object may be padded: see finish).
  virtual Status write_at(std::uint64_t offset, std::span<const std::byte> bytes) = 0;
  // Cuts the object to `length` bytes and makes its bytes durable. An error condemns the object: it must not be
  // counted on, and trying again on it proves nothing.
  virtual Status finish(std::uint64_t length) = 0;
};

class Reader {
 public:
  virtual ~Reader() = default;
  virtual std::uint64_t size() const = 0;  // at the time of open
  // Fills all of `into` from `offset`; kDamaged when the object ends before that.
  virtual Status read_at(std::uint64_t offset, std::span<std::byte> into) = 0;
  // Says that this range is going to be read soon: a store that can begins to fetch it. Returns at once.
  virtual void will_need(std::uint64_t /*offset*/, std::uint64_t /*length*/) {}
  // Whether the range lies in this machine's memory already, as far as that can be known: a guess, for speed alone, as
  // reading it directly is slower then. Returns at once.
  virtual bool is_cached(std::uint64_t /*offset*/, std::uint64_t /*length*/) { return false; }
};

struct OpenOptions {
  bool direct = false;  // go round the page cache where the place can; then into, offset and length must be aligned to
                        // kDirectAlignment, except that the end of the object may come early
};

class Store {
 public:
  virtual ~Store() = default;

  virtual std::string_view url() const = 0;  // for messages; without credentials
  virtual const Abilities& abilities() const = 0;

  // A new object of about `length` bytes, for which space is reserved; its directory must exist. kAlreadyExists.
  virtual Result<std::unique_ptr<Writer>> create(std::string_view path, std::uint64_t length) = 0;
  // Puts the whole object there at once, replacing any: readers see the old one or the new one. Bytes durable, name
  // after sync_directory(). With !atomic_publish a kill can leave it torn.
  virtual Status publish(std::string_view path, std::span<const std::byte> bytes) = 0;
  // Puts the whole object there if nothing is; of several callers one wins, the others get kAlreadyExists.
  virtual Status create_whole(std::string_view path, std::span<const std::byte> bytes) = 0;

  virtual Result<std::unique_ptr<Reader>> open(std::string_view path, OpenOptions options) = 0;
  // The whole object. kInvalidArgument when it is longer than `limit` bytes.
  virtual Result<std::string> read(std::string_view path, std::uint64_t limit) = 0;
  virtual Result<ObjectInfo> stat(std::string_view path) = 0;
  // The entries of a directory, sorted by name, temporary ones hidden. kNotFound when it is absent.
  virtual Result<std::vector<ObjectInfo>> list(std::string_view path) = 0;

  // Removes an object; kNotFound when absent.
  virtual Status remove(std::string_view path) = 0;
  // Removes a directory with all that is in it; absent is no error.
  virtual Status remove_directory(std::string_view path) = 0;
  // Makes a directory and its parents; an existing one is no error; a file in the way is kInvalidArgument, named.
  virtual Status make_directory(std::string_view path) = 0;
  // Makes the entries of a directory durable.
  virtual Status sync_directory(std::string_view path) = 0;

  // Free bytes for ordinary users, or UINT64_MAX where that cannot be known.
  virtual Result<std::uint64_t> free_bytes() = 0;
};

struct StoreOptions {
  bool create = false;  // make the root (and make its name durable) when it is absent; otherwise absent is kNotFound
};

// Opens "/path", "relative/path" or "file:///path". Other schemes: kUnsupported, naming those that are known.
Result<std::unique_ptr<Store>> open_store(std::string_view url, StoreOptions options);

}  // namespace unbroken
