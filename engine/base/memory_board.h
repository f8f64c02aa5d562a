// A board in memory, for a world of one and, in tests, for ranks that are threads of one process. Any thread.
#pragma once

#include <map>
#include <mutex>

#include "base/board.h"

namespace unbroken {

class MemoryBoard final : public Board {
 public:
  Status set(std::string_view key, std::string_view value) override {
    const std::lock_guard lock(mutex_);
    values_[std::string(key)] = value;
    return {};
  }
  Result<std::vector<std::optional<std::string>>> get(std::span<const std::string> keys) override {
    const std::lock_guard lock(mutex_);
    std::vector<std::optional<std::string>> answers;
    for (const auto& key : keys) {
      const auto found = values_.find(key);
      answers.push_back(found == values_.end() ? std::nullopt : std::optional(found->second));
    }
    return answers;
  }
  Result<std::string> set_if_absent(std::string_view key, std::string_view value) override {
    const std::lock_guard lock(mutex_);
    return values_.try_emplace(std::string(key), value).first->second;
  }
  Status erase(std::span<const std::string> keys) override {
    const std::lock_guard lock(mutex_);
    for (const auto& key : keys) values_.erase(key);
    return {};
  }
  std::size_t size() const {
    const std::lock_guard lock(mutex_);
    return values_.size();
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::string, std::string, std::less<>> values_;
};

}  // namespace unbroken
