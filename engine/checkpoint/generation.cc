// How a life comes to be (the tests cite these steps):
//   G1. The directory `generations` is made and its name made durable in the root, so that a power loss cannot take
//       away the whole history at once.
//   G2. The claim is created whole under its number, if nothing is there. Of two starts one wins.
//   G3. The directory's entries are made durable. From here on every older life that looks sees that it is dead: it
//       commits nothing and removes nothing any more, but for what it had looked for already. (Now the start looks for
//       a checkpoint; see recovery.cc. What it sees is all that will ever be there of older lives, but for a marker
//       that is already under way: that one it does not wait for.)
//   G4. The record, which names the choice, is created whole.
//   G5. The directory's entries are made durable: from here on the life exists, and whatever an older life has
//       committed above this one's origin is off the branch. An unclear or refused G2 or G4 is settled by reading: our
//       life id there is success; another's is a lost race.
#include "checkpoint/generation.h"

#include <fmt/core.h>
#include <sys/random.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <functional>
#include <utility>

#include "base/crash_point.h"
#include "checkpoint/patience.h"
#include "checkpoint/sealed_json.h"

namespace unbroken {
namespace {

using nlohmann::json;

constexpr std::string_view kRecordSuffix = ".json";
constexpr std::string_view kClaimSuffix = ".claim";
constexpr std::size_t kDigits = 6;

std::string_view kind_name(Origin::Kind kind) {
  switch (kind) {
    case Origin::Kind::kFresh: return "fresh";
    case Origin::Kind::kAttempt: return "attempt";
    case Origin::Kind::kNone: return "none";
  }
  return "none";
}

Result<Origin> decode_origin(const json& value, std::string_view name) {
  JsonFields fields(value, name);
  Origin origin;
  const std::string kind = fields.text("kind");
  if (kind == kind_name(Origin::Kind::kAttempt)) {
    origin.kind = Origin::Kind::kAttempt;
    origin.key = {
        .step = fields.u64("step"), .generation = fields.u64("generation"), .sequence = fields.u64("sequence")};
    origin.attempt = fields.text("attempt");
  } else if (kind == kind_name(Origin::Kind::kFresh)) {
    origin.kind = Origin::Kind::kFresh;
  } else if (kind == kind_name(Origin::Kind::kNone)) {
    origin.kind = Origin::Kind::kNone;
  } else {
    fields.fail("has an origin of an unknown kind");
  }
  UNBROKEN_TRY(fields.finish());
  return origin;
}

std::optional<std::uint64_t> parse_number(std::string_view name) {
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), number);
  if (name.size() < kDigits || error != std::errc() || end != name.data() + name.size()) return std::nullopt;
  return number;
}

std::optional<std::uint64_t> parse_generation_name(std::string_view name) {
  for (const std::string_view suffix : {kRecordSuffix, kClaimSuffix}) {
    if (!name.ends_with(suffix)) continue;
    name.remove_suffix(suffix.size());
    return parse_number(name);
  }
  return std::nullopt;
}

Result<GenerationRecord> read_record(Store& store, std::uint64_t number) {
  const std::string path = generation_path(number);
  UNBROKEN_ASSIGN(const std::string document, store.read(path, kMaxJsonBytes));
  UNBROKEN_ASSIGN(GenerationRecord record, decode_generation(document, path));
  if (record.number != number) {
    return make_error(Code::kDamaged, fmt::format("read {}: it is the record of generation {}", path, record.number));
  }
  return record;
}

Result<GenerationClaim> read_claim(Store& store, std::uint64_t number) {
  const std::string path = claim_path(number);
  UNBROKEN_ASSIGN(const std::string document, store.read(path, kMaxJsonBytes));
  UNBROKEN_ASSIGN(const std::string body, unseal_json(document, path));
  UNBROKEN_ASSIGN(const json parsed, parse_json_object(body, path));
  JsonFields fields(parsed, path);
  GenerationClaim claim{.number = number,
                        .life_id = fields.text("life_id"),
                        .host = fields.text("host"),
                        .time_ms = fields.i64("time_ms")};
  UNBROKEN_TRY(fields.finish());
  return claim;
}

}  // namespace

std::string generation_path(std::uint64_t number) {
  return fmt::format("{}/{:06}{}", kGenerationsDirectory, number, kRecordSuffix);
}

std::string claim_path(std::uint64_t number) {
  return fmt::format("{}/{:06}{}", kGenerationsDirectory, number, kClaimSuffix);
}

std::string encode(const GenerationRecord& record) {
  json origin = {{"kind", kind_name(record.origin.kind)}};
  if (record.origin.kind == Origin::Kind::kAttempt) {
    origin["step"] = record.origin.key.step;
    origin["generation"] = record.origin.key.generation;
    origin["sequence"] = record.origin.key.sequence;
    origin["attempt"] = record.origin.attempt;
  }
  json refused = json::array();
  for (const auto& refusal : record.refused)
    refused.push_back({{"attempt", refusal.attempt}, {"reason", refusal.reason}});
  const json body = {{"format", kFormatVersion},  {"generation", record.number}, {"run_id", record.run_id},
                     {"life_id", record.life_id}, {"origin", std::move(origin)}, {"refused", std::move(refused)},
                     {"ranks", record.ranks},     {"host", record.host},         {"time_ms", record.time_ms}};
  return seal_json(body.dump(-1, ' ', false, json::error_handler_t::replace));
}

Result<GenerationRecord> decode_generation(std::string_view document, std::string_view name) {
  UNBROKEN_ASSIGN(const std::string body, unseal_json(document, name));
  UNBROKEN_ASSIGN(const json parsed, parse_json_object(body, name));
  JsonFields fields(parsed, name);
  if (fields.u64("format") > kFormatVersion) {
    return make_error(Code::kUnsupported,
                      fmt::format("read {}: its format version is newer than {}", name, kFormatVersion));
  }
  GenerationRecord record;
  record.number = fields.u64("generation");
  record.run_id = fields.text("run_id");
  record.life_id = fields.text("life_id");
  record.ranks = fields.u64("ranks");
  record.host = fields.text("host");
  record.time_ms = fields.i64("time_ms");
  UNBROKEN_TRY(fields.finish());
  UNBROKEN_ASSIGN(record.origin, decode_origin(fields.object("origin"), name));
  for (const auto& entry : fields.array("refused")) {
    JsonFields refusal(entry, name);
    record.refused.push_back({.attempt = refusal.text("attempt"), .reason = refusal.text("reason")});
    UNBROKEN_TRY(refusal.finish());
  }
  UNBROKEN_TRY(fields.finish());
  return record;
}

Result<std::vector<std::uint64_t>> list_generation_numbers(Store& store) {
  auto names = store.list(kGenerationsDirectory);
  std::vector<std::uint64_t> numbers;
  if (!names) {
    if (names.error().code == Code::kNotFound) return numbers;
    return std::move(names).error();
  }
  for (const auto& info : *names) {
    const auto number = parse_generation_name(info.name);
    if (number && !info.is_directory) numbers.push_back(*number);
  }
  std::sort(numbers.begin(), numbers.end());
  numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
  return numbers;
}

Result<GenerationEntry> read_generation(Store& store, std::uint64_t number) {
  GenerationEntry entry{.number = number, .record = std::nullopt, .error = {}, .claim_only = false};
  auto record = read_patiently([&] { return read_record(store, number); });
  if (record) {
    entry.record = std::move(*record);
  } else if (record.error().code == Code::kNotFound) {
    entry.error = describe_life(store, number) + " has chosen no checkpoint";
    entry.claim_only = true;
  } else if (record.error().code == Code::kDamaged || record.error().code == Code::kIo) {
    entry.error = record.error().message;
  } else {
    return std::move(record).error();
  }
  return entry;
}

Result<std::vector<GenerationEntry>> list_generations(Store& store) {
  UNBROKEN_ASSIGN(const auto numbers, list_generation_numbers(store));
  std::vector<GenerationEntry> entries;
  for (const std::uint64_t number : numbers) {
    UNBROKEN_ASSIGN(auto entry, read_generation(store, number));
    entries.push_back(std::move(entry));
  }
  return entries;
}

namespace {

// G2 and G4. `life_there` reads who has the name.
Status create_or_recognise(Store& store, const std::string& path, std::string_view document, std::string_view life_id,
                           const std::function<Result<std::pair<std::string, std::string>>()>& life_there) {
  const Status created = store.create_whole(path, bytes_of(document));
  if (created && store.abilities().create_if_absent) return {};
  auto there = life_there();
  if (!there) return created ? Status(std::move(there).error()) : created;
  const auto& [id, description] = *there;
  if (id == life_id) return {};
  return make_error(Code::kFenced,
                    fmt::format("start a new life: {} started at the same time and took the number; only one "
                                "start can own a run",
                                description));
}

}  // namespace

Status claim_generation(Store& store, const GenerationClaim& claim) {
  UNBROKEN_TRY(store.make_directory(kGenerationsDirectory));
  UNBROKEN_TRY(store.sync_directory(""));
  UNBROKEN_CRASH_POINT("generation.1.directory_made");
  const json body = {{"format", kFormatVersion},
                     {"generation", claim.number},
                     {"life_id", claim.life_id},
                     {"host", claim.host},
                     {"time_ms", claim.time_ms}};
  const std::string document = seal_json(body.dump(-1, ' ', false, json::error_handler_t::replace));
  UNBROKEN_TRY(create_or_recognise(store, claim_path(claim.number), document, claim.life_id,
                                   [&]() -> Result<std::pair<std::string, std::string>> {
                                     UNBROKEN_ASSIGN(const auto there, read_claim(store, claim.number));
                                     return std::pair(there.life_id, describe(there));
                                   }));
  UNBROKEN_CRASH_POINT("generation.2.claimed");
  UNBROKEN_TRY(store.sync_directory(kGenerationsDirectory));
  UNBROKEN_CRASH_POINT("generation.3.claim_durable");
  return {};
}

Status create_generation(Store& store, const GenerationRecord& record) {
  UNBROKEN_TRY(create_or_recognise(store, generation_path(record.number), encode(record), record.life_id,
                                   [&]() -> Result<std::pair<std::string, std::string>> {
                                     UNBROKEN_ASSIGN(const auto there, read_record(store, record.number));
                                     return std::pair(there.life_id, describe(there));
                                   }));
  UNBROKEN_CRASH_POINT("generation.4.record_created");
  UNBROKEN_TRY(store.sync_directory(kGenerationsDirectory));
  UNBROKEN_CRASH_POINT("generation.5.record_durable");
  return {};
}

std::string describe(const GenerationClaim& claim) {
  return fmt::format("generation {} (life {}, host {}, {})", claim.number, claim.life_id, claim.host,
                     format_time(claim.time_ms));
}

std::string describe_life(Store& store, std::uint64_t number) {
  if (const auto claim = read_claim(store, number)) return describe(*claim);
  if (const auto record = read_record(store, number)) return describe(*record);
  return fmt::format("generation {}", number);
}

std::string describe(const GenerationRecord& record) {
  return describe(GenerationClaim{
      .number = record.number, .life_id = record.life_id, .host = record.host, .time_ms = record.time_ms});
}

std::string format_time(std::int64_t time_ms) {
  const std::time_t seconds = static_cast<std::time_t>(time_ms / 1000);
  std::tm parts{};
  if (::gmtime_r(&seconds, &parts) == nullptr) return fmt::format("time {} ms", time_ms);
  return fmt::format("{:04}-{:02}-{:02} {:02}:{:02}:{:02} UTC", parts.tm_year + 1900, parts.tm_mon + 1, parts.tm_mday,
                     parts.tm_hour, parts.tm_min, parts.tm_sec);
}

std::int64_t now_ms() {
  using namespace std::chrono;
  return duration_cast<milliseconds>(system_clock::now().time_since_epoch()).count();
}

std::string random_hex(std::size_t bytes) {
  std::string raw(bytes, '\0');
  UNBROKEN_ASSERT(::getentropy(raw.data(), raw.size()) == 0);
  std::string digits;
  for (const char c : raw) digits += fmt::format("{:02x}", static_cast<unsigned char>(c));
  return digits;
}

}  // namespace unbroken
