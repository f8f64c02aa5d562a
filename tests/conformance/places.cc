#include "conformance/places.h"

#include <fmt/core.h>
#include <stdlib.h>
#include <unistd.h>

#include <limits>
#include <random>

#include "base/bytes.h"
#include "store/memory/memory_store.h"
#include "store/posix/posix_store.h"
#include "testing/fault_store.h"

namespace unbroken::conformance {

namespace fs = std::filesystem;

TemporaryDirectory::TemporaryDirectory(const fs::path& parent) {
  std::string pattern = parent / "unbroken-test-XXXXXX";
  const char* made = ::mkdtemp(pattern.data());
  EXPECT_NE(made, nullptr) << "no temporary directory in " << parent;
  path_ = pattern;
}

TemporaryDirectory::~TemporaryDirectory() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

namespace {

Opened open_posix(const fs::path& parent, PosixUse use) {
  if (::access(parent.c_str(), W_OK) != 0) return {};
  auto directory = std::make_shared<TemporaryDirectory>(parent);
  auto store = open_posix_store(directory->path(), {.create = true}, use);
  EXPECT_TRUE(is_ok(store));
  if (!store) return {};
  return {.ground = directory, .store = std::move(*store), .directory = directory->path()};
}

Place posix(std::string name, const fs::path& parent, PosixUse use = {}) {
  return {.name = std::move(name), .abilities = {}, .open = [parent, use] { return open_posix(parent, use); }};
}

Place memory() {
  return {.name = "memory", .abilities = {}, .open = [] {
            return Opened{.ground = nullptr, .store = std::make_unique<MemoryStore>()};
          }};
}

Place with_faults(const Place& place, FaultStoreOptions options = {}) {
  Place wrapped = place;
  wrapped.name = "fault_store_over_" + place.name;
  wrapped.abilities = {.create_if_absent = options.create_if_absent,
                       .atomic_publish = options.atomic_publish,
                       .directories = options.directories};
  wrapped.open = [open = place.open, options] {
    auto inner = std::make_shared<Opened>(open());
    if (!inner->store) return Opened{};
    return Opened{
        .ground = inner, .store = std::make_unique<FaultStore>(*inner->store, options), .directory = inner->directory};
  };
  return wrapped;
}

}  // namespace

std::vector<Place> all_places() {
  const fs::path disk = fs::temp_directory_path();
  const Place on_disk = posix("posix_disk", disk);
  const Place on_tmpfs = posix("posix_tmpfs", "/dev/shm");
  Place weak = with_faults(memory(), {.atomic_publish = false, .create_if_absent = false, .directories = false});
  weak.name = "fault_store_with_few_abilities";
  return {
      on_disk,
      on_tmpfs,
      posix("posix_without_openat2", disk, {.openat2 = false}),
      posix("posix_without_direct_io", disk, {.direct_io = false}),
      posix("posix_without_link", disk, {.link = false}),
      posix("posix_with_o_excl_alone", disk, {.link = false, .rename_noreplace = false}),
      memory(),
      with_faults(on_disk),
      with_faults(on_tmpfs),
      with_faults(memory()),
      weak,
  };
}

void StoreTest::SetUp() {
  opened_ = GetParam().open();
  if (!opened_.store) GTEST_SKIP() << "this machine has no place for " << GetParam().name;
}

void StoreTest::write(std::string_view path, std::string_view content) {
  auto writer = store().create(path, content.size());
  ASSERT_TRUE(is_ok(writer));
  ASSERT_TRUE(is_ok((*writer)->write_at(0, bytes_of(content))));
  ASSERT_TRUE(is_ok((*writer)->finish(content.size())));
}

void StoreTest::publish(std::string_view path, std::string_view content) {
  ASSERT_TRUE(is_ok(store().publish(path, bytes_of(content))));
}

void StoreTest::make(std::string_view directory) { ASSERT_TRUE(is_ok(store().make_directory(directory))); }

std::string StoreTest::content(std::string_view path) {
  auto content = store().read(path, std::numeric_limits<std::uint64_t>::max());
  return content ? std::move(*content) : fmt::format("<{}>", content.error().message);
}

std::vector<std::string> StoreTest::names(std::string_view directory) {
  const auto entries = store().list(directory);
  EXPECT_TRUE(is_ok(entries));
  std::vector<std::string> names;
  if (!entries) return names;
  for (const ObjectInfo& entry : *entries) names.push_back(entry.name);
  return names;
}

std::string random_bytes(std::size_t size, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

}  // namespace unbroken::conformance
