// How a life's record is created (the tests cite these steps):
//   G1. The directory `generations` is made and its name made durable in the root, so that a power loss cannot take
//       away the whole history at once.
//   G2. The record is created whole under its number, if nothing is there. Of two starts one wins.
//   G3. The directory's entries are made durable: from here on the life exists, and whatever an older life commits
//       above this one's origin is off the branch.
// An unclear or refused G2 is settled by reading: our life id there is success; another's is a lost race.
#include "checkpoint/generation.h"

#include <fmt/core.h>
#include <sys/random.h>

#include <algorithm>
#include <charconv>
#include <chrono>

#include "base/crash_point.h"
#include "checkpoint/patience.h"
#include "checkpoint/sealed_json.h"

namespace unbroken {
namespace {

using nlohmann::json;

constexpr std::string_view kSuffix = ".json";
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

std::optional<std::uint64_t> parse_generation_name(std::string_view name) {
  if (!name.ends_with(kSuffix)) return std::nullopt;
  name.remove_suffix(kSuffix.size());
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), number);
  if (name.size() < kDigits || error != std::errc() || end != name.data() + name.size()) return std::nullopt;
  return number;
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

}  // namespace

std::string generation_path(std::uint64_t number) {
  return fmt::format("{}/{:06}{}", kGenerationsDirectory, number, kSuffix);
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
                     {"voided", record.voided},   {"ranks", record.ranks},       {"host", record.host},
                     {"time_ms", record.time_ms}};
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
  for (const auto& number : fields.array("voided")) {
    if (number.is_number_unsigned()) record.voided.push_back(number.get<std::uint64_t>());
    else fields.fail("voids something that is not a generation");
  }
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
  return numbers;
}

Result<GenerationEntry> read_generation(Store& store, std::uint64_t number) {
  GenerationEntry entry{.number = number, .record = std::nullopt, .error = {}};
  auto record = read_patiently([&] { return read_record(store, number); });
  if (record) {
    entry.record = std::move(*record);
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
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (entries[i].record) void_lives(entries, entries[i].record->voided);
  }
  return entries;
}

void void_lives(std::span<GenerationEntry> entries, std::span<const std::uint64_t> numbers) {
  for (auto& entry : entries) {
    if (std::find(numbers.begin(), numbers.end(), entry.number) != numbers.end()) entry.voided = true;
  }
}

Status create_generation(Store& store, const GenerationRecord& record) {
  UNBROKEN_TRY(store.make_directory(kGenerationsDirectory));
  UNBROKEN_TRY(store.sync_directory(""));
  UNBROKEN_CRASH_POINT("generation.1.directory_made");

  const std::string path = generation_path(record.number);
  const Status created = store.create_whole(path, bytes_of(encode(record)));
  if (!created || !store.abilities().create_if_absent) {
    auto there = read_record(store, record.number);
    if (there && there->life_id != record.life_id) {
      return make_error(
          Code::kFenced,
          fmt::format("start a new life as generation {}: {} started at the same time and took the number; "
                      "only one start can own a run",
                      record.number, describe(*there)));
    }
    if (!there && created) return std::move(there).error();
    if (!there) return created.error();
  }
  UNBROKEN_CRASH_POINT("generation.2.record_created");
  UNBROKEN_TRY(store.sync_directory(kGenerationsDirectory));
  UNBROKEN_CRASH_POINT("generation.3.record_durable");
  return {};
}

std::string describe(const GenerationRecord& record) {
  return fmt::format("generation {} (life {}, host {}, {})", record.number, record.life_id, record.host,
                     format_time(record.time_ms));
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
