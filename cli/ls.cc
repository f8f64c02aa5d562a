// `unbroken ls`: the attempts below a root.
#include <fmt/core.h>

#include <algorithm>
#include <map>

#include "base/bytes.h"
#include "cli/command.h"
#include "cli/root.h"
#include "cli/table.h"

namespace unbroken::cli {
namespace {

constexpr std::size_t kRowsUnlessAll = 30;

Tone tone_of(const Row& row) {
  if (row.unreadable) return Tone::kBad;
  switch (row.info.state) {
    case AttemptState::kComplete: return row.refused_by == 0 ? Tone::kGood : Tone::kWarning;
    case AttemptState::kDamaged:
    case AttemptState::kUnsupported: return Tone::kBad;
    case AttemptState::kIncomplete:
    case AttemptState::kOrphan:
    case AttemptState::kRetired: return Tone::kWarning;
    case AttemptState::kForeign: return Tone::kPlain;
  }
  return Tone::kPlain;
}

void print_table(const Survey& survey, std::optional<std::size_t> newest, std::size_t shown) {
  Table table({{""},
               {"STEP", true},
               {"GEN", true},
               {"STATE"},
               {"SIZE", true},
               {"FILES", true},
               {"AGE", true},
               {"RANKS", true},
               {"ATTEMPT"},
               {"REASON"}});
  const std::int64_t now = now_ms();
  for (std::size_t i = 0; i < shown; ++i) {
    const Row& row = survey.rows[i];
    const AttemptInfo& info = row.info;
    const auto known = [](bool is_known, std::string text) { return is_known ? std::move(text) : std::string("-"); };
    table.add({{newest == i ? "*" : ""},
               {known(row.has_key(), fmt::format("{}", info.key.step))},
               {known(row.has_key(), fmt::format("{}", info.key.generation))},
               {std::string(row.state()), tone_of(row)},
               {known(!row.unreadable, format_bytes(info.bytes))},
               {known(!row.unreadable, fmt::format("{}", info.files))},
               {info.manifest ? format_age(info.manifest->time_ms, now) : "-"},
               {info.manifest ? fmt::format("{}", info.manifest->parts.size()) : "-"},
               {info.name},
               {row.reason()}});
  }
  table.print();
}

std::string count_states(const Survey& survey) {
  std::map<std::string_view, std::size_t> counts;
  for (const auto& row : survey.rows) ++counts[row.state()];
  std::string text;
  for (const auto& [state, count] : counts) text += fmt::format("{}{} {}", text.empty() ? "" : ", ", count, state);
  return text;
}

void say_summary(const Survey& survey, std::optional<std::size_t> newest, std::size_t shown) {
  if (shown < survey.rows.size()) {
    say(fmt::format("{} older ones are not shown; --all shows them", survey.rows.size() - shown));
  }
  if (!survey.rows.empty()) say(count_states(survey));
  if (newest) {
    const AttemptInfo& info = survey.rows[*newest].info;
    say(fmt::format("* newest usable: step {} ({})", info.key.step, info.name));
  } else {
    say(survey.rows.empty() ? "no checkpoint is here yet"
                            : "no checkpoint here is usable; `unbroken why` says what a start would do");
  }
}

}  // namespace

int ls(const LsOptions& options) {
  const auto store = open_root(options.root);
  if (!store) return report(store.error());
  const auto found = survey(**store);
  if (!found) return report(found.error());
  const auto newest = newest_usable(*found);
  if (options.json) {
    nlohmann::ordered_json attempts = nlohmann::ordered_json::array();
    for (const auto& row : found->rows) attempts.push_back(to_json(row));
    nlohmann::ordered_json document = {{"root", found->root}, {"run_id", nullptr}, {"newest_usable", nullptr}};
    if (const auto run = run_id_of(found->generations)) document["run_id"] = *run;
    if (newest) document["newest_usable"] = found->rows[*newest].info.name;
    document["attempts"] = std::move(attempts);
    print_json(document);
  } else {
    const std::size_t shown = options.all ? found->rows.size() : std::min(found->rows.size(), kRowsUnlessAll);
    if (shown > 0) print_table(*found, newest, shown);
    say_summary(*found, newest, shown);
  }
  for (const auto& row : found->rows) {
    if (row.unreadable) return report(unreadable(*row.unreadable));
  }
  return kOk;
}

}  // namespace unbroken::cli
