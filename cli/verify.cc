// `unbroken verify`: every byte of attempts against the checksums that were written with them.
#include <fmt/core.h>

#include <algorithm>
#include <iterator>

#include "base/bytes.h"
#include "cli/check.h"
#include "cli/command.h"
#include "cli/foreign.h"
#include "cli/root.h"
#include "cli/terminal.h"

namespace unbroken::cli {
namespace {

struct Verified {
  enum class Verdict {
    kVerified,
    kDamaged,
    kNotVerified,  // there is nothing to verify it by, or it was never committed
    kUnreadable,
  };
  Row row;
  CheckReport report;
  Verdict verdict = Verdict::kNotVerified;
  std::string reason;  // of all but kVerified
};
using Verdict = Verified::Verdict;

std::string_view verdict_name(Verdict verdict) {
  switch (verdict) {
    case Verdict::kVerified: return "verified";
    case Verdict::kDamaged: return "damaged";
    case Verdict::kNotVerified: return "not verified";
    case Verdict::kUnreadable: return "unreadable";
  }
  return "unreadable";
}

Tone tone_of(Verdict verdict) {
  switch (verdict) {
    case Verdict::kVerified: return Tone::kGood;
    case Verdict::kNotVerified: return Tone::kWarning;
    case Verdict::kDamaged:
    case Verdict::kUnreadable: return Tone::kBad;
  }
  return Tone::kBad;
}

struct Target {
  std::unique_ptr<Store> store;
  std::vector<GenerationEntry> generations;
  std::vector<Row> rows;
};

// Without checksums, this is what can be said.
std::string describe_form(const FormReport& form, std::string_view marker) {
  const std::string unknown = form.unknown == 0 ? "" : fmt::format(", except for {} of no known form", form.unknown);
  return fmt::format(
      "a DCP checkpoint that Unbroken did not write: its marker {} is there and no file is cut off{}, shard files: {} "
      "of "
      "{}; it has no checksums to verify their bytes by, and the marker, a pickle, is not opened",
      marker, unknown, form.files, format_bytes(form.bytes));
}

// What the problems come to.
void judge(Verified& result) {
  const auto& problems = result.report.problems;
  const auto damage = std::find_if(problems.begin(), problems.end(), [](const auto& p) { return p.is_damage(); });
  if (damage != problems.end()) {
    result.verdict = Verdict::kDamaged;
    result.reason = damage->reason;
  } else if (!problems.empty()) {
    result.verdict = Verdict::kUnreadable;
    result.reason = problems.front().reason;
  }
}

void check_bytes(Store& store, const PlainNames& names, Verified& result) {
  ProgressLine line("verify " + result.row.info.name);
  CheckReport report = check_every_byte(store, result.row.info.name, names,
                                        [&](std::uint64_t done, std::uint64_t all) { line.update(done, all); });
  result.report.bytes += report.bytes;
  result.report.files += report.files;
  std::move(report.problems.begin(), report.problems.end(), std::back_inserter(result.report.problems));
}

void check_stock(Store& store, const std::string& marker, const std::string& of, Verified& result) {
  FormReport form = check_form(store, result.row.info.name, marker, of);
  result.verdict = Verdict::kNotVerified;
  result.reason = describe_form(form, marker);
  std::move(form.problems.begin(), form.problems.end(), std::back_inserter(result.report.problems));
}

// Each of them is a checkpoint of its own, in one directory.
void check_ranks_alone(Store& store, const std::vector<RankMarker>& ranks, Verified& result) {
  AttemptInfo& info = result.row.info;
  info.state = AttemptState::kForeign;
  info.has_marker = true;
  info.reason = fmt::format("{} ranks saved alone here (use_collectives=False)", ranks.size());
  result.verdict = Verdict::kVerified;
  for (const auto& [rank, has_manifest] : ranks) {
    const PlainNames names = PlainNames::of_rank(rank);
    if (has_manifest)
      check_bytes(store, names, result);
    else
      check_stock(store, names.marker, fmt::format("__{}_", rank), result);
  }
  judge(result);
}

Verified verify_row(Store& store, Row row) {
  Verified result{.row = std::move(row), .report = {}, .reason = {}};
  const AttemptInfo& info = result.row.info;
  const auto without_check = [&](Verdict verdict, std::string reason) {
    result.verdict = verdict;
    result.reason = std::move(reason);
    return std::move(result);
  };
  if (result.row.unreadable) return without_check(Verdict::kUnreadable, result.row.unreadable->message);
  if (info.state == AttemptState::kIncomplete && !info.has_marker) {
    const auto ranks = markers_of_ranks(store, info.name);
    if (!ranks) return without_check(Verdict::kUnreadable, ranks.error().message);
    if (!ranks->empty()) {
      check_ranks_alone(store, *ranks, result);
      return result;
    }
  }
  switch (info.state) {
    case AttemptState::kIncomplete:
    case AttemptState::kRetired:
    case AttemptState::kUnsupported: return without_check(Verdict::kNotVerified, info.reason);
    case AttemptState::kForeign:
      if (info.manifest) break;
      check_stock(store, std::string(kMarkerName), "__", result);
      judge(result);
      return result;
    case AttemptState::kComplete:
    case AttemptState::kOrphan:
    case AttemptState::kDamaged: break;
  }
  check_bytes(store, PlainNames(), result);
  if (!result.report.problems.empty()) {
    judge(result);
  } else if (info.state == AttemptState::kDamaged) {
    // Each file is right, and the whole is not: a directory that was renamed.
    result.verdict = Verdict::kDamaged;
    result.reason = info.reason;
  } else {
    result.verdict = Verdict::kVerified;
  }
  return result;
}

void print_text(const Verified& verified) {
  const CheckReport& report = verified.report;
  std::string line = fmt::format("{}  {}", printable(verified.row.info.name),
                                 paint(stdout, tone_of(verified.verdict), verdict_name(verified.verdict)));
  if (verified.verdict == Verdict::kVerified) {
    line += fmt::format("  {} in {} shard files", format_bytes(report.bytes), report.files);
  } else if (report.problems.empty()) {
    line += "  " + printable(verified.reason);
  }
  print(line + "\n");
  for (const auto& problem : report.problems) {
    print(fmt::format("  {}: {}\n", printable(problem.file), printable(problem.reason)));
  }
  std::fflush(stdout);
  const AttemptInfo& info = verified.row.info;
  if (info.state == AttemptState::kOrphan) {
    say(fmt::format("{} is an orphan, no start will choose it: {}", info.name, info.reason));
  }
  if (info.state == AttemptState::kForeign && verified.verdict == Verdict::kVerified) {
    say(fmt::format("{}: {}", info.name, info.reason));
  }
}

nlohmann::ordered_json to_json(const Verified& verified) {
  nlohmann::ordered_json problems = nlohmann::ordered_json::array();
  for (const auto& problem : verified.report.problems) {
    nlohmann::ordered_json entry = {{"file", problem.file},
                                    {"begin", nullptr},
                                    {"end", nullptr},
                                    {"code", code_name(problem.code)},
                                    {"reason", problem.reason}};
    if (problem.begin != problem.end) {
      entry["begin"] = problem.begin;
      entry["end"] = problem.end;
    }
    problems.push_back(std::move(entry));
  }
  nlohmann::ordered_json object = cli::to_json(verified.row);
  object["verdict"] = verdict_name(verified.verdict);
  object["reason"] = verified.verdict == Verdict::kVerified ? verified.row.reason() : verified.reason;
  object["verified_bytes"] = verified.report.bytes;
  object["problems"] = std::move(problems);
  return object;
}

Trouble nothing_to_verify(std::string message, std::string hint) {
  return {make_error(Code::kNotFound, std::move(message)), std::move(hint), kCheckFailed};
}

Outcome<Target> named_target(std::unique_ptr<Store> store, const std::string& name) {
  if (name.find('/') != std::string::npos || name == "." || name == "..") {
    return std::unexpected(Trouble{make_error(Code::kInvalidArgument, fmt::format("verify {}: it is not the name of a "
                                                                                  "directory in {}",
                                                                                  name, store->url())),
                                   "unbroken ls lists the names; or give the attempt's directory alone, without a root",
                                   kUsage});
  }
  auto generations = list_generations(*store);
  if (!generations) return std::unexpected(unreadable(std::move(generations).error()));
  auto row = look_at(*store, name, *generations);
  if (!row) {
    return std::unexpected(
        nothing_to_verify(fmt::format("verify {}: there is no such attempt in {}", name, store->url()),
                          fmt::format("unbroken ls {}", store->url())));
  }
  return Target{std::move(store), std::move(*generations), {std::move(*row)}};
}

// Complete and on the branch before all else, then the newest.
Outcome<Target> target_of_step(std::unique_ptr<Store> store, Survey survey, std::uint64_t step) {
  std::vector<Row> rows;
  for (auto& row : survey.rows) {
    if (row.has_key() && row.info.key.step == step) rows.push_back(std::move(row));
  }
  if (rows.empty()) {
    return std::unexpected(
        nothing_to_verify(fmt::format("verify step {}: there is no attempt of that step in {}", step, store->url()),
                          fmt::format("unbroken ls {}", store->url())));
  }
  const auto best = std::find_if(rows.begin(), rows.end(), [](const Row& row) {
    return !row.unreadable && row.info.state == AttemptState::kComplete && row.refused_by == 0;
  });
  Row chosen = best == rows.end() ? std::move(rows.front()) : std::move(*best);
  say(fmt::format("step {}: {}", step, chosen.info.name));
  return Target{std::move(store), std::move(survey.generations), {std::move(chosen)}};
}

Outcome<Target> newest_target(std::unique_ptr<Store> store, Survey survey) {
  const auto newest = newest_usable(survey);
  if (!newest) {
    for (const auto& row : survey.rows) say(fmt::format("  {}: {}: {}", row.info.name, row.state(), row.reason()));
    return std::unexpected(nothing_to_verify(fmt::format("verify {}: no checkpoint in it is usable", store->url()),
                                             survey.rows.empty() ? "" : "--all verifies what is there"));
  }
  Row& row = survey.rows[*newest];
  say(fmt::format("newest usable: step {} ({})", row.info.key.step, row.info.name));
  return Target{std::move(store), std::move(survey.generations), {std::move(row)}};
}

// "runs/7/step-3-g1-ab" with the root "runs/7", as a shell completes it.
std::string attempt_name(const VerifyOptions& options) {
  std::string name = options.attempt;
  while (name.ends_with('/')) name.pop_back();
  std::string root = options.root;
  while (root.ends_with('/')) root.pop_back();
  return name.starts_with(root + "/") ? name.substr(root.size() + 1) : name;
}

Outcome<Target> find_target(const VerifyOptions& options) {
  auto store = open_root(options.root);
  if (!store) return std::unexpected(std::move(store).error());
  if (!options.attempt.empty()) return named_target(std::move(*store), attempt_name(options));
  if (const auto path = attempt_path(**store)) {
    if (options.step || options.all) {
      return std::unexpected(
          Trouble{make_error(Code::kInvalidArgument, fmt::format("verify {}: --step and --all need a run "
                                                                 "root, and this is one checkpoint",
                                                                 options.root)),
                  fmt::format("the run root is {}", path->parent), kUsage});
    }
    auto parent = open_root(path->parent);
    if (!parent) return std::unexpected(std::move(parent).error());
    return named_target(std::move(*parent), path->name);
  }
  auto found = survey(**store);
  if (!found) return std::unexpected(std::move(found).error());
  if (options.step) return target_of_step(std::move(*store), std::move(*found), *options.step);
  if (!options.all) return newest_target(std::move(*store), std::move(*found));
  if (found->rows.empty()) {
    return std::unexpected(nothing_to_verify(fmt::format("verify {}: no checkpoint is here yet", options.root), ""));
  }
  return Target{std::move(*store), std::move(found->generations), std::move(found->rows)};
}

bool is_failure(const Verified& verified, bool all) {
  if (verified.verdict == Verdict::kVerified) return false;
  if (verified.verdict != Verdict::kNotVerified) return true;
  // Among all, what was never committed or has been retired is no fault; asked for by name, it is not what was hoped
  // for.
  return !all || verified.row.info.state == AttemptState::kUnsupported;
}

std::string count_verdicts(const std::vector<Verified>& results) {
  std::string text;
  for (const Verdict verdict : {Verdict::kVerified, Verdict::kDamaged, Verdict::kNotVerified, Verdict::kUnreadable}) {
    const auto count =
        std::count_if(results.begin(), results.end(), [&](const auto& r) { return r.verdict == verdict; });
    if (count > 0) text += fmt::format("{}{} {}", text.empty() ? "" : ", ", count, verdict_name(verdict));
  }
  return text;
}

}  // namespace

int verify(const VerifyOptions& options) {
  auto target = find_target(options);
  if (!target) return report(target.error());
  std::vector<Verified> results;
  int exit_code = kOk;
  for (auto& row : target->rows) {
    results.push_back(verify_row(*target->store, std::move(row)));
    const Verified& last = results.back();
    if (!options.json) print_text(last);
    if (last.verdict == Verdict::kUnreadable)
      exit_code = kUnreadable;
    else if (exit_code == kOk && is_failure(last, options.all))
      exit_code = kCheckFailed;
  }
  if (options.json) {
    nlohmann::ordered_json attempts = nlohmann::ordered_json::array();
    for (const auto& result : results) attempts.push_back(to_json(result));
    print_json({{"root", target->store->url()}, {"ok", exit_code == kOk}, {"attempts", std::move(attempts)}});
  }
  if (options.all) say(count_verdicts(results));
  const bool damaged = std::any_of(results.begin(), results.end(), [](const auto& r) {
    return r.verdict == Verdict::kDamaged && r.row.info.state != AttemptState::kForeign;
  });
  if (damaged)
    say_hint("a start that meets the damage falls back to the next older checkpoint; `unbroken why` says to which");
  return exit_code;
}

}  // namespace unbroken::cli
