#include "testing/unsynced.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "base/bytes.h"
#include "store/path.h"

namespace unbroken {
namespace {

using Held = Unsynced::Held;

bool is_below(std::string_view path, std::string_view directory) {
  if (directory.empty()) return !path.empty();
  return path.size() > directory.size() && path.starts_with(directory) && path[directory.size()] == '/';
}

bool flip(std::mt19937_64& random) { return (random() & 1) != 0; }

// What is left of bytes that were never made durable.
std::string damaged(std::string bytes, std::mt19937_64& random, Loss loss) {
  if (loss == Loss::kAll || bytes.empty()) return {};
  switch (random() % 4) {
    case 0: return bytes;
    case 1: return {};
    case 2: return bytes.substr(0, random() % bytes.size());
    default: break;
  }
  // The length is there, some blocks are not.
  for (std::size_t at = 0; at < bytes.size(); at += kDirectAlignment) {
    if (flip(random)) continue;
    const std::size_t end = std::min(bytes.size(), at + kDirectAlignment);
    std::fill(bytes.begin() + static_cast<std::ptrdiff_t>(at), bytes.begin() + static_cast<std::ptrdiff_t>(end), '\0');
  }
  return bytes;
}

}  // namespace

Result<Held> Unsynced::durable_view(std::string_view path) const {
  const auto info = store_.stat(path);
  if (!info) {
    if (info.error().code == Code::kNotFound) return Held{};
    return info.error();
  }
  if (!info->is_directory) {
    UNBROKEN_ASSIGN(std::string bytes, store_.read(path, std::numeric_limits<std::uint64_t>::max()));
    return Held{.kind = Held::Kind::kObject, .bytes = std::move(bytes), .bytes_durable = !unfinished_.contains(path)};
  }
  Held held{.kind = Held::Kind::kDirectory};
  const auto unsynced = names_.find(path);
  if (unsynced != names_.end()) {
    for (const auto& [name, before] : unsynced->second) {
      if (before.kind != Held::Kind::kNothing) held.entries.emplace(name, before);
    }
  }
  UNBROKEN_ASSIGN(const auto entries, store_.list(path));
  for (const ObjectInfo& entry : entries) {
    if (unsynced != names_.end() && unsynced->second.contains(entry.name)) continue;
    UNBROKEN_ASSIGN(Held child, durable_view(join_path(path, entry.name)));
    held.entries.emplace(entry.name, std::move(child));
  }
  return held;
}

Result<Held> Unsynced::will_change(std::string_view path) const {
  const SplitPath split = split_path(path);
  const auto names = names_.find(split.directory);
  if (names != names_.end() && names->second.contains(split.name)) return Held{};  // known from an earlier change
  return durable_view(path);
}

void Unsynced::did_make(std::string_view path) { did_change(path, Held{}); }

void Unsynced::did_change(std::string_view path, Held&& before) {
  const SplitPath split = split_path(path);
  names_[std::string(split.directory)].try_emplace(std::string(split.name), std::move(before));
}

void Unsynced::did_remove_directory(std::string_view path, Held&& before) {
  forget_below(path);
  did_change(path, std::move(before));
}

void Unsynced::did_sync_directory(std::string_view path) {
  const auto names = names_.find(path);
  if (names != names_.end()) names_.erase(names);
}

std::uint64_t Unsynced::did_begin_bytes(std::string_view path) {
  unfinished_.insert_or_assign(std::string(path), ++last_number_);
  return last_number_;
}

void Unsynced::did_finish(std::string_view path, std::uint64_t number) {
  const auto found = unfinished_.find(path);
  if (found != unfinished_.end() && found->second == number) unfinished_.erase(found);
}

void Unsynced::forget_bytes(std::string_view path) {
  const auto found = unfinished_.find(path);
  if (found != unfinished_.end()) unfinished_.erase(found);
}

void Unsynced::forget_below(std::string_view directory) {
  std::erase_if(names_,
                [&](const auto& entry) { return entry.first == directory || is_below(entry.first, directory); });
  std::erase_if(unfinished_, [&](const auto& entry) { return is_below(entry.first, directory); });
}

Status Unsynced::restore(const std::string& path, const Held& held, std::mt19937_64& random, Loss loss) {
  if (held.kind == Held::Kind::kNothing) return {};
  if (held.kind == Held::Kind::kObject) {
    const std::string bytes = held.bytes_durable ? held.bytes : damaged(held.bytes, random, loss);
    return store_.publish(path, bytes_of(bytes));
  }
  UNBROKEN_TRY(store_.make_directory(path));
  for (const auto& [name, child] : held.entries) {
    // The directory was removed entry by entry, and some of these removals may have lasted.
    if (loss == Loss::kRandom && flip(random)) continue;
    UNBROKEN_TRY(restore(join_path(path, name), child, random, loss));
  }
  return {};
}

Status Unsynced::fall_back(const std::string& path, const Held& held, std::mt19937_64& random, Loss loss) {
  const auto info = store_.stat(path);
  if (info) {
    UNBROKEN_TRY(info->is_directory ? store_.remove_directory(path) : store_.remove(path));
  } else if (info.error().code != Code::kNotFound) {
    return info.error();
  }
  return restore(path, held, random, loss);
}

Status Unsynced::lose(std::uint64_t seed, Loss loss) {
  std::mt19937_64 random(seed);
  std::vector<std::string> done;  // paths that fell back, with all that is below them
  const auto is_done = [&](std::string_view path) {
    return std::any_of(done.begin(), done.end(), [&](const auto& top) { return path == top || is_below(path, top); });
  };
  for (const auto& [directory, names] : names_) {  // parents come before what is in them
    if (is_done(directory)) continue;
    for (const auto& [name, held] : names) {
      if (loss == Loss::kRandom && flip(random)) continue;
      const std::string path = join_path(directory, name);
      UNBROKEN_TRY(fall_back(path, held, random, loss));
      done.push_back(path);
    }
  }
  for (const auto& [path, number] : unfinished_) {
    if (is_done(path)) continue;
    UNBROKEN_ASSIGN(std::string bytes, store_.read(path, std::numeric_limits<std::uint64_t>::max()));
    UNBROKEN_TRY(store_.publish(path, bytes_of(damaged(std::move(bytes), random, loss))));
  }
  names_.clear();
  unfinished_.clear();
  return {};
}

}  // namespace unbroken
