// A Store (store.h) in memory, for tests. Owns its objects; they are gone with it. Nothing is lost before that: all is
// durable at once, and losing what was not synced is the business of the fault store around it.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "store/store.h"

namespace unbroken {

class MemoryStore final : public Store {
 public:
  std::string_view url() const override { return "memory:"; }
  const Abilities& abilities() const override { return abilities_; }

  Result<std::unique_ptr<Writer>> create(std::string_view path, std::uint64_t length) override;
  Status publish(std::string_view path, std::span<const std::byte> bytes) override;
  Status create_whole(std::string_view path, std::span<const std::byte> bytes) override;
  Result<std::unique_ptr<Reader>> open(std::string_view path, OpenOptions options) override;
  Result<std::string> read(std::string_view path, std::uint64_t limit) override;
  Result<ObjectInfo> stat(std::string_view path) override;
  Result<std::vector<ObjectInfo>> list(std::string_view path) override;
  Status remove(std::string_view path) override;
  Status remove_directory(std::string_view path) override;
  Status make_directory(std::string_view path) override;
  Status sync_directory(std::string_view path) override;
  Result<std::uint64_t> free_bytes() override;

  struct Object {
    std::mutex mutex;
    std::string bytes;
  };

 private:
  // With mutex_ held. The parent must be a directory; the path itself may be anything.
  Status check_parent(std::string_view action, std::string_view path) const;
  // With mutex_ held. The object at `path`.
  Result<std::shared_ptr<Object>> find(std::string_view action, std::string_view path) const;
  bool is_directory(std::string_view path) const { return path.empty() || directories_.contains(path); }

  const Abilities abilities_{.direct_io = true};
  mutable std::mutex mutex_;  // guards the two below; the bytes of an object have their own
  std::map<std::string, std::shared_ptr<Object>, std::less<>> objects_;
  std::set<std::string, std::less<>> directories_;
};

}  // namespace unbroken
