#include "checkpoint/manifest.h"

#include <fmt/core.h>

#include <charconv>

#include "checkpoint/sealed_json.h"

namespace unbroken {
namespace {

using nlohmann::json;

constexpr std::uint64_t kMostRanks = 1 << 20;
constexpr std::uint64_t kLongestFile = std::uint64_t{1} << 62;  // far from where sums of lengths overflow
constexpr std::size_t kAttemptDigits = 8;

std::string hex32(std::uint32_t value) { return fmt::format("{:08x}", value); }

json parse_own(const std::string& text) {
  auto parsed = json::parse(text, nullptr, false);
  return parsed.is_discarded() ? json(nullptr) : parsed;
}

bool parse_number(std::string_view digits, std::uint64_t& value) {
  if (digits.empty() || (digits.size() > 1 && digits.front() == '0')) return false;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  return error == std::errc() && end == digits.data() + digits.size();
}

Status check_version(JsonFields& fields, std::string_view name) {
  const std::uint64_t version = fields.u64("format");
  UNBROKEN_TRY(fields.finish());
  if (version > kFormatVersion) {
    return make_error(
        Code::kUnsupported,
        fmt::format("read {}: format version {} is newer than {}, the newest that this version of Unbroken "
                    "reads; upgrade unbroken",
                    name, version, kFormatVersion));
  }
  return {};
}

// Slots are written as [offset, length, data_offset, data_length].
Status read_slots(const json& list, std::string_view name, ShardFile& file) {
  const auto damaged = [&] {
    return make_error(Code::kDamaged, fmt::format("read {}: a slot of {} does not lie in its file", name, file.name));
  };
  std::uint64_t end = 0;
  for (const auto& entry : list) {
    if (!entry.is_array() || entry.size() != 4) return damaged();
    for (const auto& number : entry) {
      if (!number.is_number_unsigned()) return damaged();
    }
    const Slot slot{entry[0].get<std::uint64_t>(), entry[1].get<std::uint64_t>(), entry[2].get<std::uint64_t>(),
                    entry[3].get<std::uint64_t>()};
    if (slot.offset < end || slot.length > file.length || slot.offset > file.length - slot.length) return damaged();
    if (slot.data_length > slot.length || slot.data_offset > slot.length - slot.data_length) return damaged();
    end = slot.offset + slot.length;
    file.slots.push_back(slot);
  }
  return {};
}

Status read_chunk_crcs(const std::string& digits, std::string_view name, ShardFile& file) {
  const std::uint64_t chunks = (file.length + kChunkBytes - 1) / kChunkBytes;
  const auto damaged = [&] {
    return make_error(Code::kDamaged, fmt::format("read {}: the checksums of {} are incomplete", name, file.name));
  };
  if (digits.size() != chunks * 8) return damaged();
  for (std::uint64_t i = 0; i < chunks; ++i) {
    std::uint32_t crc = 0;
    const char* begin = digits.data() + i * 8;
    const auto [end, error] = std::from_chars(begin, begin + 8, crc, 16);
    if (error != std::errc() || end != begin + 8) return damaged();
    file.chunk_crcs.push_back(crc);
  }
  return {};
}

bool is_plain_name(std::string_view name) {
  return !name.empty() && name.size() < 256 && name != "." && name != ".." &&
         name.find('/') == std::string_view::npos && name.find('\0') == std::string_view::npos;
}

}  // namespace

std::string shard_file_name(std::uint64_t rank, std::uint64_t number) {
  return fmt::format("__{}_{}.distcp", rank, number);
}

std::string part_name(std::uint64_t rank) { return fmt::format("__{}.json", rank); }

std::string attempt_directory(const AttemptKey& key, std::string_view attempt) {
  return fmt::format("step-{}-g{}-{}", key.step, key.generation, attempt);
}

std::optional<AttemptName> parse_attempt_directory(std::string_view name) {
  constexpr std::string_view kPrefix = "step-";
  if (!name.starts_with(kPrefix)) return std::nullopt;
  name.remove_prefix(kPrefix.size());
  const std::size_t first = name.find('-');
  if (first == std::string_view::npos) return std::nullopt;
  const std::size_t second = name.find('-', first + 1);
  if (second == std::string_view::npos || second < first + 3 || name[first + 1] != 'g') return std::nullopt;
  AttemptName parsed;
  parsed.attempt = name.substr(second + 1);
  if (parsed.attempt.size() != kAttemptDigits ||
      parsed.attempt.find_first_not_of("0123456789abcdef") != std::string::npos) {
    return std::nullopt;
  }
  if (!parse_number(name.substr(0, first), parsed.step)) return std::nullopt;
  if (!parse_number(name.substr(first + 2, second - first - 2), parsed.generation)) return std::nullopt;
  return parsed;
}

std::string encode(const RankPart& part) {
  json files = json::array();
  for (const auto& file : part.files) {
    std::string crcs;
    crcs.reserve(file.chunk_crcs.size() * 8);
    for (const std::uint32_t crc : file.chunk_crcs) crcs += hex32(crc);
    json slots = json::array();
    for (const auto& slot : file.slots) slots.push_back({slot.offset, slot.length, slot.data_offset, slot.data_length});
    files.push_back({{"name", file.name},
                     {"length", file.length},
                     {"chunk_bytes", kChunkBytes},
                     {"chunk_crc32c", crcs},
                     {"slots", std::move(slots)}});
  }
  const json body = {{"format", kFormatVersion}, {"rank", part.rank}, {"files", std::move(files)}};
  return seal_json(body.dump());
}

Result<RankPart> decode_part(std::string_view document, std::string_view name) {
  UNBROKEN_ASSIGN(const std::string body, unseal_json(document, name));
  UNBROKEN_ASSIGN(const json parsed, parse_json_object(body, name));
  JsonFields fields(parsed, name);
  UNBROKEN_TRY(check_version(fields, name));
  RankPart part{.rank = fields.u64("rank"), .files = {}};
  for (const auto& entry : fields.array("files")) {
    JsonFields file_fields(entry, name);
    ShardFile file;
    file.name = file_fields.text("name");
    file.length = file_fields.u64("length");
    if (file_fields.u64("chunk_bytes") != kChunkBytes) file_fields.fail("has chunks of an unknown size");
    const std::string crcs = file_fields.text("chunk_crc32c");
    const json& slots = file_fields.array("slots");
    if (!is_plain_name(file.name)) file_fields.fail("names a file that is not in the directory");
    if (file.length > kLongestFile) file_fields.fail("has a file of an impossible length");
    UNBROKEN_TRY(file_fields.finish());
    UNBROKEN_TRY(read_chunk_crcs(crcs, name, file));
    UNBROKEN_TRY(read_slots(slots, name, file));
    part.files.push_back(std::move(file));
  }
  UNBROKEN_TRY(fields.finish());
  return part;
}

std::string manifest_body(const Manifest& manifest) {
  json parts = json::array();
  for (const auto& part : manifest.parts) parts.push_back({part.length, hex32(part.crc), part.data_bytes});
  const json body = {{"format", kFormatVersion},
                     {"run_id", manifest.run_id},
                     {"life_id", manifest.life_id},
                     {"step", manifest.key.step},
                     {"generation", manifest.key.generation},
                     {"sequence", manifest.key.sequence},
                     {"attempt", manifest.attempt},
                     {"parent", manifest.parent},
                     {"time_ms", manifest.time_ms},
                     {"world_size", manifest.parts.size()},
                     {"metadata", {{"length", manifest.metadata_length}, {"crc32c", hex32(manifest.metadata_crc)}}},
                     {"parts", std::move(parts)},
                     {"mesh", parse_own(manifest.mesh)},
                     {"loader", parse_own(manifest.loader)},
                     {"versions", parse_own(manifest.versions)}};
  return body.dump();
}

std::string encode(const Manifest& manifest) { return seal_json(manifest_body(manifest)); }

Result<Manifest> parse_manifest_body(std::string_view body, std::string_view name) {
  UNBROKEN_ASSIGN(const json parsed, parse_json_object(body, name));
  JsonFields fields(parsed, name);
  UNBROKEN_TRY(check_version(fields, name));
  Manifest manifest;
  manifest.run_id = fields.text("run_id");
  manifest.life_id = fields.text("life_id");
  manifest.key = {
      .step = fields.u64("step"), .generation = fields.u64("generation"), .sequence = fields.u64("sequence")};
  manifest.attempt = fields.text("attempt");
  manifest.parent = fields.text("parent");
  manifest.time_ms = fields.i64("time_ms");
  const std::uint64_t world_size = fields.u64("world_size");
  JsonFields metadata(fields.object("metadata"), name);
  manifest.metadata_length = metadata.u64("length");
  manifest.metadata_crc = metadata.hex32("crc32c");
  manifest.mesh = fields.raw("mesh");
  manifest.loader = fields.raw("loader");
  manifest.versions = fields.raw("versions");
  const json& parts = fields.array("parts");
  UNBROKEN_TRY(fields.finish());
  UNBROKEN_TRY(metadata.finish());
  for (const auto& entry : parts) {
    if (!entry.is_array() || entry.size() != 3 || !entry[0].is_number_unsigned() || !entry[2].is_number_unsigned()) {
      return make_error(Code::kDamaged, fmt::format("read {}: a part is not listed as it should be", name));
    }
    const json crc = {{"crc32c", entry[1]}};
    JsonFields crc_field(crc, name);
    manifest.parts.push_back({.length = entry[0].get<std::uint64_t>(),
                              .crc = crc_field.hex32("crc32c"),
                              .data_bytes = entry[2].get<std::uint64_t>()});
    UNBROKEN_TRY(crc_field.finish());
  }
  if (world_size != manifest.parts.size() || world_size == 0 || world_size > kMostRanks) {
    return make_error(Code::kDamaged,
                      fmt::format("read {}: {} ranks, but {} parts", name, world_size, manifest.parts.size()));
  }
  return manifest;
}

Result<Manifest> decode_manifest(std::string_view document, std::string_view name) {
  UNBROKEN_ASSIGN(const std::string body, unseal_json(document, name));
  return parse_manifest_body(body, name);
}

std::string encode(const Retirement& retirement) {
  const json body = {
      {"life_id", retirement.life_id}, {"generation", retirement.generation}, {"time_ms", retirement.time_ms}};
  return seal_json(body.dump());
}

Result<Retirement> decode_retirement(std::string_view document, std::string_view name) {
  UNBROKEN_ASSIGN(const std::string body, unseal_json(document, name));
  UNBROKEN_ASSIGN(const json parsed, parse_json_object(body, name));
  JsonFields fields(parsed, name);
  Retirement retirement{
      .life_id = fields.text("life_id"), .generation = fields.u64("generation"), .time_ms = fields.i64("time_ms")};
  UNBROKEN_TRY(fields.finish());
  return retirement;
}

}  // namespace unbroken
