#include "testing/fault_store.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <thread>

#include "store/path.h"

namespace unbroken {

bool Operation::changes() const {
  constexpr std::array<std::string_view, 9> kChanges = {"create",           "write_at",       "finish",
                                                        "publish",          "create_whole",   "remove",
                                                        "remove_directory", "make_directory", "sync_directory"};
  return std::find(kChanges.begin(), kChanges.end(), name) != kChanges.end();
}

// --- Faults and scripts ---

namespace {

// The message is filled in when the operation is known.
Error of_code(Code code) { return make_error(code, {}); }

Fault killed(Fault::Kind kind, std::uint64_t part) {
  return {.kind = kind, .error = of_code(Code::kUnavailable), .part = part, .dies = true};
}

}  // namespace

Fault Fault::fail(Code code) { return {.kind = Kind::kFail, .error = of_code(code)}; }
Fault Fault::reply_lost(Code code) { return {.kind = Kind::kReplyLost, .error = of_code(code)}; }
Fault Fault::torn(std::uint64_t part, Code code) { return {.kind = Kind::kTorn, .error = of_code(code), .part = part}; }
Fault Fault::killed_before() { return killed(Kind::kFail, 0); }
Fault Fault::killed_after() { return killed(Kind::kReplyLost, 0); }
Fault Fault::killed_within(std::uint64_t part) { return killed(Kind::kTorn, part); }

FaultScript fault_at(std::uint64_t index, Fault fault) {
  return fault_wherever([index](const Operation& operation) { return operation.index == index; }, std::move(fault));
}

FaultScript fault_on(FaultPlace place, Fault fault) {
  auto seen = std::make_shared<std::uint64_t>(0);
  const auto where = [place = std::move(place), seen](const Operation& operation) {
    if (operation.name != place.name || operation.path.find(place.path_part) == std::string::npos) return false;
    return (*seen)++ == place.nth;
  };
  return fault_wherever(where, std::move(fault));
}

FaultScript fault_wherever(std::function<bool(const Operation&)> where, Fault fault) {
  return [where = std::move(where), fault = std::move(fault)](const Operation& operation) {
    return where(operation) ? fault : Fault::pass();
  };
}

// --- The way of every operation ---

namespace {

Error death(const Operation& operation) {
  return make_error(Code::kUnavailable,
                    fmt::format("{} {}: the process was killed (injected)", operation.name, operation.path));
}

Error complete(Error error, const Operation& operation) {
  if (error.message.empty()) {
    error.message = fmt::format("{} {}: injected fault ({})", operation.name, operation.path, code_name(error.code));
  }
  // As in a real store: the kernel may have dropped what it could not write.
  if (operation.name == "finish" || operation.name == "sync_directory") error.data_may_be_lost = true;
  return error;
}

}  // namespace

FaultStore::FaultStore(Store& wrapped, FaultStoreOptions options)
    : wrapped_(wrapped), options_(options), abilities_(wrapped.abilities()), unsynced_(wrapped) {
  abilities_.atomic_publish = abilities_.atomic_publish && options.atomic_publish;
  abilities_.create_if_absent = abilities_.create_if_absent && options.create_if_absent;
  abilities_.directories = abilities_.directories && options.directories;
}

FaultStore::~FaultStore() = default;

void FaultStore::set_script(FaultScript script) {
  const std::lock_guard lock(script_mutex_);
  script_ = std::move(script);
  count_ = 0;
  log_.clear();
}

std::vector<Operation> FaultStore::log() const {
  const std::lock_guard lock(script_mutex_);
  return log_;
}

void FaultStore::revive() {
  const std::unique_lock gate(gate_);
  life_.fetch_add(1);
  dead_.store(false);
}

Status FaultStore::lose_unsynced(std::uint64_t seed, Loss loss) {
  const std::unique_lock gate(gate_);
  const std::lock_guard lock(names_mutex_);
  UNBROKEN_TRY(unsynced_.lose(seed, loss));
  life_.fetch_add(1);
  dead_.store(false);
  return {};
}

bool FaultStore::all_synced() const {
  const std::lock_guard lock(names_mutex_);
  return unsynced_.empty();
}

Fault FaultStore::ask(Operation& operation) {
  const std::lock_guard lock(script_mutex_);
  operation.index = count_++;
  log_.push_back(operation);
  return script_ ? script_(operation) : Fault::pass();
}

template <class R>
R FaultStore::perform(Operation operation, std::uint64_t life, const std::function<R()>& whole, const Torn& torn) {
  const auto is_gone = [&] { return dead_.load() || life != life_.load(); };
  if (is_gone()) return death(operation);
  Fault fault = ask(operation);
  if (fault.stall.count() > 0) std::this_thread::sleep_for(fault.stall);
  if (fault.before) fault.before();
  R answer = complete(std::move(fault.error), operation);
  {
    const std::shared_lock gate(gate_);
    if (is_gone()) return death(operation);
    switch (fault.kind) {
      case Fault::Kind::kPass: answer = whole(); break;
      case Fault::Kind::kFail: break;
      case Fault::Kind::kReplyLost: whole().ignore("the reply is lost"); break;
      case Fault::Kind::kTorn:
        if (torn) torn(fault.part);
        break;
    }
    if (fault.dies) dead_.store(true);
  }
  if (fault.after) fault.after();
  return answer;
}

// --- Writers and readers ---

class FaultWriter final : public Writer {
 public:
  FaultWriter(FaultStore& store, std::string path, std::unique_ptr<Writer> wrapped, std::uint64_t number)
      : store_(store),
        path_(std::move(path)),
        wrapped_(std::move(wrapped)),
        number_(number),
        life_(store.life_.load()) {}

  Status write_at(std::uint64_t offset, std::span<const std::byte> bytes) override {
    return store_.perform<Status>(
        {.name = "write_at", .path = path_, .bytes = bytes.size()}, life_,
        [&] { return wrapped_->write_at(offset, bytes); },
        [&](std::uint64_t part) {
          wrapped_->write_at(offset, bytes.first(std::min<std::size_t>(part, bytes.size()))).ignore("torn");
        });
  }

  Status finish(std::uint64_t length) override {
    if (finished_.exchange(true)) {
      return make_error(Code::kInvalidArgument, fmt::format("finish {}: it was finished already, or condemned", path_));
    }
    return store_.perform<Status>({.name = "finish", .path = path_, .bytes = length}, life_, [&]() -> Status {
      UNBROKEN_TRY(wrapped_->finish(length));
      const std::lock_guard lock(store_.names_mutex_);
      store_.unsynced_.did_finish(path_, number_);
      return {};
    });
  }

 private:
  FaultStore& store_;
  const std::string path_;
  const std::unique_ptr<Writer> wrapped_;
  const std::uint64_t number_;
  const std::uint64_t life_;
  std::atomic<bool> finished_{false};
};

class FaultReader final : public Reader {
 public:
  FaultReader(FaultStore& store, std::string path, std::unique_ptr<Reader> wrapped)
      : store_(store), path_(std::move(path)), wrapped_(std::move(wrapped)), life_(store.life_.load()) {}

  std::uint64_t size() const override { return wrapped_->size(); }
  Status read_at(std::uint64_t offset, std::span<std::byte> into) override {
    return store_.perform<Status>({.name = "read_at", .path = path_, .bytes = into.size()}, life_,
                                  [&] { return wrapped_->read_at(offset, into); });
  }
  void will_need(std::uint64_t offset, std::uint64_t length) override { wrapped_->will_need(offset, length); }
  bool is_cached(std::uint64_t offset, std::uint64_t length) override { return wrapped_->is_cached(offset, length); }

 private:
  FaultStore& store_;
  const std::string path_;
  const std::unique_ptr<Reader> wrapped_;
  const std::uint64_t life_;
};

// --- Operations that change names ---

// Called after every change, with names_mutex_ held.
void FaultStore::name_changed(std::string_view path) {
  if (!abilities_.directories) unsynced_.did_sync_directory(split_path(path).directory);
}

Result<std::unique_ptr<Writer>> FaultStore::create(std::string_view path, std::uint64_t length) {
  using Answer = Result<std::unique_ptr<Writer>>;
  return perform<Answer>({.name = "create", .path = std::string(path), .bytes = length}, [&]() -> Answer {
    const std::lock_guard lock(names_mutex_);
    UNBROKEN_ASSIGN(auto writer, wrapped_.create(path, length));
    unsynced_.did_make(path);
    const std::uint64_t number = unsynced_.did_begin_bytes(path);
    name_changed(path);
    return std::make_unique<FaultWriter>(*this, std::string(path), std::move(writer), number);
  });
}

// The object is there, whole, at once.
Status FaultStore::put(std::string_view path, std::span<const std::byte> bytes, bool replace) {
  const std::lock_guard lock(names_mutex_);
  if (!replace) {
    UNBROKEN_TRY(wrapped_.create_whole(path, bytes));
    unsynced_.did_make(path);
  } else {
    auto before = unsynced_.will_change(path);
    UNBROKEN_TRY(wrapped_.publish(path, bytes));  // the better error, if there are two
    if (!before) return std::move(before).error();
    unsynced_.did_change(path, std::move(*before));
    unsynced_.forget_bytes(path);
  }
  name_changed(path);
  return {};
}

void FaultStore::put_torn(std::string_view path, std::span<const std::byte> bytes, std::uint64_t part) {
  if (abilities_.atomic_publish) return;
  if (!put(path, bytes.first(std::min<std::size_t>(part, bytes.size())), true)) return;
  const std::lock_guard lock(names_mutex_);
  unsynced_.did_begin_bytes(path);
}

Status FaultStore::publish(std::string_view path, std::span<const std::byte> bytes) {
  return perform<Status>(
      {.name = "publish", .path = std::string(path), .bytes = bytes.size()}, [&] { return put(path, bytes, true); },
      [&](std::uint64_t part) { put_torn(path, bytes, part); });
}

Status FaultStore::create_whole(std::string_view path, std::span<const std::byte> bytes) {
  return perform<Status>(
      {.name = "create_whole", .path = std::string(path), .bytes = bytes.size()},
      [&] { return put(path, bytes, !abilities_.create_if_absent); },
      [&](std::uint64_t part) {
        if (abilities_.create_if_absent && wrapped_.stat(path)) return;
        put_torn(path, bytes, part);
      });
}

// With names_mutex_ held, as the two below.
Status FaultStore::remove_one(std::string_view path) {
  auto before = unsynced_.will_change(path);
  UNBROKEN_TRY(wrapped_.remove(path));
  if (!before) return std::move(before).error();
  unsynced_.did_change(path, std::move(*before));
  unsynced_.forget_bytes(path);
  name_changed(path);
  return {};
}

Status FaultStore::remove_all(std::string_view path) {
  auto before = unsynced_.will_change(path);
  UNBROKEN_TRY(wrapped_.remove_directory(path));
  if (!before) return std::move(before).error();
  unsynced_.did_remove_directory(path, std::move(*before));
  name_changed(path);
  return {};
}

void FaultStore::remove_some(std::string_view path, std::uint64_t part) {
  auto entries = wrapped_.list(path);
  if (!entries) return;
  entries->resize(std::min<std::size_t>(part, entries->size()));
  for (const ObjectInfo& entry : *entries) {
    const std::string child = join_path(path, entry.name);
    (entry.is_directory ? remove_all(child) : remove_one(child)).ignore("the caller gets the injected error");
  }
}

Status FaultStore::remove(std::string_view path) {
  return perform<Status>({.name = "remove", .path = std::string(path)}, [&] {
    const std::lock_guard lock(names_mutex_);
    return remove_one(path);
  });
}

Status FaultStore::remove_directory(std::string_view path) {
  return perform<Status>(
      {.name = "remove_directory", .path = std::string(path)},
      [&] {
        const std::lock_guard lock(names_mutex_);
        return remove_all(path);
      },
      [&](std::uint64_t part) {
        const std::lock_guard lock(names_mutex_);
        remove_some(path, part);
      });
}

Status FaultStore::make_directory(std::string_view path) {
  return perform<Status>({.name = "make_directory", .path = std::string(path)}, [&]() -> Status {
    const std::lock_guard lock(names_mutex_);
    std::vector<std::string_view> absent;
    if (check_path("make directory", path)) {
      for (std::string_view rest = path; !rest.empty() && !wrapped_.stat(rest); rest = split_path(rest).directory) {
        absent.push_back(rest);
      }
    }
    UNBROKEN_TRY(wrapped_.make_directory(path));
    for (const std::string_view made : absent) {
      unsynced_.did_make(made);
      name_changed(made);
    }
    return {};
  });
}

Status FaultStore::sync_directory(std::string_view path) {
  return perform<Status>({.name = "sync_directory", .path = std::string(path)}, [&]() -> Status {
    const std::lock_guard lock(names_mutex_);
    UNBROKEN_TRY(wrapped_.sync_directory(path));
    unsynced_.did_sync_directory(path);
    return {};
  });
}

// --- Operations that read ---

Result<std::unique_ptr<Reader>> FaultStore::open(std::string_view path, OpenOptions options) {
  using Answer = Result<std::unique_ptr<Reader>>;
  return perform<Answer>({.name = "open", .path = std::string(path)}, [&]() -> Answer {
    UNBROKEN_ASSIGN(auto reader, wrapped_.open(path, options));
    return std::make_unique<FaultReader>(*this, std::string(path), std::move(reader));
  });
}

Result<std::string> FaultStore::read(std::string_view path, std::uint64_t limit) {
  return perform<Result<std::string>>({.name = "read", .path = std::string(path)},
                                      [&] { return wrapped_.read(path, limit); });
}

Result<ObjectInfo> FaultStore::stat(std::string_view path) {
  return perform<Result<ObjectInfo>>({.name = "stat", .path = std::string(path)}, [&] { return wrapped_.stat(path); });
}

Result<std::vector<ObjectInfo>> FaultStore::list(std::string_view path) {
  return perform<Result<std::vector<ObjectInfo>>>({.name = "list", .path = std::string(path)},
                                                  [&] { return wrapped_.list(path); });
}

Result<std::uint64_t> FaultStore::free_bytes() {
  return perform<Result<std::uint64_t>>({.name = "free_bytes"}, [&] { return wrapped_.free_bytes(); });
}

}  // namespace unbroken
