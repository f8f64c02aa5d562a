#include "store/memory/memory_store.h"

#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>

#include "base/bytes.h"
#include "store/path.h"
#include "store/ranges.h"

namespace unbroken {
namespace {

using Object = MemoryStore::Object;

Error not_found(std::string_view action, std::string_view path) {
  return make_error(Code::kNotFound, fmt::format("{} {}: it does not exist", action, path));
}

Error invalid(std::string_view action, std::string_view path, std::string_view cause) {
  return make_error(Code::kInvalidArgument, fmt::format("{} {}: {}", action, path, cause));
}

std::shared_ptr<Object> object_of(std::span<const std::byte> bytes) {
  auto object = std::make_shared<Object>();
  object->bytes = text_of(bytes);
  return object;
}

bool is_below(std::string_view path, std::string_view directory) {
  return path.size() > directory.size() && path.starts_with(directory) && path[directory.size()] == '/';
}

class MemoryWriter final : public Writer {
 public:
  MemoryWriter(std::string path, std::shared_ptr<Object> object) : path_(std::move(path)), object_(std::move(object)) {}

  Status write_at(std::uint64_t offset, std::span<const std::byte> bytes) override {
    UNBROKEN_TRY(check_range("write", path_, offset, bytes.size()));
    if (finished_.load()) return invalid("write", path_, "the object was finished already");
    const std::lock_guard lock(object_->mutex);
    std::string& content = object_->bytes;
    content.resize(std::max<std::uint64_t>(content.size(), offset + bytes.size()));
    if (!bytes.empty()) std::memcpy(content.data() + offset, bytes.data(), bytes.size());
    return {};
  }

  Status finish(std::uint64_t length) override {
    if (finished_.exchange(true)) return invalid("finish", path_, "the object was finished already");
    const std::lock_guard lock(object_->mutex);
    object_->bytes.resize(length);
    return {};
  }

 private:
  const std::string path_;
  const std::shared_ptr<Object> object_;
  std::atomic<bool> finished_{false};
};

class MemoryReader final : public Reader {
 public:
  MemoryReader(std::string path, std::shared_ptr<Object> object, OpenOptions options)
      : path_(std::move(path)), object_(std::move(object)), options_(options) {
    const std::lock_guard lock(object_->mutex);
    size_ = object_->bytes.size();
  }

  std::uint64_t size() const override { return size_; }

  Status read_at(std::uint64_t offset, std::span<std::byte> into) override {
    UNBROKEN_ASSIGN(const std::size_t wanted, bytes_to_read(path_, options_.direct, size_, offset, into));
    if (wanted == 0) return {};
    const std::lock_guard lock(object_->mutex);
    const std::string& content = object_->bytes;
    if (content.size() < offset + wanted) return ends_early(path_, offset + wanted, content.size());
    std::memcpy(into.data(), content.data() + offset, wanted);
    return {};
  }

 private:
  const std::string path_;
  const std::shared_ptr<Object> object_;
  const OpenOptions options_;
  std::uint64_t size_ = 0;
};

}  // namespace

Status MemoryStore::check_parent(std::string_view action, std::string_view path) const {
  UNBROKEN_TRY(check_path_below_root(action, path));
  for (std::string_view parent = split_path(path).directory; !is_directory(parent);
       parent = split_path(parent).directory) {
    if (objects_.contains(parent)) return invalid(action, path, fmt::format("{} is not a directory", parent));
    if (is_directory(split_path(parent).directory)) return not_found(action, path);
  }
  return {};
}

Result<std::shared_ptr<Object>> MemoryStore::find(std::string_view action, std::string_view path) const {
  UNBROKEN_TRY(check_parent(action, path));
  if (is_directory(path)) return invalid(action, path, "it is a directory");
  const auto found = objects_.find(path);
  if (found == objects_.end()) return not_found(action, path);
  return found->second;
}

Result<std::unique_ptr<Writer>> MemoryStore::create(std::string_view path, std::uint64_t /*length*/) {
  const std::lock_guard lock(mutex_);
  UNBROKEN_TRY(check_parent("create", path));
  auto object = std::make_shared<Object>();
  if (is_directory(path) || !objects_.try_emplace(std::string(path), object).second) {
    return make_error(Code::kAlreadyExists, fmt::format("create {}: it exists", path));
  }
  return std::make_unique<MemoryWriter>(std::string(path), std::move(object));
}

Status MemoryStore::publish(std::string_view path, std::span<const std::byte> bytes) {
  const std::lock_guard lock(mutex_);
  UNBROKEN_TRY(check_parent("publish", path));
  if (is_directory(path)) return invalid("publish", path, "it is a directory");
  objects_.insert_or_assign(std::string(path), object_of(bytes));
  return {};
}

Status MemoryStore::create_whole(std::string_view path, std::span<const std::byte> bytes) {
  const std::lock_guard lock(mutex_);
  UNBROKEN_TRY(check_parent("create", path));
  if (is_directory(path) || !objects_.try_emplace(std::string(path), object_of(bytes)).second) {
    return make_error(Code::kAlreadyExists, fmt::format("create {}: it exists", path));
  }
  return {};
}

Result<std::unique_ptr<Reader>> MemoryStore::open(std::string_view path, OpenOptions options) {
  const std::lock_guard lock(mutex_);
  UNBROKEN_ASSIGN(auto object, find("open", path));
  return std::make_unique<MemoryReader>(std::string(path), std::move(object), options);
}

Result<std::string> MemoryStore::read(std::string_view path, std::uint64_t limit) {
  const std::lock_guard lock(mutex_);
  UNBROKEN_ASSIGN(const auto object, find("read", path));
  const std::lock_guard object_lock(object->mutex);
  if (object->bytes.size() > limit) {
    return invalid("read", path,
                   fmt::format("it has {} bytes, more than the {} that are allowed", object->bytes.size(), limit));
  }
  return object->bytes;
}

Result<ObjectInfo> MemoryStore::stat(std::string_view path) {
  UNBROKEN_TRY(check_path("stat", path));
  const std::lock_guard lock(mutex_);
  if (is_directory(path)) return ObjectInfo{.name = std::string(split_path(path).name), .is_directory = true};
  UNBROKEN_ASSIGN(const auto object, find("stat", path));
  const std::lock_guard object_lock(object->mutex);
  return ObjectInfo{.name = std::string(split_path(path).name), .size = object->bytes.size()};
}

Result<std::vector<ObjectInfo>> MemoryStore::list(std::string_view path) {
  UNBROKEN_TRY(check_path("list", path));
  const std::lock_guard lock(mutex_);
  if (!is_directory(path)) {
    UNBROKEN_TRY(check_parent("list", path));
    if (objects_.contains(path)) return invalid("list", path, "it is not a directory");
    return not_found("list", path);
  }
  std::vector<ObjectInfo> infos;
  for (const std::string& directory : directories_) {
    const SplitPath split = split_path(directory);
    if (split.directory == path) infos.push_back({.name = std::string(split.name), .is_directory = true});
  }
  for (const auto& [name, object] : objects_) {
    const SplitPath split = split_path(name);
    if (split.directory != path) continue;
    const std::lock_guard object_lock(object->mutex);
    infos.push_back({.name = std::string(split.name), .size = object->bytes.size()});
  }
  std::sort(infos.begin(), infos.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  return infos;
}

Status MemoryStore::remove(std::string_view path) {
  const std::lock_guard lock(mutex_);
  UNBROKEN_TRY(find("remove", path));
  objects_.erase(objects_.find(path));
  return {};
}

Status MemoryStore::remove_directory(std::string_view path) {
  const std::lock_guard lock(mutex_);
  if (Status parent = check_parent("remove directory", path); !parent) {
    if (parent.error().code == Code::kNotFound) return {};
    return parent;
  }
  if (objects_.contains(path)) return invalid("remove directory", path, "it is not a directory");
  std::erase_if(objects_, [&](const auto& entry) { return is_below(entry.first, path); });
  std::erase_if(directories_, [&](const auto& name) { return name == path || is_below(name, path); });
  return {};
}

Status MemoryStore::make_directory(std::string_view path) {
  UNBROKEN_TRY(check_path("make directory", path));
  const std::lock_guard lock(mutex_);
  for (std::string_view rest = path; !rest.empty(); rest = split_path(rest).directory) {
    if (objects_.contains(rest)) {
      return invalid("make directory", path, fmt::format("{} is there and is not a directory", rest));
    }
  }
  for (std::string_view rest = path; !rest.empty(); rest = split_path(rest).directory) directories_.emplace(rest);
  return {};
}

Status MemoryStore::sync_directory(std::string_view path) {
  UNBROKEN_TRY(check_path("sync directory", path));
  const std::lock_guard lock(mutex_);
  if (is_directory(path)) return {};
  UNBROKEN_TRY(check_parent("sync directory", path));
  if (objects_.contains(path)) return invalid("sync directory", path, "it is not a directory");
  return not_found("sync directory", path);
}

Result<std::uint64_t> MemoryStore::free_bytes() { return std::numeric_limits<std::uint64_t>::max(); }

}  // namespace unbroken
