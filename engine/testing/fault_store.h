// A Store around another one that fails where a test says, and that can lose power.
//
// Every call on it, its writers and its readers is an Operation. A script is asked before each and answers with a
// Fault: what is to go wrong, if anything. Calls without a fault pass through and keep the contract of store.h, so the
// conformance suite runs on this store, too.
//
// It ends in three ways, which are different things:
//   - an operation fails (Fault::fail, reply_lost, torn): the caller lives on and has to cope;
//   - the process is killed (Fault::killed..., or die()): from there on no operation does anything, whoever calls it,
//     as for a process that is gone; revive() is the next process, which finds what had been done;
//   - the power goes (lose_unsynced()): as killed, and what was not durable is lost as well, see unsynced.h. Writers
//     and readers of before are dead for good.
//
// Any thread; scripts are called one at a time. Owns the model of what is durable, not the wrapped store, which must
// outlive it and be changed through it alone.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <vector>

#include "store/store.h"
#include "testing/unsynced.h"

namespace unbroken {

struct Operation {
  std::uint64_t index = 0;  // counted from 0 since the script was set
  std::string name{};       // the method: "create", "write_at", "finish", "publish", "create_whole", "open", "read_at",
                            // "read", "stat", "list", "remove", "remove_directory", "make_directory", "sync_directory",
                            // "free_bytes"
  std::string path{};
  std::uint64_t bytes = 0;  // that are written or read; the length for finish

  // It is one that can change what is stored.
  bool changes() const;
};

struct Fault {
  enum class Kind {
    kPass,
    kFail,       // not carried out
    kReplyLost,  // carried out, and the caller gets the error
    kTorn,       // carried out in part: `part` bytes of write_at, and of publish and create_whole where these are not
                 // atomic; `part` entries of remove_directory; nothing of any other
  };
  Kind kind = Kind::kPass;
  Error error{};  // without a message it gets one that names the operation
  std::uint64_t part = 0;
  bool dies = false;                   // the store is dead afterwards, see die()
  std::chrono::milliseconds stall{0};  // waits so long first
  std::function<void()> before{};      // called first, after the stall
  std::function<void()> after{};       // called when it is done, before the caller gets the answer

  static Fault pass() { return {}; }
  static Fault fail(Code code = Code::kIo);
  static Fault reply_lost(Code code = Code::kUnknown);
  static Fault torn(std::uint64_t part, Code code = Code::kIo);
  static Fault killed_before();
  static Fault killed_after();
  static Fault killed_within(std::uint64_t part);  // torn
};

using FaultScript = std::function<Fault(const Operation&)>;

// The fault at the operation with that index, once.
FaultScript fault_at(std::uint64_t index, Fault fault);
// The fault at the nth (from 0) operation of that name whose path contains `path_part`, once; for tests with threads,
// where indices vary.
struct FaultPlace {
  std::string name;
  std::string path_part{};
  std::uint64_t nth = 0;
};
FaultScript fault_on(FaultPlace place, Fault fault);
// The fault at every operation that `where` picks.
FaultScript fault_wherever(std::function<bool(const Operation&)> where, Fault fault);

// Takes abilities away from the wrapped store, and behaves so: publish() can be torn; create_whole() overwrites, and
// says that it went well; names are durable with their bytes.
struct FaultStoreOptions {
  bool atomic_publish = true;
  bool create_if_absent = true;
  bool directories = true;
};

class FaultStore final : public Store {
 public:
  explicit FaultStore(Store& wrapped, FaultStoreOptions options = {});
  ~FaultStore() override;

  // Operations are counted and logged anew from here. Empty: no faults.
  void set_script(FaultScript script);
  // The operations since then.
  std::vector<Operation> log() const;

  void die() { dead_.store(true); }
  bool dead() const { return dead_.load(); }
  // The next process: operations work again, but writers and readers of before stay dead.
  void revive();
  // The loss of power and the next start. Waits for operations that are under way.
  Status lose_unsynced(std::uint64_t seed, Loss loss);
  // Everything is durable.
  bool all_synced() const;

  std::string_view url() const override { return wrapped_.url(); }
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

 private:
  friend class FaultWriter;
  friend class FaultReader;

  using Torn = std::function<void(std::uint64_t part)>;

  Fault ask(Operation& operation);
  template <class R>
  R perform(Operation operation, std::uint64_t life, const std::function<R()>& whole, const Torn& torn = {});
  template <class R>
  R perform(Operation operation, const std::function<R()>& whole, const Torn& torn = {}) {
    return perform<R>(std::move(operation), life_.load(), whole, torn);
  }
  Status put(std::string_view path, std::span<const std::byte> bytes, bool replace);
  void put_torn(std::string_view path, std::span<const std::byte> bytes, std::uint64_t part);
  Status remove_one(std::string_view path);
  Status remove_all(std::string_view path);
  void remove_some(std::string_view path, std::uint64_t part);
  void name_changed(std::string_view path);

  Store& wrapped_;
  const FaultStoreOptions options_;
  Abilities abilities_;
  std::atomic<bool> dead_{false};
  std::atomic<std::uint64_t> life_{1};  // counts revivals

  mutable std::mutex script_mutex_;  // guards the three below
  FaultScript script_;
  std::uint64_t count_ = 0;
  std::vector<Operation> log_;

  std::shared_mutex gate_;          // shared by operations that are under way
  mutable std::mutex names_mutex_;  // guards unsynced_, and keeps it in step with the names in the wrapped store
  Unsynced unsynced_;
};

}  // namespace unbroken
