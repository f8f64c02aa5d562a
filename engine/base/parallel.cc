#include "base/parallel.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace unbroken {
namespace {

bool start_thread(std::vector<std::jthread>& threads, const std::function<void()>& work) {
  try {
    threads.emplace_back(work);
    return true;
  } catch (const std::system_error&) {
    return false;
  }
}

}  // namespace

Status parallel_for(std::size_t count, int threads, const std::function<Status(std::size_t)>& work) {
  std::atomic<std::size_t> next{0};
  std::atomic<bool> failed{false};
  std::mutex mutex;
  Status result;
  const auto run = [&] {
    while (!failed.load(std::memory_order_relaxed)) {
      const std::size_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= count) return;
      Status status = work(i);
      if (!status) {
        const std::lock_guard lock(mutex);
        if (result) result = std::move(status);
        failed.store(true, std::memory_order_relaxed);
      }
    }
  };
  const std::size_t helpers = std::min<std::size_t>(static_cast<std::size_t>(std::max(threads, 1)), count);
  {
    std::vector<std::jthread> workers;
    for (std::size_t i = 1; i < helpers; ++i) {
      // When no more threads are to be had, those that began, and this one, do all of it.
      if (!start_thread(workers, run)) break;
    }
    run();
  }
  return result;
}

}  // namespace unbroken
