// What a loss of power may take from a store: the changes that were made through it and not yet made durable.
//
// The rules are those of store.h: bytes are durable when their writer has finished, a name (made, replaced or removed)
// when its directory has been synced. Until then the name may fall back to what it was at the last sync: absent, an
// older object, a directory that was removed. A directory whose own name is not durable vanishes with all in it,
// however well that is synced.
//
// Kept is, for each such name, what it held at the last sync, contents included, so this is for stores of test size.
// Not thread-safe; the owner calls `will_…` before a change, `did_…` after it, with no other change in between.
#pragma once

#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <string_view>

#include "store/store.h"

namespace unbroken {

enum class Loss {
  kAll,     // nothing unsynced survives: names fall back, unfinished objects are empty
  kRandom,  // every unsynced name and byte survives or not, by chance
};

class Unsynced {
 public:
  // What one name holds.
  struct Held {
    enum class Kind { kNothing, kObject, kDirectory };
    Kind kind = Kind::kNothing;
    std::string bytes{};
    bool bytes_durable = true;
    std::map<std::string, Held> entries{};
  };

  explicit Unsynced(Store& store) : store_(store) {}

  // What `path` would fall back to; to be given to did_replace() or did_remove() once the change is made.
  Result<Held> will_change(std::string_view path) const;

  // A name that was absent is there. An object's bytes are durable only if `finished`.
  void did_make(std::string_view path);
  void did_change(std::string_view path, Held&& before);
  void did_remove_directory(std::string_view path, Held&& before);
  void did_sync_directory(std::string_view path);

  // The object's bytes are not durable until did_finish() with the same number. Numbers are never 0.
  std::uint64_t did_begin_bytes(std::string_view path);
  void did_finish(std::string_view path, std::uint64_t number);
  // The object at `path` was replaced or removed: whoever was writing it writes into nothing.
  void forget_bytes(std::string_view path);

  bool empty() const { return names_.empty() && unfinished_.empty(); }

  // Brings the store into a state that a loss of power now could leave, and starts anew from there.
  Status lose(std::uint64_t seed, Loss loss);

 private:
  using Names = std::map<std::string, Held, std::less<>>;

  Result<Held> durable_view(std::string_view path) const;
  void forget_below(std::string_view directory);
  Status fall_back(const std::string& path, const Held& held, std::mt19937_64& random, Loss loss);
  Status restore(const std::string& path, const Held& held, std::mt19937_64& random, Loss loss);

  Store& store_;
  std::map<std::string, Names, std::less<>> names_;  // by directory
  std::map<std::string, std::uint64_t, std::less<>> unfinished_;
  std::uint64_t last_number_ = 0;
};

}  // namespace unbroken
