#include "testing/crash_driver.h"

#include <fmt/core.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>

#include "base/crash_point.h"
#include "checkpoint/manifest.h"

namespace unbroken {

using Kind = CrashFault::Kind;

std::string CrashPlace::text() const { return fmt::format("{} {} #{}", what, where, nth); }

std::string CrashFault::text() const {
  switch (kind) {
    case Kind::kFail: return fmt::format("fails ({})", code_name(code));
    case Kind::kReplyLost: return fmt::format("reply lost ({})", code_name(code));
    case Kind::kTornFail: return fmt::format("fails after {} ({})", part, code_name(code));
    case Kind::kKillBefore: return "killed before";
    case Kind::kKillAfter: return "killed after";
    case Kind::kKillWithin: return fmt::format("killed after {}", part);
    case Kind::kPowerAll: return "power lost, all unsynced gone";
    case Kind::kPowerRandom: return fmt::format("power lost, seed {}", seed);
  }
  return "";
}

std::string without_ids(std::string_view path) {
  std::string result;
  while (true) {
    const std::size_t slash = path.find('/');
    const std::string_view name = path.substr(0, slash);
    const auto attempt = parse_attempt_directory(name);
    result += attempt ? fmt::format("step-{}-g{}", attempt->step, attempt->generation) : std::string(name);
    if (slash == std::string_view::npos) return result;
    result += '/';
    path.remove_prefix(slash + 1);
  }
}

CrashDriver::CrashDriver(FaultStore& store) : store_(store) {
  store_.set_script([this](const Operation& operation) {
    const auto fault = pass(operation.name, without_ids(operation.path), operation.bytes);
    return fault ? carry_out(*fault) : Fault::pass();
  });
  set_crash_handler([this](std::string_view point) -> Status {
    const auto fault = pass("point", point, 0);
    if (!fault) return {};
    if (fault->kills()) die(*fault);
    return make_error(fault->code, fmt::format("reach {}: injected fault", point));
  });
}

CrashDriver::~CrashDriver() {
  store_.set_script({});
  set_crash_handler({});
}

void CrashDriver::arm(CrashPlace place, CrashFault fault) {
  place_ = std::move(place);
  fault_ = fault;
}

std::vector<CrashPlace> CrashDriver::places() const {
  const std::lock_guard lock(mutex_);
  return places_;
}

std::optional<CrashFault> CrashDriver::pass(std::string_view what, std::string_view where, std::uint64_t bytes) {
  // Whoever comes while the process dies comes no further.
  while (dying_.load()) ::pause();
  const std::lock_guard lock(mutex_);
  CrashPlace place{.what = std::string(what), .where = std::string(where), .nth = 0, .bytes = bytes};
  place.nth = counts_[place.what + " " + place.where]++;
  places_.push_back(place);
  if (watcher_) watcher_(place);
  if (!place_ || place.what != place_->what || place.where != place_->where || place.nth != place_->nth)
    return std::nullopt;
  reached_.store(true);
  if (fault_.kills()) dying_.store(true);
  return fault_;
}

Fault CrashDriver::carry_out(const CrashFault& fault) {
  Fault carried;
  carried.error = make_error(fault.code, {});
  carried.part = fault.part;
  switch (fault.kind) {
    case Kind::kFail: carried.kind = Fault::Kind::kFail; break;
    case Kind::kReplyLost: carried.kind = Fault::Kind::kReplyLost; break;
    case Kind::kTornFail: carried.kind = Fault::Kind::kTorn; break;
    case Kind::kKillAfter: carried.after = [this, fault] { die(fault); }; break;
    case Kind::kKillWithin:
      carried.kind = Fault::Kind::kTorn;
      carried.after = [this, fault] { die(fault); };
      break;
    case Kind::kKillBefore:
    case Kind::kPowerAll:
    case Kind::kPowerRandom: carried.before = [this, fault] { die(fault); }; break;
  }
  return carried;
}

void CrashDriver::die(const CrashFault& fault) {
  dying_.store(true);
  if (fault.kind == Kind::kPowerAll || fault.kind == Kind::kPowerRandom) {
    const Loss loss = fault.kind == Kind::kPowerAll ? Loss::kAll : Loss::kRandom;
    if (const Status lost = store_.lose_unsynced(fault.seed, loss); !lost) {
      fmt::print(stderr, "lose power: {}\n", lost.error().message);
      ::_exit(1);
    }
  }
  ::_exit(kKilledExit);
}

namespace {

constexpr std::size_t kCheckers = 12;

// What a child writes until it ends.
std::string read_all(int fd) {
  std::string text;
  char buffer[4096];
  while (true) {
    const ssize_t got = ::read(fd, buffer, sizeof(buffer));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return text;
    text.append(buffer, static_cast<std::size_t>(got));
  }
}

struct Checker {
  pid_t child = -1;
  int from = -1;
};

Checker start_checker(const std::function<std::string()>& work) {
  int ends[2];
  if (::pipe(ends) != 0) return {};
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(ends[0]);
    const std::string wrong = work();
    for (std::size_t at = 0; at < wrong.size();) {
      const ssize_t put = ::write(ends[1], wrong.data() + at, wrong.size() - at);
      if (put <= 0) ::_exit(1);
      at += static_cast<std::size_t>(put);
    }
    ::_exit(0);
  }
  ::close(ends[1]);
  return {.child = child, .from = ends[0]};
}

}  // namespace

std::vector<std::string> check_cases(std::size_t count, const std::function<std::string(std::size_t)>& check) {
  std::fflush(nullptr);
  std::vector<Checker> checkers;
  for (std::size_t first = 0; first < std::min(count, kCheckers); ++first) {
    checkers.push_back(start_checker([&] {
      for (std::size_t number = first; number < count; number += kCheckers) {
        if (std::string wrong = check(number); !wrong.empty()) return wrong;
      }
      return std::string();
    }));
  }
  std::vector<std::string> all_wrong;
  for (const Checker& checker : checkers) {
    std::string wrong = checker.from < 0 ? "no child could be made" : read_all(checker.from);
    ::close(checker.from);
    int status = 0;
    while (::waitpid(checker.child, &status, 0) < 0 && errno == EINTR) continue;
    if (wrong.empty() && status != 0) wrong = fmt::format("a checking process ended with status {:#x}", status);
    if (!wrong.empty()) all_wrong.push_back(std::move(wrong));
  }
  return all_wrong;
}

int run_in_child(const std::function<void()>& work) {
  std::fflush(nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    work();
    ::_exit(0);
  }
  if (child < 0) return -1;
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace unbroken
