// The commit protocol. Before step 6 is done the checkpoint does not exist; after it, it is whole.
//
//   1. The coordinator has posted that a save is due at this step, with the attempt's random id (decision.cc). The id
//      makes a directory of its own for every attempt: two tries at one step never share a file or contest a marker.
//   2. Every rank writes its shard files and then its part of the manifest, to the end, bytes durable. An error, that
//      of the final sync included, condemns the attempt: it is never tried again on the same file, because a failed
//      fsync says nothing about what a second one means.
//   3. Every rank makes the directory's entries durable, and the directory's own name in the root. Without this step
//      the marker could outlive the files it vouches for.
//   4. Every rank votes on the board: hash of the structure, length and checksum of its part, or its error. The
//      coordinator waits with a deadline, so it knows who failed, who is missing and who differs; any of these fails
//      the attempt, on all ranks, by name.
//   5. The coordinator writes the root of the manifest as in 2 and 3. It vouches for `.metadata` and all parts by
//      checksum, so it comes before the marker.
//   6. The coordinator looks at the generations: a newer life means that this one is dead and must not commit
//      (fencing). Then it publishes the marker, whole, and makes its name durable. An unclear answer is settled by
//      reading: our bytes there is success, nothing there is tried again. Past the deadline, or when the name cannot be
//      made durable, the outcome is UNKNOWN: it is said so and nothing of the attempt is removed.
//      Then it looks once more. A start claims its number before it looks for markers, so one that went on without
//      this marker is seen here, and the step is not called durable; nothing is removed, for that start may have seen
//      the marker and gone on from it.
//   7. The ranks learn the outcome. Only then may retention run (retention.cc).
//
// An attempt that failed before 6 is removed once every rank has stopped writing to it; otherwise retention removes it
// later. Killed before 6: garbage, to Unbroken and to stock DCP alike (no `.metadata`). Killed in 6 on a store without
// atomic publish: a torn marker, shorter than the manifest says, which never counts. Killed after 6: complete.
#include "checkpoint/commit.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/crash_point.h"
#include "base/crc32c.h"
#include "checkpoint/generation.h"
#include "checkpoint/sealed_json.h"
#include "checkpoint/shard.h"

namespace unbroken {
namespace {

using nlohmann::json;

// Once an error is known, how long the others' votes are still awaited, so that the directory can be removed.
constexpr double kGraceSeconds = 5;
constexpr double kSliceSeconds = 0.25;
constexpr auto kSettleInterval = std::chrono::milliseconds(100);

// Readers refuse longer documents.
Status check_readable(const std::string& path, std::uint64_t bytes, std::uint64_t most) {
  if (bytes <= most) return {};
  return make_error(Code::kUnsupported,
                    fmt::format("write {}: {} are more than can be read again ({}); the state has too many entries",
                                path, format_bytes(bytes), format_bytes(most)));
}

double seconds_since(Deadline::Clock::time_point start) {
  return std::chrono::duration<double>(Deadline::Clock::now() - start).count();
}

// What the coordinator tells the others at the end.
std::string encode_outcome(const SaveOutcome& outcome) {
  return json{{"state", outcome_name(outcome.state)},
              {"code", static_cast<int>(outcome.code)},
              {"reason", outcome.reason},
              {"structure_differs", outcome.structure_differs}}
      .dump(-1, ' ', false, json::error_handler_t::replace);
}

Status decode_outcome(std::string_view text, SaveOutcome& outcome) {
  UNBROKEN_ASSIGN(const json parsed, parse_json_object(text, "the outcome of a save"));
  JsonFields fields(parsed, "the outcome of a save");
  const std::string state = fields.text("state");
  const std::uint64_t code = fields.u64("code");
  outcome.reason = fields.text("reason");
  UNBROKEN_TRY(fields.finish());
  outcome.state = state == "durable"   ? SaveOutcome::State::kDurable
                  : state == "unknown" ? SaveOutcome::State::kUnknown
                                       : SaveOutcome::State::kFailed;
  outcome.code = code <= static_cast<std::uint64_t>(Code::kInternal) ? static_cast<Code>(code) : Code::kInternal;
  outcome.structure_differs = parsed.value("structure_differs", false);
  return {};
}

class Attempt {
 public:
  Attempt(Store& store, Board& board, const LifeContext& life, const Image* image, const SaveRequest& request)
      : store_(store),
        board_(board),
        life_(life),
        image_(image),
        request_(request),
        directory_(attempt_directory(request.key, request.attempt)) {}

  SaveOutcome run() {
    outcome_.attempt_path = directory_;
    const auto start = Deadline::Clock::now();
    const bool coordinator = life_.rank == 0;
    Status fence;
    if (coordinator) fence = check_fence(store_, life_);
    const Vote vote = fence ? take_part_without_exceptions() : refuse(fence.error());
    outcome_.write_seconds = seconds_since(start);
    const auto voted = Deadline::Clock::now();
    const Status told = cast(vote);
    if (coordinator) {
      coordinate(vote, fence ? told : fence);
    } else {
      learn();  // also where the answer to the vote was lost: it may count all the same
    }
    board_.set(key(fmt::format("done/{}", life_.rank)), "1")
        .ignore("a rank that is not seen as free only defers saves");
    outcome_.commit_seconds = seconds_since(voted);
    return std::move(outcome_);
  }

 private:
  std::string key(std::string_view what) const { return attempt_key(life_, request_.attempt, what); }
  std::string path(std::string_view name) const { return join_path(directory_, name); }

  void fail(const Error& error) {
    outcome_.state = SaveOutcome::State::kFailed;
    outcome_.code = error.code;
    outcome_.reason = error.message;
  }

  // What failed may have failed because a newer life removed the attempt; then it is better to say so.
  void fail_or_fenced(const Error& error) {
    const Status fence = check_fence(store_, life_);
    fail(!fence && fence.error().code == Code::kFenced ? fence.error() : error);
  }

  static Vote refuse(const Error& error) {
    return {.structure = {}, .part = {}, .object_slots = {}, .error = error.message, .code = error.code};
  }

  // Memory and threads can run out anywhere; the others must hear of it all the same.
  Vote take_part_without_exceptions() {
    try {
      return take_part();
    } catch (const std::exception& exception) {
      return refuse(make_error(Code::kUnavailable,
                               fmt::format("write checkpoint step {}: {}", request_.key.step, exception.what())));
    }
  }

  bool cancelled() const { return request_.cancelled != nullptr && request_.cancelled->load(); }

  Vote take_part() {
    if (!request_.failure.empty() || image_ == nullptr) {
      return refuse(make_error(Code::kInvalidArgument, request_.failure));
    }
    for (const auto& [name, text] :
         {std::pair("the loader's state", &request_.loader), std::pair("the mesh", &request_.mesh),
          std::pair("the versions", &request_.versions)}) {
      if (Status status = check_exact_json(*text, fmt::format("save {} with step {}", name, request_.key.step));
          !status) {
        return refuse(status.error());
      }
    }
    Vote vote{.structure = request_.structure,
              .part = {},
              .object_slots = request_.object_slots,
              .error = {},
              .code = Code::kInternal};
    auto part = write_part();
    if (!part) return refuse(std::move(part).error().in(fmt::format("write checkpoint step {}", request_.key.step)));
    vote.part = *part;
    outcome_.bytes = vote.part.data_bytes + vote.part.length;
    return vote;
  }

  // Steps 2 and 3.
  Result<PartEntry> write_part() {
    UNBROKEN_TRY(store_.make_directory(directory_));
    UNBROKEN_CRASH_POINT("commit.2.directory_made");
    UNBROKEN_ASSIGN(const PartEntry entry, write_rank(store_, directory_, *image_, request_.threads));
    UNBROKEN_TRY(store_.sync_directory(directory_));
    UNBROKEN_TRY(store_.sync_directory(""));
    UNBROKEN_CRASH_POINT("commit.3.directory_durable");
    return entry;
  }

  // Step 4, on every rank.
  Status cast(const Vote& vote) {
    UNBROKEN_TRY(board_.set(key(fmt::format("vote/{}", life_.rank)), encode_vote(vote)));
    UNBROKEN_CRASH_POINT("commit.4.voted");
    return {};
  }

  // Step 4, on the coordinator.
  Result<std::vector<std::optional<Vote>>> collect() {
    std::vector<std::string> keys;
    for (std::uint64_t rank = 0; rank < life_.world_size; ++rank) keys.push_back(key(fmt::format("vote/{}", rank)));
    std::vector<std::optional<Vote>> votes(keys.size());
    const auto read = [&](Deadline deadline) -> Result<bool> {
      UNBROKEN_ASSIGN(const auto texts, board_collect(board_, keys, deadline));
      bool error = false;
      for (std::size_t rank = 0; rank < texts.size(); ++rank) {
        if (!texts[rank] || votes[rank]) continue;
        UNBROKEN_ASSIGN(votes[rank], decode_vote(*texts[rank]));
        error = error || !votes[rank]->error.empty();
      }
      return error;
    };
    // In slices, so that an error that is known early ends the wait early.
    const Deadline deadline = Deadline::after_seconds(request_.vote_timeout_seconds);
    const auto all_voted = [&] {
      return std::all_of(votes.begin(), votes.end(), [](const auto& v) { return v.has_value(); });
    };
    bool first = true;  // a deadline that has passed already is no reason not to look
    while (!all_voted() && (first || !deadline.passed())) {
      first = false;
      if (cancelled()) {
        UNBROKEN_ASSIGN([[maybe_unused]] const bool last, read(Deadline::after_seconds(kGraceSeconds)));
        break;
      }
      const double slice = std::min(kSliceSeconds, std::chrono::duration<double>(deadline.left()).count());
      UNBROKEN_ASSIGN(const bool error, read(Deadline::after_seconds(slice)));
      if (!error) continue;
      const double grace = std::min(kGraceSeconds, std::chrono::duration<double>(deadline.left()).count());
      UNBROKEN_ASSIGN([[maybe_unused]] const bool again, read(Deadline::after_seconds(grace)));
      break;
    }
    return votes;
  }

  // Where votes were not counted: for all that is known the others are still writing, and have not read the last
  // outcome.
  void miss_all_others() {
    for (std::uint64_t rank = 1; rank < life_.world_size; ++rank) outcome_.missing.push_back(rank);
  }

  void coordinate(const Vote& own, const Status& able) {
    if (!able) {
      fail(able.error());
      miss_all_others();
    } else if (auto votes = collect(); !votes) {
      fail(votes.error());
      miss_all_others();
    } else {
      Count count = count_votes(*votes, own.structure);
      outcome_.missing = std::move(count.missing);
      outcome_.structure_differs = count.structure_differs;
      if (!count.carried) {
        fail_or_fenced(make_error(count.code, std::move(count.reason)));
      } else if (Status status = commit(*votes); !status) {
        if (publishing_ && status.error().code == Code::kUnknown) {
          fail(status.error());
          outcome_.state = SaveOutcome::State::kUnknown;
        } else {
          fail_or_fenced(status.error());
        }
      } else {
        outcome_.state = SaveOutcome::State::kDurable;
      }
      const bool all_stopped = outcome_.missing.empty();
      if (outcome_.state == SaveOutcome::State::kFailed && all_stopped && !published_) {
        store_.remove_directory(directory_).ignore("retention removes what is left; the attempt has failed anyway");
      }
    }
    const Status told = board_.set(key("outcome"), encode_outcome(outcome_));
    told.ignore("ranks that hear nothing report the save as unknown; what is on the disk decides");
  }

  Status commit(std::span<const std::optional<Vote>> votes) {
    UNBROKEN_CRASH_POINT("commit.4.votes_counted");
    std::vector<std::optional<std::string>> slots;
    for (const auto& vote : votes) slots.push_back(vote->object_slots);
    UNBROKEN_ASSIGN(const std::string marker, request_.metadata(slots));
    UNBROKEN_TRY(check_readable(path(kMarkerName), marker.size(), kMaxMetadataBytes));
    UNBROKEN_TRY(write_root(votes, marker));
    UNBROKEN_TRY(check_fence(store_, life_));
    UNBROKEN_CRASH_POINT("commit.6.generations_checked");
    UNBROKEN_TRY(publish(marker));
    published_ = true;
    Status overtaken = check_fence(store_, life_);
    if (!overtaken && overtaken.error().code != Code::kFenced) {
      return make_error(Code::kUnknown,
                        fmt::format("commit {}: the marker is there, but a newer start may have gone on "
                                    "without it: {}",
                                    directory_, overtaken.error().message));
    }
    return overtaken;
  }

  // Step 5.
  Status write_root(std::span<const std::optional<Vote>> votes, std::string_view marker) {
    Manifest manifest{.run_id = life_.run_id,
                      .life_id = life_.life_id,
                      .key = request_.key,
                      .attempt = request_.attempt,
                      .parent = request_.parent,
                      .time_ms = now_ms(),
                      .metadata_length = marker.size(),
                      .metadata_crc = crc32c(bytes_of(marker)),
                      .parts = {},
                      .mesh = request_.mesh,
                      .loader = request_.loader,
                      .versions = request_.versions};
    for (const auto& vote : votes) manifest.parts.push_back(vote->part);
    const std::string document = encode(manifest);
    UNBROKEN_TRY(check_readable(path(kManifestName), document.size(), kMaxJsonBytes));
    // What could not be read again must not be committed.
    if (const auto read = decode_manifest(document, path(kManifestName)); !read) return read.error();
    UNBROKEN_TRY(write_small_file(store_, path(kManifestName), document));
    UNBROKEN_CRASH_POINT("commit.5.manifest_written");
    UNBROKEN_TRY(store_.sync_directory(directory_));
    UNBROKEN_CRASH_POINT("commit.5.manifest_durable");
    return {};
  }

  // Step 6, after the look at the generations.
  Status publish(std::string_view marker) {
    publishing_ = true;
    const Deadline deadline = Deadline::after_seconds(request_.settle_timeout_seconds);
    while (true) {
      const Status published = store_.publish(path(kMarkerName), bytes_of(marker));
      if (published && store_.abilities().atomic_publish) break;
      const auto there = store_.read(path(kMarkerName), kMaxMetadataBytes);
      if (there && *there == marker) break;
      const bool absent = !there && there.error().code == Code::kNotFound;
      if (absent && !published && !published.error().retryable && published.error().code != Code::kUnknown) {
        return published.error();
      }
      if (deadline.passed()) {
        const std::string cause = published ? "the marker is not what was written" : published.error().message;
        return make_error(Code::kUnknown,
                          fmt::format("commit {}: it is unclear whether the marker is there: {}", directory_, cause));
      }
      std::this_thread::sleep_for(kSettleInterval);
    }
    if (Status durable = make_marker_durable(); !durable) {
      return make_error(Code::kUnknown,
                        fmt::format("commit {}: the marker is there, but may not survive a loss of power: {}",
                                    directory_, durable.error().message));
    }
    return {};
  }

  Status make_marker_durable() {
    UNBROKEN_CRASH_POINT("commit.6.marker_published");
    UNBROKEN_TRY(store_.sync_directory(directory_));
    UNBROKEN_CRASH_POINT("commit.6.marker_durable");
    return {};
  }

  // Step 7, on all ranks but the coordinator. Its deadline for votes began when it voted, at most one deadline after
  // us.
  void learn() {
    const double wait = 2 * request_.vote_timeout_seconds + request_.settle_timeout_seconds;
    Deadline deadline = Deadline::after_seconds(wait);
    bool leaving = false;
    auto text = board_wait(board_, key("outcome"), Deadline::after_seconds(std::min(kSliceSeconds, wait)));
    while (!text && text.error().code == Code::kDeadline && !deadline.passed()) {
      if (cancelled() && !leaving) deadline = Deadline::after_seconds(kGraceSeconds);
      leaving = cancelled();
      const double left = std::chrono::duration<double>(deadline.left()).count();
      text = board_wait(board_, key("outcome"), Deadline::after_seconds(std::min(kSliceSeconds, left)));
    }
    Status status = text ? decode_outcome(*text, outcome_) : Status(text.error());
    if (status) return;
    outcome_.state = SaveOutcome::State::kUnknown;
    outcome_.code = Code::kUnknown;
    outcome_.reason =
        fmt::format("commit {}: the coordinator (rank 0) gave no word: {}", directory_, status.error().message);
  }

  Store& store_;
  Board& board_;
  const LifeContext& life_;
  const Image* image_;
  const SaveRequest& request_;
  std::string directory_;
  SaveOutcome outcome_;
  bool publishing_ = false;  // the marker may be there
  bool published_ = false;   // the marker is there
};

}  // namespace

std::string_view outcome_name(SaveOutcome::State state) {
  switch (state) {
    case SaveOutcome::State::kDurable: return "durable";
    case SaveOutcome::State::kFailed: return "failed";
    case SaveOutcome::State::kUnknown: return "unknown";
  }
  return "unknown";
}

SaveOutcome commit_attempt(Store& store, Board& board, const LifeContext& life, const Image* image,
                           const SaveRequest& request) {
  return Attempt(store, board, life, image, request).run();
}

Status check_fence(Store& store, const LifeContext& life) {
  UNBROKEN_ASSIGN(const auto numbers, list_generation_numbers(store));
  if (std::find(numbers.begin(), numbers.end(), life.generation) == numbers.end()) {
    return make_error(Code::kFenced,
                      fmt::format("save to {}: the record of this life (generation {}) is gone; the root was "
                                  "removed or replaced, so this run stops",
                                  store.url(), life.generation));
  }
  UNBROKEN_ASSIGN(const auto own, read_generation(store, life.generation));
  if (own.record && (own.record->life_id != life.life_id || own.record->run_id != life.run_id)) {
    return make_error(
        Code::kFenced,
        fmt::format("save to {}: generation {} there is run {}, life {}; this process is run {}, "
                    "life {}; the root belongs to another run, so this one stops",
                    store.url(), life.generation, own.record->run_id, own.record->life_id, life.run_id, life.life_id));
  }
  if (numbers.back() > life.generation) {
    return make_error(Code::kFenced,
                      fmt::format("save to {}: {} has taken over this run; this life is generation {} and stops",
                                  store.url(), describe_life(store, numbers.back()), life.generation));
  }
  return {};
}

std::string attempt_key(const LifeContext& life, std::string_view attempt, std::string_view what) {
  return fmt::format("g{}/{}/{}", life.generation, attempt, what);
}

std::string encode_vote(const Vote& vote) {
  json body = {{"structure", vote.structure}, {"error", vote.error},  {"code", static_cast<int>(vote.code)},
               {"length", vote.part.length},  {"crc", vote.part.crc}, {"data_bytes", vote.part.data_bytes}};
  if (vote.object_slots) body["object_slots"] = *vote.object_slots;
  return body.dump(-1, ' ', false, json::error_handler_t::replace);
}

Result<Vote> decode_vote(std::string_view text) {
  UNBROKEN_ASSIGN(const json parsed, parse_json_object(text, "a vote"));
  JsonFields fields(parsed, "a vote");
  Vote vote{.structure = fields.text("structure"),
            .part = {.length = fields.u64("length"),
                     .crc = static_cast<std::uint32_t>(fields.u64("crc")),
                     .data_bytes = fields.u64("data_bytes")},
            .object_slots = {},
            .error = fields.text("error"),
            .code = Code::kInternal};
  const std::uint64_t code = fields.u64("code");
  if (code <= static_cast<std::uint64_t>(Code::kInternal)) vote.code = static_cast<Code>(code);
  if (parsed.contains("object_slots")) vote.object_slots = fields.text("object_slots");
  UNBROKEN_TRY(fields.finish());
  return vote;
}

Count count_votes(std::span<const std::optional<Vote>> votes, std::string_view structure) {
  Count count;
  const auto add = [&](const std::string& reason) { count.reason += (count.reason.empty() ? "" : "; ") + reason; };
  std::optional<Code> code;
  for (std::uint64_t rank = 0; rank < votes.size(); ++rank) {
    const auto& vote = votes[rank];
    if (!vote) {
      count.missing.push_back(rank);
      add(fmt::format("rank {} had not finished when the save was given up", rank));
      code = code.value_or(Code::kDeadline);
    } else if (!vote->error.empty()) {
      add(fmt::format("rank {}: {}", rank, vote->error));
      code = code.value_or(vote->code);
    } else if (!structure.empty() && vote->structure != structure) {
      count.structure_differs = true;
      add(fmt::format("rank {} saves another structure than rank 0 (the next save plans anew)", rank));
      code = code.value_or(Code::kInvalidArgument);
    }
  }
  count.carried = count.reason.empty();
  if (code) count.code = *code;
  return count;
}

}  // namespace unbroken
