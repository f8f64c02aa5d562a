// The posix store from outside: which system calls it makes and in which order, and what it says and leaves when one of
// them fails or the process is killed in it. This executable runs itself under strace; where strace cannot trace, the
// tests are skipped.
#include <fmt/core.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>

#include "base/bytes.h"
#include "conformance/places.h"
#include "store/posix/posix_store.h"

namespace unbroken::conformance {
namespace {

namespace fs = std::filesystem;

// --- What runs under strace ---

Status act(Store& store, const std::string& action) {
  if (action == "publish") return store.publish("d/m", bytes_of("new"));
  if (action == "create_whole") return store.create_whole("d/w", bytes_of("new"));
  if (action == "sync") return store.sync_directory("d");
  if (action == "remove") return store.remove("d/m");
  if (action == "open_root") {
    UNBROKEN_TRY(open_posix_store(std::string(store.url()) + "/x/y", {.create = true}));
    return {};
  }
  alignas(kDirectAlignment) static std::byte block[2 * kDirectAlignment];
  if (action == "read_direct") {
    UNBROKEN_ASSIGN(auto reader, store.open("d/blocks", {.direct = true}));
    UNBROKEN_TRY(reader->read_at(0, block));
    if (text_of(block) != std::string(sizeof block, 'b')) return make_error(Code::kInternal, "other bytes");
    return {};
  }
  UNBROKEN_ASSIGN(auto writer, store.create("d/o", sizeof block));
  std::fill(std::begin(block), std::end(block), static_cast<std::byte>('x'));
  UNBROKEN_TRY(writer->write_at(0, block));
  if (action == "write_unaligned") UNBROKEN_TRY(writer->write_at(sizeof block, bytes_of("tail")));
  return writer->finish(5000);
}

// Disabled, so that only run() below runs it.
TEST(UnderStrace, DISABLED_Act) {
  auto store = open_posix_store(std::getenv("UNBROKEN_TEST_ROOT"), {});
  ASSERT_TRUE(is_ok(store));
  ::access("/begin", F_OK);  // seen in the trace
  const Status done = act(**store, std::getenv("UNBROKEN_TEST_ACTION"));
  ::access("/end", F_OK);
  std::ofstream(std::getenv("UNBROKEN_TEST_OUTCOME"))
      << (done ? "ok" : code_name(done.error().code)) << (!done && done.error().data_may_be_lost ? " lost" : "") << "\n"
      << (done ? "" : done.error().message);
}

// --- Running it ---

struct Outcome {
  std::string result = "killed";  // or "ok", or an error's code, with " lost" where data may be lost
  std::string message{};
  std::vector<std::string> calls{};  // between begin and end; "fsync(5</tmp/d/m>) = 0"
};

class SystemCalls : public testing::Test {
 protected:
  void SetUp() override {
    if (std::system("strace -o /dev/null true >/dev/null 2>&1") != 0) GTEST_SKIP() << "strace cannot trace here";
    auto store = open_posix_store(root_.path(), {.create = true});
    ASSERT_TRUE(is_ok(store));
    store_ = std::move(*store);
    ASSERT_TRUE(is_ok(store_->make_directory("d")));
    ASSERT_TRUE(is_ok(store_->publish("d/m", bytes_of("old"))));
    ASSERT_TRUE(is_ok(store_->publish("d/blocks", bytes_of(std::string(2 * kDirectAlignment, 'b')))));
  }

  // `injections` are strace's: "fsync:error=EIO". With `only`, calls on that object alone are seen and struck: the C
  // library makes some of the same ones before main().
  Outcome run(const std::string& action, const std::vector<std::string>& injections = {},
              const std::string& only = {}) {
    const fs::path trace = scratch_.path() / "trace";
    const fs::path outcome = scratch_.path() / "outcome";
    fs::remove(outcome);
    std::string inject;
    for (const std::string& injection : injections) inject += fmt::format(" -e inject={}", injection);
    if (!only.empty()) inject += fmt::format(" -P {}", (root_.path() / only).string());
    // Leak checking does not work under strace.
    const std::string command = fmt::format(
        "UNBROKEN_TEST_ROOT={} UNBROKEN_TEST_ACTION={} UNBROKEN_TEST_OUTCOME={} ASAN_OPTIONS=detect_leaks=0 "
        "strace -f -y -s 4096 -e trace=%file,%desc{} -o {} {} --gtest_also_run_disabled_tests "
        "--gtest_filter=UnderStrace.DISABLED_Act >/dev/null 2>&1",
        root_.path().string(), action, outcome.string(), inject, trace.string(),
        fs::read_symlink("/proc/self/exe").string());
    const int status = std::system(command.c_str());
    EXPECT_NE(status, -1);
    Outcome result;
    std::ifstream told(outcome);
    std::getline(told, result.result);
    std::getline(told, result.message);
    if (!fs::exists(outcome)) result.result = "killed";
    bool within = false;
    std::ifstream lines(trace);
    for (std::string line; std::getline(lines, line);) {
      if (line.find("\"/end\"") != std::string::npos) within = false;
      if (within) result.calls.push_back(line.substr(line.find_first_not_of("0123456789 ")));
      if (line.find("\"/begin\"") != std::string::npos) within = true;
    }
    return result;
  }

  std::string content(std::string_view path) { return store_->read(path, kMiB).value_or("<none>"); }
  // Everything in the directory, temporary names included.
  std::size_t entries() const {
    return static_cast<std::size_t>(
        std::distance(fs::directory_iterator(root_.path() / "d"), fs::directory_iterator()));
  }

  TemporaryDirectory root_;
  TemporaryDirectory scratch_;
  std::unique_ptr<Store> store_;
};

// The position of the first call after `from` that begins with `name` and contains `what`; fails when there is none.
std::size_t position(const Outcome& outcome, std::string_view name, std::string_view what, std::size_t from = 0) {
  for (std::size_t i = from; i < outcome.calls.size(); ++i) {
    const std::string& call = outcome.calls[i];
    if (call.starts_with(name) && call.find(what) != std::string::npos) return i;
  }
  std::string all;
  for (const std::string& call : outcome.calls) all += "\n  " + call;
  ADD_FAILURE() << "no " << name << " of " << what << " after call " << from << " in" << all;
  return outcome.calls.size();
}

std::size_t count(const Outcome& outcome, std::string_view name) {
  return static_cast<std::size_t>(std::count_if(outcome.calls.begin(), outcome.calls.end(),
                                                [&](const std::string& call) { return call.starts_with(name); }));
}

// --- Order ---

TEST_F(SystemCalls, FinishSyncsAfterTheLastChangeAndBeforeItReturns) {
  for (const char* action : {"write", "write_unaligned"}) {
    ASSERT_TRUE(is_ok(store_->remove_directory("d")));
    ASSERT_TRUE(is_ok(store_->make_directory("d")));
    const Outcome outcome = run(action);
    ASSERT_EQ(outcome.result, "ok") << outcome.message;
    const std::size_t sync = position(outcome, "fdatasync(", "/d/o>) = 0");
    EXPECT_LT(position(outcome, "ftruncate(", "/d/o>, 5000) = 0"), sync);
    for (std::size_t i = sync + 1; i < outcome.calls.size(); ++i) {
      const std::string& call = outcome.calls[i];
      EXPECT_TRUE(call.find("/d/o>") == std::string::npos || call.starts_with("close(")) << "after the sync: " << call;
    }
    EXPECT_EQ(store_->stat("d/o")->size, 5000U);
  }
}

TEST_F(SystemCalls, PublishSyncsTheWholeFileBeforeItGetsItsName) {
  const Outcome outcome = run("publish");
  ASSERT_EQ(outcome.result, "ok") << outcome.message;
  const std::size_t write = position(outcome, "pwrite64(", ".tmp-");
  const std::size_t sync = position(outcome, "fsync(", ".tmp-", write);
  const std::size_t rename = position(outcome, "rename", "\"m\"", sync);
  EXPECT_LT(sync, rename);
  EXPECT_EQ(count(outcome, "rename"), 1U);
  EXPECT_EQ(count(outcome, "pwrite64"), 1U);
}

TEST_F(SystemCalls, CreateWholeSyncsTheWholeFileBeforeItGetsItsName) {
  const Outcome outcome = run("create_whole");
  ASSERT_EQ(outcome.result, "ok") << outcome.message;
  const std::size_t write = position(outcome, "pwrite64(", ".tmp-");
  const std::size_t sync = position(outcome, "fsync(", ".tmp-", write);
  const std::size_t link = position(outcome, "linkat(", "\"w\"", sync);
  position(outcome, "unlinkat(", ".tmp-", link);
  EXPECT_EQ(count(outcome, "pwrite64"), 1U);
}

TEST_F(SystemCalls, SyncDirectorySyncsTheDirectory) {
  position(run("sync"), "fsync(", fmt::format("<{}/d>) = 0", root_.path().string()));
}

TEST_F(SystemCalls, ANewRootsNamesAreSyncedInTheirParents) {
  const std::string root = root_.path().string();
  const Outcome outcome = run("open_root");
  ASSERT_EQ(outcome.result, "ok") << outcome.message;
  const std::size_t made = position(outcome, "mkdir", fmt::format("\"{}/x\"", root));
  const std::size_t synced = position(outcome, "fsync(", fmt::format("<{}>) = 0", root), made);
  const std::size_t below = position(outcome, "mkdir", fmt::format("\"{}/x/y\"", root), synced);
  position(outcome, "fsync(", fmt::format("<{}/x>) = 0", root), below);
}

// --- Failures ---

TEST_F(SystemCalls, AFailedSyncCondemnsTheObjectAndIsNotTriedAgain) {
  const Outcome outcome = run("write", {"fdatasync:error=EIO:when=1"});
  EXPECT_EQ(outcome.result, "io lost");
  EXPECT_NE(outcome.message.find("d/o"), std::string::npos) << outcome.message;
  EXPECT_EQ(count(outcome, "fdatasync"), 1U) << "a second one would succeed and mean nothing";
}

TEST_F(SystemCalls, AFailedTruncationCondemnsTheObject) {
  EXPECT_EQ(run("write", {"ftruncate:error=EIO"}).result, "io lost");
}

TEST_F(SystemCalls, AnErrorOfCloseCounts) {
  for (int which = 1; which <= 2; ++which) {  // one of each descriptor
    const Outcome outcome = run("write", {fmt::format("close:error=EIO:when={}", which)}, "d/o");
    EXPECT_EQ(outcome.result, "io lost") << outcome.message;
    EXPECT_NE(outcome.message.find("close"), std::string::npos) << outcome.message;
    ASSERT_TRUE(is_ok(store_->remove("d/o")));
  }
}

TEST_F(SystemCalls, AFailedWriteIsReportedAndAnInterruptedOneGoesOn) {
  EXPECT_EQ(run("write", {"pwrite64:error=EIO"}).result, "io");
  ASSERT_TRUE(is_ok(store_->remove("d/o")));
  EXPECT_EQ(run("write", {"pwrite64:error=EINTR:when=1"}).result, "ok");
  EXPECT_EQ(content("d/o"), std::string(5000, 'x'));
}

TEST_F(SystemCalls, InterruptedCallsGoOn) {
  for (const char* call : {"fdatasync", "ftruncate", "fallocate"}) {
    EXPECT_EQ(run("write", {fmt::format("{}:error=EINTR:when=1", call)}).result, "ok") << call;
    ASSERT_TRUE(is_ok(store_->remove("d/o")));
  }
  EXPECT_EQ(run("publish", {"fsync:error=EINTR:when=1"}).result, "ok");
  EXPECT_EQ(run("read_direct", {"pread64:error=EINTR:when=1"}, "d/blocks").result, "ok");
}

TEST_F(SystemCalls, WhereDirectIoTurnsOutNotToWorkTheBytesGoTheOtherWay) {
  EXPECT_EQ(run("write", {"pwrite64:error=EINVAL:when=1"}).result, "ok");
  EXPECT_EQ(content("d/o"), std::string(5000, 'x'));
  EXPECT_EQ(run("read_direct", {"pread64:error=EINVAL:when=1"}, "d/blocks").result, "ok");
}

TEST_F(SystemCalls, SpaceThatCannotBeReservedIsNoErrorUnlessItIsMissing) {
  EXPECT_EQ(run("write", {"fallocate:error=EOPNOTSUPP"}).result, "ok");
  ASSERT_TRUE(is_ok(store_->remove("d/o")));
  EXPECT_EQ(run("write", {"fallocate:error=ENOSPC"}).result, "no_space");
  EXPECT_EQ(content("d/o"), "<none>");
  EXPECT_EQ(run("write", {"fallocate:error=EDQUOT"}).result, "no_space");
}

TEST_F(SystemCalls, APublishThatCannotSyncKeepsTheOldStateForCertain) {
  const Outcome outcome = run("publish", {"fsync:error=EIO"});
  EXPECT_EQ(outcome.result, "io");
  EXPECT_EQ(content("d/m"), "old");
  EXPECT_EQ(entries(), 2U) << "no temporary name stays";
}

TEST_F(SystemCalls, ARenameWithAnUnclearErrorIsUnknownAndAClearOneIsNot) {
  for (const char* call : {"?renameat", "?renameat2"}) {
    Outcome outcome = run("publish", {fmt::format("{}:error=EIO", call)});
    if (outcome.result == "ok") {  // this C library uses the other one
      ASSERT_TRUE(is_ok(store_->publish("d/m", bytes_of("old"))));
      continue;
    }
    EXPECT_EQ(outcome.result, "unknown");
    EXPECT_EQ(content("d/m"), "old");
    EXPECT_EQ(run("publish", {fmt::format("{}:error=ENOSPC", call)}).result, "no_space");
    EXPECT_EQ(run("publish", {fmt::format("{}:error=EACCES", call)}).result, "permission");
    EXPECT_EQ(entries(), 2U) << "no temporary name stays";
    return;
  }
  FAIL() << "the rename was not found";
}

TEST_F(SystemCalls, AFailedSyncOfADirectoryIsUnknown) {
  const Outcome outcome = run("sync", {"fsync:error=EIO"});
  EXPECT_EQ(outcome.result, "unknown lost");
  EXPECT_NE(outcome.message.find("EIO"), std::string::npos) << outcome.message;
  EXPECT_EQ(run("sync", {"fsync:error=EINVAL"}).result, "ok") << "a file system that knows no such thing";
}

TEST_F(SystemCalls, WithoutLinkCreateWholeGoesByAnotherWayAndStillLetsOneWin) {
  const std::vector<std::vector<std::string>> missing = {
      {"linkat:error=EPERM"}, {"linkat:error=EOPNOTSUPP"}, {"linkat:error=EPERM", "renameat2:error=EINVAL"}};
  for (const auto& injections : missing) {
    EXPECT_EQ(run("create_whole", injections).result, "ok");
    EXPECT_EQ(content("d/w"), "new");
    EXPECT_EQ(run("create_whole", injections).result, "already_exists");
    EXPECT_EQ(entries(), 3U) << "no temporary name stays";
    ASSERT_TRUE(is_ok(store_->remove("d/w")));
  }
}

TEST_F(SystemCalls, ALinkWhoseAnswerWasLostOnTheWayIsUnknown) {
  EXPECT_EQ(run("create_whole", {"linkat:error=EIO"}).result, "unknown");
  EXPECT_EQ(content("d/w"), "<none>");
}

TEST_F(SystemCalls, WithoutOpenat2TheWalkDoesTheSame) {
  for (const char* error : {"ENOSYS", "EPERM"}) {
    const Outcome outcome = run("publish", {fmt::format("openat2:error={}", error)});
    EXPECT_EQ(outcome.result, "ok") << outcome.message;
    EXPECT_EQ(content("d/m"), "new");
  }
}

TEST_F(SystemCalls, ARemovalThatFailsIsReported) {
  EXPECT_EQ(run("remove", {"unlinkat:error=EIO"}).result, "io");
  EXPECT_EQ(run("remove", {"unlinkat:error=EACCES"}).result, "permission");
  EXPECT_EQ(content("d/m"), "old");
}

TEST_F(SystemCalls, AStaleHandleIsUnavailableAndNotAbsent) {
  EXPECT_EQ(run("read_direct", {"pread64:error=ESTALE"}, "d/blocks").result, "unavailable");
  EXPECT_EQ(run("remove", {"unlinkat:error=ESTALE"}).result, "unavailable");
}

// --- Kills ---

TEST_F(SystemCalls, AKillAnywhereInAPublishLeavesTheOldOrTheNewObject) {
  bool kept_old = false;
  for (const char* call : {"fsync", "pwrite64", "?renameat", "?renameat2"}) {
    const Outcome outcome = run("publish", {fmt::format("{}:signal=KILL", call)});
    const std::string left = content("d/m");
    EXPECT_TRUE(left == "old" || left == "new") << call << ": " << left;
    EXPECT_EQ(store_->list("d")->size(), 2U) << "what a kill leaves is hidden";
    if (outcome.result == "killed") kept_old = kept_old || left == "old";
    ASSERT_TRUE(is_ok(store_->publish("d/m", bytes_of("old"))));
  }
  EXPECT_TRUE(kept_old);
}

TEST_F(SystemCalls, AKillAnywhereInCreateWholeLeavesNothingOrTheWholeObject) {
  for (const char* call : {"fsync", "pwrite64", "linkat", "unlinkat"}) {
    const Outcome outcome = run("create_whole", {fmt::format("{}:signal=KILL", call)});
    EXPECT_EQ(outcome.result, "killed") << call;
    const std::string left = content("d/w");
    EXPECT_TRUE(left == "<none>" || left == "new") << call << ": " << left;
    EXPECT_TRUE(is_ok(store_->list("d")));
    store_->remove("d/w").ignore("it may not be there");
  }
}

}  // namespace
}  // namespace unbroken::conformance
