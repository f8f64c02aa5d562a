// `unbroken why`: the lives of a run, what each started from and why, and what a start would do now.
#include <fmt/core.h>

#include <map>

#include "checkpoint/branch.h"
#include "cli/command.h"
#include "cli/root.h"
#include "cli/terminal.h"

namespace unbroken::cli {
namespace {

using json = nlohmann::ordered_json;

struct Life {
  const GenerationEntry* entry = nullptr;
  std::vector<const Row*> saved;     // what it wrote
  std::vector<const Row*> orphaned;  // what its start put off the branch
};

// The life whose start made the attempt an orphan: the first with which the branch rule turns. 0: no life did.
std::uint64_t orphaned_by(const AttemptInfo& info, const std::vector<GenerationEntry>& generations) {
  if (!info.manifest) return 0;
  bool was_on_branch = false;
  for (std::size_t count = 1; count <= generations.size(); ++count) {
    const bool on_branch =
        judge_branch(info.key, info.manifest->run_id, info.manifest->life_id, std::span(generations).first(count))
            .on_branch;
    if (was_on_branch && !on_branch) return generations[count - 1].number;
    was_on_branch = on_branch;
  }
  return 0;
}

std::vector<Life> lives_of(const Survey& survey) {
  std::map<std::uint64_t, std::size_t> places;
  std::vector<Life> lives;
  for (const auto& entry : survey.generations) {
    places.emplace(entry.number, lives.size());
    lives.push_back({.entry = &entry, .saved = {}, .orphaned = {}});
  }
  for (const auto& row : survey.rows) {
    if (row.has_key()) {
      if (const auto place = places.find(row.info.key.generation); place != places.end()) {
        lives[place->second].saved.push_back(&row);
      }
    }
    if (row.info.state != AttemptState::kOrphan) continue;
    if (const auto place = places.find(orphaned_by(row.info, survey.generations)); place != places.end()) {
      lives[place->second].orphaned.push_back(&row);
    }
  }
  return lives;
}

std::string describe_origin(const Origin& origin) {
  switch (origin.kind) {
    case Origin::Kind::kFresh: return "started fresh, at step 0";
    case Origin::Kind::kAttempt: return fmt::format("went on from step {} ({})", origin.key.step, origin.attempt);
    case Origin::Kind::kNone: return "found nothing that it could load, and ended";
  }
  return {};
}

void print_line(std::string_view text) { print(printable(text) + "\n"); }

void print_life(const Life& life) {
  const GenerationEntry& entry = *life.entry;
  if (entry.claim_only) {
    print_line(entry.error + ": it has not come so far yet, or ended before");
  } else if (!entry.record) {
    print(fmt::format("generation {}  {}\n", entry.number,
                      paint(stdout, Tone::kBad, "its record cannot be read: " + printable(entry.error))));
    print_line("  so it constrains nothing: what older lives saved stays on the branch");
  } else {
    const GenerationRecord& record = *entry.record;
    print_line(fmt::format("generation {}  {}  host {}  {} rank{}  life {}", record.number, format_time(record.time_ms),
                           record.host, record.ranks, record.ranks == 1 ? "" : "s", record.life_id));
    print_line("  " + describe_origin(record.origin));
    for (const auto& refusal : record.refused)
      print_line(fmt::format("  refused {}: {}", refusal.attempt, refusal.reason));
  }
  for (const Row* row : life.orphaned) {
    print_line(fmt::format("  left behind {} (step {} of generation {}): an orphan since", row->info.name,
                           row->info.key.step, row->info.key.generation));
  }
  for (auto row = life.saved.rbegin(); row != life.saved.rend(); ++row) {
    const std::string reason = (*row)->reason();
    print_line(
        fmt::format("  saved {}: {}{}{}", (*row)->info.name, (*row)->state(), reason.empty() ? "" : ": ", reason));
  }
}

std::string describe(const NextStart& next, const Survey& survey) {
  switch (next.kind) {
    case NextStart::Kind::kAttempt: {
      const AttemptInfo& info = survey.rows[next.row].info;
      return fmt::format("a start now would go on from step {} ({}), {}", info.key.step, info.name, next.reason);
    }
    case NextStart::Kind::kFresh: return fmt::format("a start now would start fresh, at step 0: {}", next.reason);
    case NextStart::Kind::kError: return fmt::format("a start now would stop with an error: {}", next.reason);
  }
  return {};
}

void print_text(const Survey& survey, const NextStart& next) {
  const auto run = run_id_of(survey.generations);
  print_line(fmt::format("run {} in {}", run ? *run : "(no record of a life can be read)", survey.root));
  for (const auto& life : lives_of(survey)) {
    print("\n");
    print_life(life);
  }
  bool titled = false;
  for (const auto& row : survey.rows) {
    if (row.info.state == AttemptState::kForeign || !row.has_key() || row.info.has_record || row.unreadable) continue;
    if (!titled) print("\nof no life that has a record here\n");
    titled = true;
    print_line(fmt::format("  {}: {}: {}", row.info.name, row.state(), row.reason()));
  }
  print("\n");
  const Tone tone = next.kind == NextStart::Kind::kError ? Tone::kBad : Tone::kPlain;
  print(paint(stdout, tone, printable(describe(next, survey))) + "\n");
  for (const auto& line : next.evidence) {
    print_line((next.kind == NextStart::Kind::kAttempt ? "  passing over " : "  ") + line);
  }
}

json names_of(const std::vector<const Row*>& rows) {
  json names = json::array();
  for (const Row* row : rows) names.push_back(row->info.name);
  return names;
}

json to_json(const Life& life) {
  const GenerationEntry& entry = *life.entry;
  json object = {{"generation", entry.number},
                 {"readable", entry.record.has_value()},
                 {"error", nullptr},
                 {"run_id", nullptr},
                 {"life_id", nullptr},
                 {"host", nullptr},
                 {"ranks", nullptr},
                 {"time_ms", nullptr},
                 {"origin", nullptr},
                 {"refused", json::array()},
                 {"orphaned", names_of(life.orphaned)},
                 {"saved", names_of(life.saved)}};
  if (!entry.record) {
    object["error"] = entry.error;
    return object;
  }
  const GenerationRecord& record = *entry.record;
  object["run_id"] = record.run_id;
  object["life_id"] = record.life_id;
  object["host"] = record.host;
  object["ranks"] = record.ranks;
  object["time_ms"] = record.time_ms;
  const bool from_attempt = record.origin.kind == Origin::Kind::kAttempt;
  json origin = {{"kind", from_attempt ? "attempt" : record.origin.kind == Origin::Kind::kFresh ? "fresh" : "none"}};
  if (from_attempt) {
    origin["step"] = record.origin.key.step;
    origin["generation"] = record.origin.key.generation;
    origin["sequence"] = record.origin.key.sequence;
    origin["attempt"] = record.origin.attempt;
  }
  object["origin"] = std::move(origin);
  for (const auto& refusal : record.refused) {
    object["refused"].push_back({{"attempt", refusal.attempt}, {"reason", refusal.reason}});
  }
  return object;
}

json to_json(const NextStart& next, const Survey& survey) {
  const bool found = next.kind == NextStart::Kind::kAttempt;
  json object = {{"outcome", found                                  ? "attempt"
                             : next.kind == NextStart::Kind::kFresh ? "fresh"
                                                                    : "error"},
                 {"generation", newest_generation(survey.generations) + 1},
                 {"attempt", nullptr},
                 {"step", nullptr},
                 {"reason", next.reason},
                 {"passed_over", next.evidence}};
  if (found) {
    object["attempt"] = survey.rows[next.row].info.name;
    object["step"] = survey.rows[next.row].info.key.step;
  }
  return object;
}

}  // namespace

int why(const WhyOptions& options) {
  const auto store = open_root(options.root);
  if (!store) return report(store.error());
  const auto found = survey(**store);
  if (!found) return report(found.error());
  const NextStart next = next_start(*found);
  if (options.json) {
    json lives = json::array();
    for (const auto& life : lives_of(*found)) lives.push_back(to_json(life));
    json document = {{"root", found->root},
                     {"run_id", nullptr},
                     {"generations", std::move(lives)},
                     {"next_start", to_json(next, *found)}};
    if (const auto run = run_id_of(found->generations)) document["run_id"] = *run;
    print_json(document);
  } else {
    print_text(*found, next);
  }
  for (const auto& row : found->rows) {
    if (row.unreadable) return report(unreadable(*row.unreadable));
  }
  if (next.kind != NextStart::Kind::kError) return kOk;
  say_hint(next.evidence.empty()
               ? "install the version of Unbroken that wrote it, or a later one"
               : "`unbroken ls` shows each attempt; allow_fresh=True starts again at step 0 on purpose");
  return kCheckFailed;
}

}  // namespace unbroken::cli
