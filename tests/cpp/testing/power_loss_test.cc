// What the fault store keeps and what it takes when the power goes.
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <random>
#include <set>

#include "base/bytes.h"
#include "store/memory/memory_store.h"
#include "store/path.h"
#include "testing/fault_store.h"

namespace unbroken {
namespace {

constexpr std::uint64_t kLimit = kMiB;

class PowerLoss : public testing::Test {
 protected:
  void write(const std::string& path, const std::string& content, bool finish = true) {
    auto writer = store_.create(path, content.size());
    ASSERT_TRUE(writer) << writer.error().message;
    ASSERT_TRUE((*writer)->write_at(0, bytes_of(content)));
    if (!finish) return;
    ASSERT_TRUE((*writer)->finish(content.size()));
  }
  void publish(const std::string& path, const std::string& content) {
    const Status done = store_.publish(path, bytes_of(content));
    ASSERT_TRUE(done) << done.error().message;
  }
  void lose_all() { ASSERT_TRUE(store_.lose_unsynced(1, Loss::kAll)); }
  std::string content(const std::string& path) {
    const auto read = store_.read(path, kLimit);
    return read ? *read : std::string("<") + std::string(code_name(read.error().code)) + ">";
  }

  MemoryStore memory_;
  FaultStore store_{memory_};
};

TEST_F(PowerLoss, APublishedMarkerWithoutSyncOfItsDirectoryIsLost) {
  publish(".metadata", "marker");
  lose_all();
  EXPECT_EQ(content(".metadata"), "<not_found>");
}

TEST_F(PowerLoss, APublishedMarkerWithSyncOfItsDirectoryStays) {
  publish(".metadata", "marker");
  ASSERT_TRUE(store_.sync_directory(""));
  EXPECT_TRUE(store_.all_synced());
  lose_all();
  EXPECT_EQ(content(".metadata"), "marker");
}

TEST_F(PowerLoss, AFinishedFileStaysOnceItsDirectoryIsSynced) {
  write("f", "bytes");
  ASSERT_TRUE(store_.sync_directory(""));
  lose_all();
  EXPECT_EQ(content("f"), "bytes");
}

TEST_F(PowerLoss, AFinishedFileWithoutSyncIsGone) {
  write("f", "bytes");
  lose_all();
  EXPECT_EQ(content("f"), "<not_found>");
}

TEST_F(PowerLoss, AnUnfinishedFileWithADurableNameLosesItsBytes) {
  write("f", "bytes", false);
  ASSERT_TRUE(store_.sync_directory(""));
  EXPECT_FALSE(store_.all_synced());
  lose_all();
  EXPECT_EQ(content("f"), "");
}

TEST_F(PowerLoss, AFileThatIsFinishedAfterTheSyncStays) {
  auto writer = store_.create("f", 5);
  ASSERT_TRUE(writer);
  ASSERT_TRUE(store_.sync_directory(""));
  ASSERT_TRUE((*writer)->write_at(0, bytes_of("bytes")));
  ASSERT_TRUE((*writer)->finish(5));
  lose_all();
  EXPECT_EQ(content("f"), "bytes");
}

TEST_F(PowerLoss, AFailedFinishLeavesTheBytesUndurable) {
  store_.set_script(fault_on({.name = "finish"}, Fault::fail()));
  auto writer = store_.create("f", 5);
  ASSERT_TRUE(writer);
  ASSERT_TRUE((*writer)->write_at(0, bytes_of("bytes")));
  EXPECT_FALSE((*writer)->finish(5));
  ASSERT_TRUE(store_.sync_directory(""));
  EXPECT_EQ(content("f"), "bytes") << "visible until the power goes";
  lose_all();
  EXPECT_EQ(content("f"), "");
}

TEST_F(PowerLoss, AFailedSyncOfADirectoryMakesNothingDurable) {
  publish("m", "m");
  store_.set_script(fault_on({.name = "sync_directory"}, Fault::fail(Code::kUnknown)));
  EXPECT_FALSE(store_.sync_directory(""));
  lose_all();
  EXPECT_EQ(content("m"), "<not_found>");
}

TEST_F(PowerLoss, ASyncWhoseReplyIsLostMakesNamesDurable) {
  publish("m", "m");
  store_.set_script(fault_on({.name = "sync_directory"}, Fault::reply_lost()));
  EXPECT_FALSE(store_.sync_directory(""));
  lose_all();
  EXPECT_EQ(content("m"), "m");
}

TEST_F(PowerLoss, AReplacedObjectFallsBackToTheOldOne) {
  publish("m", "first");
  ASSERT_TRUE(store_.sync_directory(""));
  publish("m", "second");
  publish("m", "third");
  lose_all();
  EXPECT_EQ(content("m"), "first");
}

TEST_F(PowerLoss, ARemovedObjectComesBack) {
  publish("m", "first");
  ASSERT_TRUE(store_.sync_directory(""));
  ASSERT_TRUE(store_.remove("m"));
  lose_all();
  EXPECT_EQ(content("m"), "first");
  ASSERT_TRUE(store_.remove("m"));
  ASSERT_TRUE(store_.sync_directory(""));
  lose_all();
  EXPECT_EQ(content("m"), "<not_found>");
}

TEST_F(PowerLoss, ANewDirectoryWhoseParentWasNotSyncedVanishesWithItsContent) {
  ASSERT_TRUE(store_.make_directory("a/b"));
  write("a/b/f", "bytes");
  ASSERT_TRUE(store_.sync_directory("a/b"));
  ASSERT_TRUE(store_.sync_directory("a"));
  lose_all();
  EXPECT_EQ(store_.stat("a").error().code, Code::kNotFound);
}

TEST_F(PowerLoss, ADirectoryThatIsSyncedUpToTheRootStays) {
  ASSERT_TRUE(store_.make_directory("a/b"));
  write("a/b/f", "bytes");
  for (const char* directory : {"a/b", "a", ""}) ASSERT_TRUE(store_.sync_directory(directory));
  EXPECT_TRUE(store_.all_synced());
  lose_all();
  EXPECT_EQ(content("a/b/f"), "bytes");
}

TEST_F(PowerLoss, MakingADirectoryThatIsThereChangesNothing) {
  ASSERT_TRUE(store_.make_directory("a"));
  ASSERT_TRUE(store_.sync_directory(""));
  ASSERT_TRUE(store_.make_directory("a"));
  EXPECT_TRUE(store_.all_synced());
}

TEST_F(PowerLoss, ARemovedDirectoryComesBackAsItWasAtItsLastSync) {
  ASSERT_TRUE(store_.make_directory("a/b"));
  write("a/kept", "kept");
  write("a/b/deep", "deep");
  publish("a/old", "old");
  for (const char* directory : {"a/b", "a", ""}) ASSERT_TRUE(store_.sync_directory(directory));
  publish("a/old", "new");
  write("a/unsynced", "unsynced");
  ASSERT_TRUE(store_.remove("a/kept"));
  ASSERT_TRUE(store_.remove_directory("a"));
  ASSERT_TRUE(store_.make_directory("a"));
  write("a/other", "other");
  ASSERT_TRUE(store_.sync_directory("a"));
  lose_all();
  EXPECT_EQ(content("a/kept"), "kept");
  EXPECT_EQ(content("a/b/deep"), "deep");
  EXPECT_EQ(content("a/old"), "old");
  EXPECT_EQ(content("a/unsynced"), "<not_found>");
  EXPECT_EQ(content("a/other"), "<not_found>");
}

TEST_F(PowerLoss, ATornRemovalIsUndoneEntryByEntry) {
  ASSERT_TRUE(store_.make_directory("a"));
  write("a/1", "1");
  write("a/2", "2");
  for (const char* directory : {"a", ""}) ASSERT_TRUE(store_.sync_directory(directory));
  store_.set_script(fault_on({.name = "remove_directory"}, Fault::killed_within(1)));
  EXPECT_FALSE(store_.remove_directory("a"));
  EXPECT_EQ(memory_.list("a")->size(), 1U);
  lose_all();
  EXPECT_EQ(content("a/1"), "1");
  EXPECT_EQ(content("a/2"), "2");
}

TEST_F(PowerLoss, CreateWholeIsAsDurableAsPublish) {
  ASSERT_TRUE(store_.create_whole("g1", bytes_of("one")));
  ASSERT_TRUE(store_.sync_directory(""));
  ASSERT_TRUE(store_.create_whole("g2", bytes_of("two")));
  EXPECT_EQ(store_.create_whole("g1", bytes_of("other")).error().code, Code::kAlreadyExists);
  lose_all();
  EXPECT_EQ(content("g1"), "one");
  EXPECT_EQ(content("g2"), "<not_found>");
}

TEST_F(PowerLoss, AStartAfterwardsFindsAWorkingStoreAndDeadWriters) {
  auto writer = store_.create("f", 5);
  ASSERT_TRUE(writer);
  store_.die();
  lose_all();
  EXPECT_FALSE(store_.dead());
  EXPECT_FALSE((*writer)->write_at(0, bytes_of("late")));
  EXPECT_FALSE((*writer)->finish(4));
  EXPECT_EQ(content("f"), "<not_found>");
  EXPECT_TRUE(store_.all_synced()) << "what is there after the start is on the disk";
  publish("m", "m");
  EXPECT_EQ(content("m"), "m");
}

TEST_F(PowerLoss, WithoutDirectoriesANameIsDurableWithItsBytes) {
  FaultStore bucket(memory_, {.directories = false});
  ASSERT_TRUE(bucket.publish("m", bytes_of("m")));
  EXPECT_TRUE(bucket.all_synced());
  ASSERT_TRUE(bucket.lose_unsynced(1, Loss::kAll));
  EXPECT_EQ(*bucket.read("m", kLimit), "m");
  ASSERT_TRUE(bucket.remove("m"));
  ASSERT_TRUE(bucket.lose_unsynced(1, Loss::kAll));
  EXPECT_FALSE(bucket.read("m", kLimit));
}

TEST_F(PowerLoss, ATornPublishIsNotDurableEither) {
  FaultStore volume(memory_, {.atomic_publish = false, .directories = false});
  volume.set_script(fault_on({.name = "publish"}, Fault::killed_within(3)));
  EXPECT_FALSE(volume.publish("m", bytes_of("marker")));
  EXPECT_EQ(*memory_.read("m", kLimit), "mar");
  ASSERT_TRUE(volume.lose_unsynced(1, Loss::kAll));
  EXPECT_EQ(*volume.read("m", kLimit), "");
}

TEST_F(PowerLoss, RandomLossTakesAndLeavesEachUnsyncedNameSometimes) {
  std::set<std::pair<bool, bool>> seen;
  for (std::uint64_t seed = 0; seed < 64; ++seed) {
    MemoryStore memory;
    FaultStore store(memory);
    ASSERT_TRUE(store.publish("a", bytes_of("a")));
    ASSERT_TRUE(store.publish("b", bytes_of("b")));
    ASSERT_TRUE(store.lose_unsynced(seed, Loss::kRandom));
    seen.emplace(store.stat("a").has_value(), store.stat("b").has_value());
  }
  EXPECT_EQ(seen.size(), 4U);
}

TEST_F(PowerLoss, RandomLossLeavesUnfinishedBytesWholeTruncatedZeroedOrEmpty) {
  const std::string full(std::size_t{3} * 4096, 'x');
  bool whole = false;
  bool empty = false;
  bool truncated = false;
  bool zeroed = false;
  for (std::uint64_t seed = 0; seed < 64; ++seed) {
    MemoryStore memory;
    FaultStore store(memory);
    auto writer = store.create("f", full.size());
    ASSERT_TRUE(writer);
    ASSERT_TRUE((*writer)->write_at(0, bytes_of(full)));
    ASSERT_TRUE(store.sync_directory(""));
    ASSERT_TRUE(store.lose_unsynced(seed, Loss::kRandom));
    const auto left = store.read("f", kLimit);
    ASSERT_TRUE(left) << "its name is durable";
    whole = whole || *left == full;
    empty = empty || left->empty();
    truncated = truncated || (!left->empty() && left->size() < full.size());
    zeroed = zeroed || (left->size() == full.size() && left->find('\0') != std::string::npos);
  }
  EXPECT_TRUE(whole && empty && truncated && zeroed);
}

TEST_F(PowerLoss, RandomLossBringsARemovedDirectoryBackInPart) {
  std::set<std::size_t> seen;  // entries that are back; 9: not even the directory
  for (std::uint64_t seed = 0; seed < 64; ++seed) {
    MemoryStore memory;
    FaultStore store(memory);
    ASSERT_TRUE(store.make_directory("d"));
    for (const char* name : {"d/1", "d/2"}) ASSERT_TRUE(store.publish(name, bytes_of("x")));
    for (const char* directory : {"d", ""}) ASSERT_TRUE(store.sync_directory(directory));
    ASSERT_TRUE(store.remove_directory("d"));
    ASSERT_TRUE(store.lose_unsynced(seed, Loss::kRandom));
    const auto left = store.list("d");
    seen.insert(left ? left->size() : 9);
  }
  EXPECT_EQ(seen, (std::set<std::size_t>{0, 1, 2, 9}));
}

TEST_F(PowerLoss, TheWriterOfARemovedFileMakesNoNewOneOfThatNameDurable) {
  auto old_one = store_.create("f", 3);
  ASSERT_TRUE(old_one);
  ASSERT_TRUE(store_.remove("f"));
  write("f", "new", false);
  ASSERT_TRUE((*old_one)->finish(0));
  ASSERT_TRUE(store_.sync_directory(""));
  EXPECT_EQ(content("f"), "new");
  lose_all();
  EXPECT_EQ(content("f"), "");
}

TEST_F(PowerLoss, TheSameSeedLosesTheSame) {
  const auto outcome = [](std::uint64_t seed) {
    MemoryStore memory;
    FaultStore store(memory);
    for (char name = 'a'; name <= 'p'; ++name) EXPECT_TRUE(store.publish(std::string(1, name), {}));
    EXPECT_TRUE(store.lose_unsynced(seed, Loss::kRandom));
    std::string names;
    for (const auto entries = store.list(""); const ObjectInfo& entry : *entries) names += entry.name;
    return names;
  };
  EXPECT_EQ(outcome(7), outcome(7));
  EXPECT_NE(outcome(7), outcome(8));
}

// --- Against a second model, built the other way round: inodes, and for each directory its names on disk and now ---

struct Inode {
  bool directory = false;
  std::string bytes;
  bool durable = true;
  std::map<std::string, std::shared_ptr<Inode>> now;
  std::map<std::string, std::shared_ptr<Inode>> on_disk;
};
using Tree = std::map<std::string, std::string>;  // path -> content; directories end in '/'

class Model {
 public:
  std::shared_ptr<Inode> find(const std::string& path) const {
    auto at = root_;
    for (std::string_view rest = path; !rest.empty();) {
      const std::string name(rest.substr(0, rest.find('/')));
      const auto found = at->now.find(name);
      if (found == at->now.end()) return nullptr;
      at = found->second;
      rest.remove_prefix(std::min(rest.size(), name.size() + 1));
    }
    return at;
  }
  std::map<std::string, std::shared_ptr<Inode>>& names(const std::string& path) {
    return find(std::string(split_path(path).directory))->now;
  }
  void put(const std::string& path, std::string bytes, bool durable) {
    auto inode = std::make_shared<Inode>();
    inode->bytes = std::move(bytes);
    inode->durable = durable;
    names(path)[std::string(split_path(path).name)] = inode;
  }
  void make(const std::string& path) {
    auto inode = std::make_shared<Inode>();
    inode->directory = true;
    names(path)[std::string(split_path(path).name)] = inode;
  }
  void remove(const std::string& path) { names(path).erase(std::string(split_path(path).name)); }
  void sync(const std::string& path) {
    const auto directory = find(path);
    directory->on_disk = directory->now;
  }
  Tree on_disk() const {
    Tree tree;
    collect(*root_, "", tree);
    return tree;
  }

 private:
  static void collect(const Inode& directory, const std::string& path, Tree& tree) {
    for (const auto& [name, inode] : directory.on_disk) {
      const std::string child = join_path(path, name);
      if (inode->directory) {
        tree[child + "/"] = "";
        collect(*inode, child, tree);
      } else {
        tree[child] = inode->durable ? inode->bytes : "";
      }
    }
  }
  std::shared_ptr<Inode> root_ =
      std::make_shared<Inode>(Inode{.directory = true, .bytes = {}, .now = {}, .on_disk = {}});
};

void collect(Store& store, const std::string& path, Tree& tree) {
  const auto entries = store.list(path);
  ASSERT_TRUE(entries) << entries.error().message;
  for (const ObjectInfo& entry : *entries) {
    const std::string child = join_path(path, entry.name);
    if (entry.is_directory) {
      tree[child + "/"] = "";
      collect(store, child, tree);
    } else {
      tree[child] = *store.read(child, kLimit);
    }
  }
}

// A random history, done to the store and to the model alike.
class History {
 public:
  History(FaultStore& store, std::uint64_t seed) : store_(store), random_(seed) {}

  void run(int steps) {
    for (int i = 0; i < steps && !testing::Test::HasFatalFailure(); ++i) step();
  }
  const Model& model() const { return model_; }
  // Every content that each path ever had; a directory ends in '/' and has none.
  const std::map<std::string, std::set<std::string>>& contents() const { return contents_; }

 private:
  std::string any_path() {
    std::string path;
    for (std::uint64_t depth = random_() % 3; depth > 0; --depth) path = join_path(path, pick({"a", "b"}));
    return join_path(path, pick({"a", "b", "f", "g", "h"}));
  }
  std::string pick(std::vector<std::string> names) { return names[random_() % names.size()]; }

  void step() {
    const std::string path = any_path();
    const std::string parent(split_path(path).directory);
    const auto above = model_.find(parent);
    const auto here = model_.find(path);
    if (above == nullptr || !above->directory) return;
    const std::string bytes = std::to_string(random_() % 1000);
    switch (random_() % 9) {
      case 0:
      case 1: make_file(path, here, bytes); break;
      case 2:
        if (here && here->directory) break;
        ASSERT_TRUE(store_.publish(path, bytes_of(bytes)));
        model_.put(path, bytes, true);
        contents_[path].insert(bytes);
        break;
      case 3:
        if (here) break;
        ASSERT_TRUE(store_.create_whole(path, bytes_of(bytes)));
        model_.put(path, bytes, true);
        contents_[path].insert(bytes);
        break;
      case 4:
        if (!here || here->directory) break;
        ASSERT_TRUE(store_.remove(path));
        model_.remove(path);
        break;
      case 5:
        if (!here || !here->directory) break;
        ASSERT_TRUE(store_.remove_directory(path));
        model_.remove(path);
        break;
      case 6:
      case 7:
        if (here) break;
        ASSERT_TRUE(store_.make_directory(path));
        model_.make(path);
        contents_[path + "/"];
        break;
      default:
        ASSERT_TRUE(store_.sync_directory(parent));
        model_.sync(parent);
        break;
    }
  }

  void make_file(const std::string& path, const std::shared_ptr<Inode>& here, const std::string& bytes) {
    if (here) return;
    auto writer = store_.create(path, bytes.size());
    ASSERT_TRUE(writer);
    ASSERT_TRUE((*writer)->write_at(0, bytes_of(bytes)));
    const bool finish = random_() % 2 == 0;
    if (finish) {
      ASSERT_TRUE((*writer)->finish(bytes.size()));
    }
    model_.put(path, bytes, finish);
    contents_[path].insert(bytes);
  }

  FaultStore& store_;
  std::mt19937_64 random_;
  Model model_;
  std::map<std::string, std::set<std::string>> contents_;
};

TEST_F(PowerLoss, LosingAllLeavesExactlyWhatTheInodeModelHasOnDisk) {
  const std::uint64_t first = std::random_device{}();
  for (std::uint64_t seed = first; seed < first + 400; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    MemoryStore memory;
    FaultStore store(memory);
    History history(store, seed);
    history.run(60);
    ASSERT_TRUE(store.lose_unsynced(seed, Loss::kAll));
    Tree left;
    collect(store, "", left);
    ASSERT_EQ(left, history.model().on_disk());
  }
}

TEST_F(PowerLoss, RandomLossNeverTakesWhatIsDurableAndInventsNothing) {
  const std::uint64_t first = std::random_device{}();
  for (std::uint64_t seed = first; seed < first + 400; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    MemoryStore memory;
    FaultStore store(memory);
    History history(store, seed);
    history.run(60);
    Tree before;
    collect(store, "", before);
    ASSERT_TRUE(store.lose_unsynced(seed, Loss::kRandom));
    Tree left;
    collect(store, "", left);
    for (const auto& [path, bytes] : left) {
      ASSERT_TRUE(history.contents().contains(path)) << path << " was never there";
      if (path.ends_with('/')) continue;
      // Digits that were never made durable may be cut or zeroed; these are not among the contents.
      const auto& had = history.contents().at(path);
      const bool whole = had.contains(bytes);
      const bool cut = std::any_of(had.begin(), had.end(), [&](const auto& full) { return full.starts_with(bytes); });
      ASSERT_TRUE(whole || cut || bytes.find('\0') != std::string::npos) << path << ": " << bytes;
    }
    // A path that was in the same durable state before, all the way from the root, is untouched.
    const auto same_on_the_way = [&](std::string_view path) {
      for (std::string_view rest = path; !rest.empty(); rest = split_path(rest).directory) {
        const auto inode = history.model().find(std::string(rest));
        const auto directory = history.model().find(std::string(split_path(rest).directory));
        if (!inode || !directory) return false;
        const auto durable = directory->on_disk.find(std::string(split_path(rest).name));
        if (durable == directory->on_disk.end() || durable->second != inode || !inode->durable) return false;
      }
      return true;
    };
    for (const auto& [path, bytes] : before) {
      const std::string name = path.ends_with('/') ? path.substr(0, path.size() - 1) : path;
      if (!same_on_the_way(name)) continue;
      ASSERT_TRUE(left.contains(path)) << path << " was durable";
      ASSERT_EQ(left.at(path), bytes) << path;
    }
  }
}

}  // namespace
}  // namespace unbroken
