// Verified reads of an attempt, against the plain bytes that were written.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <map>
#include <random>

#include "base/bytes.h"
#include "base/crc32c.h"
#include "checkpoint/shard.h"
#include "store/memory/memory_store.h"
#include "testing/fault_store.h"
#include "testing/seed.h"

namespace unbroken {
namespace {

constexpr std::string_view kAttempt = "step-10-g1-00000001";
constexpr std::string_view kMarker = "the metadata";

// Two ranks; rank 0 has a file over several chunks and a short one, rank 1 a short one and an empty one.
class ReaderTest : public testing::Test {
 protected:
  void SetUp() override {
    std::mt19937_64 random(test_seed());
    contents_["__0_0.distcp"] = std::string(2 * kChunkBytes + 12345, '\0');
    contents_["__0_1.distcp"] = std::string(5000, '\0');
    contents_["__1_0.distcp"] = std::string(kChunkBytes, '\0');
    contents_["__1_1.distcp"] = "";
    for (auto& [name, content] : contents_) {
      for (std::size_t i = 0; i + 8 <= content.size(); i += 8) {
        const std::uint64_t value = random();
        std::memcpy(content.data() + i, &value, 8);
      }
    }
    ASSERT_TRUE(store_.make_directory(kAttempt));
    for (std::uint64_t rank = 0; rank < 2; ++rank) {
      RankPart part{.rank = rank, .files = {}};
      for (const auto& [name, content] : contents_) {
        if (!name.starts_with("__" + std::to_string(rank))) continue;
        ASSERT_TRUE(put(name, content));
        ShardFile file{.name = name, .length = content.size(), .chunk_crcs = {}, .slots = {}};
        for (std::size_t at = 0; at < content.size(); at += kChunkBytes) {
          file.chunk_crcs.push_back(crc32c(bytes_of(std::string_view(content).substr(at, kChunkBytes))));
        }
        part.files.push_back(std::move(file));
      }
      const std::string document = encode(part);
      ASSERT_TRUE(put(part_name(rank), document));
      manifest_.parts.push_back({.length = document.size(), .crc = crc32c(bytes_of(document)), .data_bytes = 0});
    }
    manifest_.metadata_length = kMarker.size();
    manifest_.metadata_crc = crc32c(bytes_of(kMarker));
    ASSERT_TRUE(put(kMarkerName, kMarker));
    ASSERT_TRUE(put(kManifestName, encode(manifest_)));
  }

  static std::string path(std::string_view name) { return join_path(kAttempt, name); }
  Status put(std::string_view name, std::string_view content) { return store_.publish(path(name), bytes_of(content)); }
  std::unique_ptr<AttemptReader> open() { return AttemptReader::open(store_, kAttempt).value(); }

  MemoryStore store_;
  std::map<std::string, std::string> contents_;
  Manifest manifest_;
};

struct Want {
  std::string file;
  std::uint64_t offset = 0;
  std::string into;
};

Status read(AttemptReader& reader, std::vector<Want>& wants, ReadOptions options) {
  std::vector<ReadRange> ranges;
  for (auto& want : wants) {
    ranges.push_back({.file = want.file, .offset = want.offset, .into = std::as_writable_bytes(std::span(want.into))});
  }
  return reader.read(ranges, options);
}

TEST_F(ReaderTest, RandomRangesAreWhatWasWritten) {
  std::mt19937_64 random(test_seed());
  const auto reader = open();
  for (int round = 0; round < 100; ++round) {
    std::vector<Want> wants;
    for (std::uint64_t i = random() % 20; i > 0; --i) {
      auto file = contents_.begin();
      std::advance(file, random() % contents_.size());
      const std::uint64_t size = file->second.size();
      const std::uint64_t offset = random() % (size + 1);
      // Short ones, ones of several blocks of a chunk, and the rest of the file: they lie side by side and overlap.
      const std::uint64_t most[] = {10'000, 200'000, kChunkBytes, size};
      const std::uint64_t length = std::min(size - offset, random() % (most[random() % 4] + 1));
      wants.push_back({.file = file->first, .offset = offset, .into = std::string(length, 'x')});
    }
    const ReadOptions options{.threads = static_cast<int>(1 + random() % 3), .alone = random() % 2 == 0};
    const Status status = read(*reader, wants, options);
    ASSERT_TRUE(status) << status.error().message;
    for (const auto& want : wants) ASSERT_EQ(want.into, contents_[want.file].substr(want.offset, want.into.size()));
  }
}

TEST_F(ReaderTest, RangesAtTheBordersOfChunks) {
  const auto reader = open();
  const std::uint64_t size = contents_["__0_0.distcp"].size();
  for (const std::uint64_t border : {std::uint64_t{0}, kChunkBytes, 2 * kChunkBytes, size}) {
    for (const std::int64_t before : {0, 1, 4096}) {
      for (const std::int64_t after : {0, 1, 4096}) {
        const std::uint64_t begin = border - std::min<std::uint64_t>(border, static_cast<std::uint64_t>(before));
        const std::uint64_t end = std::min(size, border + static_cast<std::uint64_t>(after));
        std::vector<Want> wants = {{.file = "__0_0.distcp", .offset = begin, .into = std::string(end - begin, 'x')}};
        for (const bool alone : {false, true}) {
          std::ranges::fill(wants[0].into, 'x');
          ASSERT_TRUE(read(*reader, wants, {.alone = alone}));
          ASSERT_EQ(wants[0].into, contents_["__0_0.distcp"].substr(begin, end - begin));
        }
      }
    }
  }
}

TEST_F(ReaderTest, OnlyTheChunksThatAreNeededAreRead) {
  FaultStore counted(store_);
  const auto reader = AttemptReader::open(counted, kAttempt).value();
  ASSERT_TRUE(reader->part(0));
  counted.set_script({});
  std::vector<Want> wants = {{.file = "__0_0.distcp", .offset = kChunkBytes + 5, .into = std::string(10, 'x')},
                             {.file = "__0_0.distcp", .offset = kChunkBytes + 500, .into = std::string(10, 'x')}};
  ASSERT_TRUE(read(*reader, wants, {}));
  std::uint64_t bytes = 0;
  for (const auto& operation : counted.log()) {
    if (operation.name == "read_at") bytes += operation.bytes;
  }
  EXPECT_EQ(bytes, kChunkBytes) << "one chunk, once";
}

TEST_F(ReaderTest, RangesOutsideAFileAndUnknownFilesAreErrors) {
  const auto reader = open();
  const auto code = [&](const std::string& file, std::uint64_t offset, std::size_t length) {
    std::vector<Want> wants = {{.file = file, .offset = offset, .into = std::string(length, 'x')}};
    const Status status = read(*reader, wants, {.threads = 1});
    return status ? Code::kInternal : status.error().code;
  };
  EXPECT_EQ(code("__0_1.distcp", 4999, 2), Code::kDamaged);
  EXPECT_EQ(code("__0_1.distcp", 5001, 0), Code::kDamaged);
  EXPECT_EQ(code("__0_1.distcp", ~std::uint64_t{0}, 2), Code::kDamaged);
  EXPECT_EQ(code("__0_7.distcp", 0, 1), Code::kNotFound);
  EXPECT_EQ(code("__7_0.distcp", 0, 1), Code::kNotFound);
  EXPECT_EQ(code("__0.json", 0, 1), Code::kNotFound);
  EXPECT_EQ(code("../__0_0.distcp", 0, 1), Code::kNotFound);
  EXPECT_EQ(code("", 0, 1), Code::kNotFound);
}

TEST_F(ReaderTest, AnyFlippedBitOfAnyFileIsFoundAndTheFileNamed) {
  std::mt19937_64 random(test_seed());
  std::vector<std::string> names = {"__0_0.distcp",
                                    "__0_1.distcp",
                                    "__1_0.distcp",
                                    part_name(0),
                                    part_name(1),
                                    std::string(kMarkerName),
                                    std::string(kManifestName)};
  for (const auto& name : names) {
    const std::string good = store_.read(path(name), kMaxJsonBytes).value();
    for (int round = 0; round < 20; ++round) {
      std::string bad = good;
      const std::size_t bit = random() % (bad.size() * 8);
      bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ (1 << (bit % 8)));
      ASSERT_TRUE(put(name, bad));
      const auto reader = AttemptReader::open(store_, kAttempt);
      const Status status = reader ? (*reader)->verify(2, {}) : Status(reader.error());
      ASSERT_FALSE(status) << name << " bit " << bit;
      ASSERT_EQ(status.error().code, Code::kDamaged);
      ASSERT_NE(status.error().message.find(name), std::string::npos) << status.error().message;
    }
    ASSERT_TRUE(put(name, good));
  }
  EXPECT_TRUE(open()->verify(2, {}));
}

TEST_F(ReaderTest, AReadOfADamagedChunkFailsAndOfItsNeighboursDoesNot) {
  std::string bad = contents_["__0_0.distcp"];
  bad[kChunkBytes + 77] ^= 1;
  ASSERT_TRUE(put("__0_0.distcp", bad));
  const auto reader = open();
  for (const auto& [offset, good] :
       std::map<std::uint64_t, bool>{{0, true}, {kChunkBytes + 500, false}, {2 * kChunkBytes, true}}) {
    std::vector<Want> wants = {{.file = "__0_0.distcp", .offset = offset, .into = std::string(100, 'x')}};
    const Status status = read(*reader, wants, {.threads = 1});
    EXPECT_EQ(status.has_value(), good) << offset;
    if (!good) {
      EXPECT_NE(status.error().message.find("__0_0.distcp"), std::string::npos) << status.error().message;
    }
  }
  // A whole chunk goes straight to its place, and round the page cache through a buffer; it is checked all the same.
  std::vector<Want> whole = {{.file = "__0_0.distcp", .offset = kChunkBytes, .into = std::string(kChunkBytes, 'x')}};
  EXPECT_FALSE(read(*reader, whole, {.alone = false}));
  EXPECT_FALSE(read(*reader, whole, {.alone = true}));
}

TEST_F(ReaderTest, ShortLongAndMissingFilesAreFoundAndNamed) {
  for (const auto& [name, content] : contents_) {
    std::vector<std::string> changed = {content + "x"};
    if (!content.empty()) changed.push_back(content.substr(0, content.size() - 1));
    for (const auto& bad : changed) {
      ASSERT_TRUE(put(name, bad));
      const Status status = open()->verify(1, {});
      ASSERT_FALSE(status) << name;
      EXPECT_NE(status.error().message.find(name), std::string::npos) << status.error().message;
    }
    ASSERT_TRUE(store_.remove(path(name)));
    const Status status = open()->verify(1, {});
    ASSERT_FALSE(status) << name;
    EXPECT_NE(status.error().message.find(name), std::string::npos) << status.error().message;
    ASSERT_TRUE(put(name, content));
  }
}

TEST_F(ReaderTest, APartOfAnotherRankIsNotTakenForThisOnes) {
  const std::string zero = store_.read(path(part_name(0)), kMaxJsonBytes).value();
  ASSERT_TRUE(put(part_name(1), zero));
  manifest_.parts[1] = {.length = zero.size(), .crc = crc32c(bytes_of(zero)), .data_bytes = 0};
  ASSERT_TRUE(put(kManifestName, encode(manifest_)));
  EXPECT_TRUE(open()->part(0));
  const auto part = open()->part(1);
  ASSERT_FALSE(part);
  EXPECT_EQ(part.error().code, Code::kDamaged);
  EXPECT_EQ(open()->part(2).error().code, Code::kNotFound);
}

TEST_F(ReaderTest, APartThatListsAnotherRanksFilesIsRefused) {
  RankPart part{.rank = 1,
                .files = {{.name = "__0_1.distcp",
                           .length = 5000,
                           .chunk_crcs = {crc32c(bytes_of(contents_["__0_1.distcp"]))},
                           .slots = {}}}};
  const std::string document = encode(part);
  ASSERT_TRUE(put(part_name(1), document));
  manifest_.parts[1] = {.length = document.size(), .crc = crc32c(bytes_of(document)), .data_bytes = 0};
  ASSERT_TRUE(put(kManifestName, encode(manifest_)));
  EXPECT_FALSE(open()->part(1));
}

TEST_F(ReaderTest, AStoreThatFailsIsNoDamage) {
  FaultStore failing(store_);
  const auto reader = AttemptReader::open(failing, kAttempt).value();
  ASSERT_TRUE(reader->part(0));
  failing.set_script(fault_on({.name = "read_at", .path_part = "__0_1"}, Fault::fail(Code::kUnavailable)));
  std::vector<Want> wants = {{.file = "__0_1.distcp", .offset = 0, .into = std::string(10, 'x')}};
  const Status status = read(*reader, wants, {.threads = 1});
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, Code::kUnavailable);
  EXPECT_TRUE(read(*reader, wants, {.threads = 1})) << "and the next read is good";
}

TEST_F(ReaderTest, VerifyReportsAllBytesOnce) {
  std::atomic<std::uint64_t> most = 0;
  ASSERT_TRUE(open()->verify(2, [&](std::uint64_t done, std::uint64_t) {
    for (std::uint64_t seen = most; seen < done && !most.compare_exchange_weak(seen, done);) continue;
  }));
  std::uint64_t all = 0;
  for (const auto& [name, content] : contents_) all += content.size();
  EXPECT_EQ(most.load(), all);
}

}  // namespace
}  // namespace unbroken
