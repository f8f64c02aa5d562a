#include "testing/small_run.h"

#include <fmt/core.h>

#include <algorithm>
#include <thread>

#include "base/bytes.h"
#include "base/crc32c.h"
#include "base/memory_board.h"
#include "checkpoint/shard.h"

namespace unbroken {
namespace {

constexpr std::uint64_t kTensors = 2;
constexpr std::uint64_t kTensorBytes = 3000;
constexpr std::size_t kHeadBytes = 64;
constexpr std::string_view kTail = "the end of an archive";
constexpr std::uint64_t kMaxFileBytes = 64 * kKiB;

// Bytes that differ with every argument, and from place to place.
std::string some_bytes(std::uint64_t seed, std::size_t length) {
  std::string bytes(length, '\0');
  std::uint64_t state = seed * 0x9e3779b97f4a7c15 + 1;
  for (auto& byte : bytes) {
    state = state * 6364136223846793005 + 1442695040888963407;
    byte = static_cast<char>(state >> 56);
  }
  return bytes;
}

std::string tensor_bytes(std::uint64_t step, std::uint64_t generation, std::uint64_t rank, std::uint64_t number) {
  return some_bytes(((step * 1000 + generation) * 1000 + rank) * 10 + number, kTensorBytes + 8 * number);
}

// Of another length at every step; ends as a ZIP archive does.
std::string object_archive(std::uint64_t step, std::uint64_t generation, std::uint64_t rank) {
  std::string archive = some_bytes((step * 1000 + generation) * 1000 + rank + 7, 50 + step % 90);
  archive += "PK\x05\x06";
  archive.append(18, '\0');
  return archive;
}

std::string head_of(std::uint64_t rank, std::uint64_t number) {
  std::string head = fmt::format("tensor {} of rank {}", number, rank);
  head.resize(kHeadBytes, '.');
  return head;
}

std::string marker_text(std::uint64_t step, std::span<const std::optional<std::string>> slots) {
  std::string text = fmt::format("metadata of step {}", step);
  for (const auto& slot : slots) text += fmt::format("; {}", slot.value_or("as planned"));
  return text;
}

Status check_slot(AttemptReader& reader, const std::string& file, const Slot& slot, std::string_view expected) {
  std::string found(slot.length, '\0');
  const ReadRange range{.file = file, .offset = slot.offset, .into = std::as_writable_bytes(std::span(found))};
  UNBROKEN_TRY(reader.read(std::span(&range, 1), {.threads = 1}));
  // An object's archive is padded, and its end record says by how much.
  const std::size_t compared = slot.data_length > 0 ? expected.size() : expected.size() - 2;
  if (found.size() < expected.size() || found.compare(0, compared, expected, 0, compared) != 0) {
    return make_error(Code::kDamaged, fmt::format("{}/{}: the bytes at {} are not those of this step and life",
                                                  reader.attempt(), file, slot.offset));
  }
  return {};
}

Status check_rank(AttemptReader& reader, std::uint64_t rank) {
  const AttemptKey& key = reader.manifest().key;
  UNBROKEN_ASSIGN(const RankPart* part, reader.part(rank));
  const auto damaged = [&](std::string_view how) {
    return make_error(Code::kDamaged, fmt::format("{}: rank {} {}", reader.attempt(), rank, how));
  };
  if (part->files.size() != 2 || part->files[0].slots.size() != kTensors || part->files[1].slots.size() != 1) {
    return damaged("does not have the files that it saved");
  }
  for (std::uint64_t number = 0; number < kTensors; ++number) {
    const std::string expected =
        head_of(rank, number) + tensor_bytes(key.step, key.generation, rank, number) + std::string(kTail);
    const Slot& slot = part->files[0].slots[number];
    if (slot.length != expected.size()) return damaged("has a tensor of another length");
    UNBROKEN_TRY(check_slot(reader, part->files[0].name, slot, expected));
  }
  return check_slot(reader, part->files[1].name, part->files[1].slots[0],
                    object_archive(key.step, key.generation, rank));
}

Verdict verdict_of(const Error& error) {
  if (error.retryable) return Verdict::kUnreachable;
  return error.code == Code::kInvalidArgument ? Verdict::kFailed : Verdict::kDamaged;
}

class RankThread {
 public:
  RankThread(Store& store, Board& board, const LifePlan& plan, std::uint64_t rank)
      : store_(store), board_(board), plan_(plan), rank_(rank) {}

  RankLife run() {
    if (Status status = start(); !status) {
      life_.error = status.error();
      life_.start.reset();
      return std::move(life_);
    }
    auto image = SmallImage::create(rank_);
    if (!image) {
      life_.error = image.error();
      return std::move(life_);
    }
    Saver saver(store_, board_, *life_.start,
                {.rank = rank_,
                 .world_size = plan_.world_size,
                 .keep = plan_.keep,
                 .vote_timeout_seconds = plan_.timeout_seconds,
                 .decision_timeout_seconds = plan_.timeout_seconds});
    for (const std::uint64_t step : plan_.saves) save(saver, *image, step);
    return std::move(life_);
  }

 private:
  Status start() {
    Recovery recovery(store_, board_,
                      {.rank = rank_,
                       .world_size = plan_.world_size,
                       .host = "test",
                       .step = plan_.from_step,
                       .allow_fresh = plan_.allow_fresh,
                       .timeout_seconds = plan_.settle_timeout_seconds,
                       .load_timeout_seconds = plan_.timeout_seconds});
    UNBROKEN_ASSIGN(life_.start, recovery.begin());
    while (true) {
      Status loaded;
      // A rank that did not save at that time has nothing of its own to load.
      if (!life_.start->fresh) {
        auto reader = AttemptReader::open(store_, life_.start->attempt);
        if (!reader) {
          loaded = reader.error();
        } else if (rank_ < (*reader)->manifest().parts.size()) {
          loaded = check_rank(**reader, rank_);
        }
      }
      const Verdict verdict = loaded ? Verdict::kLoaded : verdict_of(loaded.error());
      UNBROKEN_ASSIGN(auto next, recovery.settle(verdict, loaded ? "" : loaded.error().message));
      if (!next) {
        if (!loaded) life_.wrong = loaded.error().message;
        return {};
      }
      life_.start = std::move(next);
    }
  }

  void save(Saver& saver, SmallImage& image, std::uint64_t step) {
    // An explicit save waits for ranks that are still busy with the last one; nothing else holds the ranks in step.
    const auto decision = saver.decide(step, {.due = true, .is_explicit = true});
    if (!decision || decision->action != StepDecision::Action::kSave) {
      life_.saves.push_back({});
      life_.saves.back().reason = decision ? std::string(action_name(decision->action)) : decision.error().message;
      return;
    }
    auto slots = image.stage(step, life_.start->generation);
    SaveRequest request = small_request(step, *decision, slots ? *slots : std::nullopt);
    if (!slots) request.failure = slots.error().message;
    request.settle_timeout_seconds = plan_.settle_timeout_seconds;
    life_.saves.push_back(saver.commit(image.image(), std::move(request)));
    if (life_.saves.back().state != SaveOutcome::State::kDurable) return;
    auto retired = saver.retain();
    if (!retired) {
      life_.retention_errors.push_back(std::move(retired).error());
    } else {
      life_.retired.insert(life_.retired.end(), retired->begin(), retired->end());
    }
  }

  Store& store_;
  Board& board_;
  const LifePlan& plan_;
  std::uint64_t rank_;
  RankLife life_;
};

Status add_contents(Store& store, const std::string& directory, std::string& text) {
  UNBROKEN_ASSIGN(const auto entries, store.list(directory));
  for (const auto& entry : entries) {
    const std::string path = join_path(directory, entry.name);
    if (path == kGenerationsDirectory) continue;
    if (entry.is_directory) {
      text += path + "/\n";
      UNBROKEN_TRY(add_contents(store, path, text));
    } else {
      UNBROKEN_ASSIGN(const std::string content, store.read(path, kMaxJsonBytes));
      text += fmt::format("{} {} {:08x}\n", path, content.size(), crc32c(bytes_of(content)));
    }
  }
  return {};
}

}  // namespace

Result<SmallImage> SmallImage::create(std::uint64_t rank) {
  ImageBuilder builder(rank, kMaxFileBytes);
  for (std::uint64_t number = 0; number < kTensors; ++number) {
    UNBROKEN_ASSIGN(
        [[maybe_unused]] const std::size_t slot,
        builder.add_tensor(head_of(rank, number), tensor_bytes(0, 0, rank, number).size(), std::string(kTail)));
  }
  builder.add_object(object_archive(0, 0, rank).size());
  UNBROKEN_ASSIGN(Image image, std::move(builder).build(1));
  return SmallImage(std::move(image), rank);
}

Result<std::optional<std::string>> SmallImage::stage(std::uint64_t step, std::uint64_t generation) {
  std::vector<std::string> tensors;
  std::vector<CopyIn> copies;
  for (std::uint64_t number = 0; number < kTensors; ++number)
    tensors.push_back(tensor_bytes(step, generation, rank_, number));
  for (std::size_t slot = 0; slot < tensors.size(); ++slot) {
    copies.push_back({.slot = slot, .source = bytes_of(tensors[slot]).data(), .bytes = tensors[slot].size()});
  }
  UNBROKEN_TRY(image_.stage(copies, 1));
  const std::string archive = object_archive(step, generation, rank_);
  const std::string_view view = archive;
  UNBROKEN_ASSIGN(const bool moved, image_.place_objects(std::span(&view, 1)));
  return moved ? std::optional(image_.object_slots()) : std::nullopt;
}

SaveRequest small_request(std::uint64_t step, const StepDecision& decision, std::optional<std::string> object_slots) {
  SaveRequest request;
  request.key = {.step = step, .generation = 0, .sequence = decision.sequence};
  request.attempt = decision.attempt;
  request.structure = "small";
  request.object_slots = std::move(object_slots);
  request.metadata = [step](std::span<const std::optional<std::string>> slots) -> Result<std::string> {
    return marker_text(step, slots);
  };
  request.threads = 1;
  return request;
}

Status check_small_bytes(Store& store, std::string_view attempt, std::optional<std::uint64_t> rank) {
  UNBROKEN_ASSIGN(const auto reader, AttemptReader::open(store, attempt));
  if (rank) return check_rank(*reader, *rank);
  UNBROKEN_ASSIGN(const std::string marker, reader->metadata());
  if (!marker.starts_with(fmt::format("metadata of step {};", reader->manifest().key.step))) {
    return make_error(Code::kDamaged, fmt::format("{}: its marker is of another step: {}", attempt, marker));
  }
  for (std::uint64_t r = 0; r < reader->manifest().parts.size(); ++r) UNBROKEN_TRY(check_rank(*reader, r));
  return reader->verify(1, {});
}

std::vector<std::string> check_small_root(Store& store) {
  std::vector<std::string> wrong;
  const auto entries = store.list("");
  if (!entries) return {entries.error().message};
  for (const auto& entry : *entries) {
    if (!entry.is_directory || entry.name == kGenerationsDirectory) continue;
    const auto marker = store.stat(join_path(entry.name, kMarkerName));
    if (!marker) continue;
    const auto reader = AttemptReader::open(store, entry.name);
    if (reader && marker->size < (*reader)->manifest().metadata_length) continue;  // torn: committed nothing
    if (const Status status = check_small_bytes(store, entry.name); !status) wrong.push_back(status.error().message);
  }
  return wrong;
}

std::vector<RankLife> live(std::span<Store* const> stores, const LifePlan& plan) {
  MemoryBoard board;
  std::vector<RankLife> lives(plan.world_size);
  std::vector<std::jthread> threads;
  const auto run = [&](std::uint64_t rank) {
    lives[rank] = RankThread(*stores[stores.size() == 1 ? 0 : rank], board, plan, rank).run();
  };
  for (std::uint64_t rank = 1; rank < plan.world_size; ++rank) threads.emplace_back(run, rank);
  run(0);
  threads.clear();
  return lives;
}

std::vector<RankLife> live(Store& store, const LifePlan& plan) {
  Store* const pointer = &store;
  return live(std::span(&pointer, 1), plan);
}

Result<Start> start_small(Store& store, std::optional<std::uint64_t> from_step) {
  MemoryBoard board;
  Recovery recovery(store, board, {.host = "test", .step = from_step, .timeout_seconds = 1, .load_timeout_seconds = 1});
  UNBROKEN_ASSIGN(Start start, recovery.begin());
  while (true) {
    const Status loaded = start.fresh ? Status() : check_small_bytes(store, start.attempt);
    UNBROKEN_ASSIGN(auto next, recovery.settle(loaded ? Verdict::kLoaded : verdict_of(loaded.error()),
                                               loaded ? "" : loaded.error().message));
    if (!next) return start;
    start = std::move(*next);
  }
}

std::string list_contents(Store& store) {
  std::string text;
  if (const Status status = add_contents(store, "", text); !status) text += status.error().message;
  return text;
}

}  // namespace unbroken
