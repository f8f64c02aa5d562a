#include "cli/root.h"

#include <fmt/core.h>

#include <algorithm>
#include <filesystem>

#include "checkpoint/recovery.h"
#include "cli/foreign.h"
#include "cli/terminal.h"

namespace unbroken::cli {
namespace {

using json = nlohmann::ordered_json;

constexpr std::size_t kRootsInHint = 3;

std::string hint_for(const Error& error) {
  switch (error.code) {
    case Code::kNotFound: return "check the path: a root is the directory that the run's Checkpointer was given";
    case Code::kInvalidArgument: return "a root is a directory: the one that the run's Checkpointer was given";
    case Code::kPermission: return "ask as a user who may read the files and search the directories";
    case Code::kUnsupported: return "see `unbroken --version`; what a newer version wrote, a newer version reads";
    case Code::kUnavailable: return "the place does not answer; try again";
    default: return {};
  }
}

bool newer_first(const Row& a, const Row& b) {
  const bool a_foreign = a.info.state == AttemptState::kForeign;
  const bool b_foreign = b.info.state == AttemptState::kForeign;
  if (a_foreign != b_foreign) return b_foreign;
  if (a.info.key != b.info.key) return a.info.key > b.info.key;
  return a.info.name > b.info.name;
}

void add_refusal(Row& row, const std::vector<GenerationEntry>& generations) {
  for (const auto& entry : generations) {
    if (!entry.record) continue;
    for (const auto& refusal : entry.record->refused) {
      if (refusal.attempt != row.info.name) continue;
      row.refused_by = entry.number;
      row.refusal = refusal.reason;
      return;
    }
  }
}

Row unreadable_row(std::string_view name, Error error) {
  Row row{.info = {.name = std::string(name)}, .unreadable = std::move(error)};
  if (const auto named = parse_attempt_directory(name)) {
    row.info.key = {.step = named->step, .generation = named->generation, .sequence = 0};
  }
  return row;
}

bool is_listed(const Row& row) { return parse_attempt_directory(row.info.name) || row.info.has_marker; }

// Below a directory that is no root there may be some: "runs" was named, and not "runs/7".
std::string roots_below(Store& store, const std::vector<ObjectInfo>& entries) {
  std::string found;
  std::size_t count = 0;
  for (const auto& entry : entries) {
    if (!entry.is_directory) continue;
    const auto inner = store.stat(fmt::format("{}/{}", entry.name, kGenerationsDirectory));
    if (!inner || !inner->is_directory) continue;
    if (++count > kRootsInHint) return found + ", ...";
    found += fmt::format("{}{}/{}", found.empty() ? "" : ", ", store.url(), entry.name);
  }
  return found;
}

Trouble no_run_root(Store& store, const std::vector<ObjectInfo>& entries) {
  Error error = make_error(Code::kNotFound, fmt::format("look at {}: it is not a run root: there is no {}/ and no "
                                                        "checkpoint in it",
                                                        store.url(), kGenerationsDirectory));
  if (entries.empty()) {
    error.message += "; it is empty";
    return {std::move(error), "the first start of a run makes its root; was it given another path?", kUnreadable};
  }
  if (const auto path = attempt_path(store)) {
    error.message += "; it is the directory of one checkpoint";
    return {std::move(error), fmt::format("unbroken verify {}, or unbroken ls {}", store.url(), path->parent),
            kUnreadable};
  }
  const std::string roots = roots_below(store, entries);
  return {std::move(error),
          roots.empty() ? hint_for(make_error(Code::kNotFound, "")) : "there are run roots in it: " + roots,
          kUnreadable};
}

Choice choose_among(const Catalog& catalog) { return choose(catalog, {}, {}); }

// The rows that can be read, as the engine knows them, and their places in the survey.
struct Readable {
  Catalog catalog;
  std::vector<std::size_t> rows;
};

Readable readable_part(const Survey& survey) {
  Readable readable{.catalog = {.generations = survey.generations, .attempts = {}}, .rows = {}};
  for (std::size_t i = 0; i < survey.rows.size(); ++i) {
    if (survey.rows[i].unreadable) continue;
    readable.catalog.attempts.push_back(survey.rows[i].info);
    readable.rows.push_back(i);
  }
  return readable;
}

// Newer than the row, or any when there is none: what a start would have to pass over.
std::vector<std::string> passed_over(const Survey& survey, std::size_t end) {
  std::vector<std::string> lines;
  for (std::size_t i = 0; i < end; ++i) {
    const Row& row = survey.rows[i];
    lines.push_back(fmt::format("{} ({}: {})", row.info.name, row.state(), row.reason()));
  }
  return lines;
}

}  // namespace

Trouble unreadable(Error error) {
  std::string hint = hint_for(error);
  return {std::move(error), std::move(hint), kUnreadable};
}

int report(const Trouble& trouble) {
  say_error(trouble.error.message);
  say_hint(trouble.hint);
  return trouble.exit_code;
}

std::string_view Row::state() const { return unreadable ? "unreadable" : state_name(info.state); }

std::string Row::reason() const {
  std::string text = unreadable ? unreadable->message : info.reason;
  if (refused_by == 0) return text;
  return fmt::format("{}{}refused by generation {}: {}", text, text.empty() ? "" : "; ", refused_by, refusal);
}

bool Row::has_key() const { return info.manifest || parse_attempt_directory(info.name); }

Outcome<std::unique_ptr<Store>> open_root(const std::string& url) {
  auto store = open_store(url, {.create = false});
  if (store) return std::move(*store);
  Error error = std::move(store).error();
  if (error.code == Code::kUnsupported)
    return std::unexpected(Trouble{std::move(error)});  // it names what is supported
  std::error_code ignored;
  const std::filesystem::path path(url);
  if (error.code == Code::kInvalidArgument && std::filesystem::is_regular_file(path, ignored)) {
    const auto parent = path.has_parent_path() ? path.parent_path().string() : ".";
    return std::unexpected(
        Trouble{std::move(error), "name the directory of the run, not a file; this one is in " + parent});
  }
  return std::unexpected(unreadable(std::move(error)));
}

Result<Row> look_at(Store& store, std::string_view name, const std::vector<GenerationEntry>& generations) {
  auto info = inspect_attempt(store, name, generations, Depth::kLengths);
  // Removed while it was looked at: what is left then is not damage.
  if (info && info->state == AttemptState::kDamaged) info = inspect_attempt(store, name, generations, Depth::kLengths);
  if (!info && info.error().code == Code::kNotFound) return std::move(info).error();
  Row row = info ? Row{.info = std::move(*info)} : unreadable_row(name, std::move(info).error());
  if (row.info.state == AttemptState::kIncomplete && !row.info.has_marker && !row.unreadable &&
      row.info.key.generation == newest_generation(generations)) {
    row.info.reason += ", or is still under way";
  }
  add_refusal(row, generations);
  return row;
}

Outcome<Survey> survey(Store& store) {
  Survey result{.root = std::string(store.url()), .generations = {}, .rows = {}};
  const auto entries = store.list("");
  if (!entries) return std::unexpected(unreadable(entries.error()));
  auto generations = list_generations(store);
  if (!generations) return std::unexpected(unreadable(std::move(generations).error()));
  result.generations = std::move(*generations);
  bool is_run_root = false;
  for (const auto& entry : *entries) {
    if (!entry.is_directory) continue;
    if (entry.name == kGenerationsDirectory) {
      is_run_root = true;
      continue;
    }
    auto row = look_at(store, entry.name, result.generations);
    // Removed since it was listed; or neither an attempt nor a checkpoint, and so none of our business.
    if (!row || !is_listed(*row)) continue;
    result.rows.push_back(std::move(*row));
  }
  if (!is_run_root && result.rows.empty()) return std::unexpected(no_run_root(store, *entries));
  std::sort(result.rows.begin(), result.rows.end(), newer_first);
  return result;
}

std::optional<std::size_t> newest_usable(const Survey& survey) {
  const Readable readable = readable_part(survey);
  const Choice choice = choose_among(readable.catalog);
  if (choice.kind != Choice::Kind::kAttempt) return std::nullopt;
  return readable.rows[choice.attempt];
}

NextStart next_start(const Survey& survey) {
  for (const auto& row : survey.rows) {
    if (row.unreadable) {
      return {NextStart::Kind::kError, 0, "it cannot look at all attempts: " + row.unreadable->message, {}};
    }
  }
  const Readable readable = readable_part(survey);
  const Choice choice = choose_among(readable.catalog);
  const bool found = choice.kind == Choice::Kind::kAttempt;
  const std::size_t end = found ? readable.rows[choice.attempt] : survey.rows.size();
  // As in recovery.cc: progress in a newer format is not given up for an older checkpoint.
  for (std::size_t i = 0; i < end; ++i) {
    const AttemptInfo& info = survey.rows[i].info;
    if (info.state == AttemptState::kUnsupported && info.on_branch) {
      return {NextStart::Kind::kError, 0, info.reason + "; a newer version of Unbroken is needed", {}};
    }
  }
  if (found) {
    return {NextStart::Kind::kAttempt, end,
            end == 0 ? "the newest checkpoint" : "the newest usable checkpoint on the branch",
            passed_over(survey, end)};
  }
  if (choice.kind == Choice::Kind::kFresh) {
    return {NextStart::Kind::kFresh,
            0,
            survey.generations.empty() ? "no life has begun here yet"
                                       : "no checkpoint was complete since the last fresh start",
            {}};
  }
  return {NextStart::Kind::kError, 0, "checkpoints were made, but none can be loaded", choice.evidence};
}

std::optional<AttemptPath> attempt_path(Store& store) {
  const auto is_there = [&](std::string_view name) { return store.stat(name).has_value(); };
  if (is_there(kGenerationsDirectory)) return std::nullopt;
  // The store's own address is absolute and without "."; a link to a directory is followed to where it leads.
  std::string whole(store.url());
  std::error_code failed;
  const auto canonical = std::filesystem::canonical(whole, failed);
  if (!failed) whole = canonical.string();
  const std::size_t slash = whole.rfind('/');
  if (slash == std::string::npos || slash + 1 == whole.size()) return std::nullopt;
  AttemptPath path{.parent = slash == 0 ? "/" : whole.substr(0, slash), .name = whole.substr(slash + 1)};
  const bool is_attempt = is_there(kMarkerName) || is_there(kManifestName) || parse_attempt_directory(path.name);
  const auto alone = markers_of_ranks(store, "");
  if (!is_attempt && (!alone || alone->empty())) return std::nullopt;
  return path;
}

json to_json(const Row& row) {
  const AttemptInfo& info = row.info;
  json object = {
      {"attempt", info.name},  {"state", row.state()}, {"reason", row.reason()},      {"step", nullptr},
      {"generation", nullptr}, {"sequence", nullptr},  {"on_branch", info.on_branch}, {"has_marker", info.has_marker},
      {"bytes", info.bytes},   {"files", info.files},  {"world_size", nullptr},       {"time_ms", nullptr},
      {"run_id", nullptr},     {"life_id", nullptr},   {"parent", nullptr},           {"refused_by", nullptr}};
  if (row.has_key()) {
    object["step"] = info.key.step;
    object["generation"] = info.key.generation;
  }
  if (info.manifest) {
    object["sequence"] = info.key.sequence;
    object["world_size"] = info.manifest->parts.size();
    object["time_ms"] = info.manifest->time_ms;
    object["run_id"] = info.manifest->run_id;
    object["life_id"] = info.manifest->life_id;
    if (!info.manifest->parent.empty()) object["parent"] = info.manifest->parent;
  }
  if (row.refused_by != 0) object["refused_by"] = row.refused_by;
  return object;
}

void print_json(const json& document) { print(document.dump(2, ' ', true, json::error_handler_t::replace) + "\n"); }

}  // namespace unbroken::cli
