// What the commands see of a run root. Reads only.
#pragma once

#include <cstdint>
#include <expected>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "checkpoint/catalog.h"
#include "checkpoint/generation.h"
#include "cli/command.h"
#include "store/store.h"

namespace unbroken::cli {

// Why a command ends here, and what its user can do about it.
struct Trouble {
  Error error;
  std::string hint{};
  ExitCode exit_code = kUnreadable;
};
template <class T>
using Outcome = std::expected<T, Trouble>;

// The trouble of an error of the engine, with the hint that goes with its code.
Trouble unreadable(Error error);
// Says it on stderr; the exit code.
int report(const Trouble& trouble);

// One directory of an attempt. Unlike the engine's catalog, which a start trusts, a listing shows what it can: an
// attempt that cannot be looked at is a row, too.
struct Row {
  AttemptInfo info;
  std::optional<Error> unreadable{};
  std::uint64_t refused_by = 0;  // the life that found it bad and never goes back to it; 0 = none
  std::string refusal{};         // its reason

  std::string_view state() const;
  std::string reason() const;
  bool has_key() const;  // step and generation are known
};

struct Survey {
  std::string root;
  std::vector<GenerationEntry> generations;  // rising
  std::vector<Row> rows;                     // newest first; foreign ones last
};

// Opens a root that is there already.
Outcome<std::unique_ptr<Store>> open_root(const std::string& url);
// Everything below it, checked to Depth::kLengths. Trouble when it is no run root.
Outcome<Survey> survey(Store& store);
// One attempt, in the same way; the error only when it is not there.
Result<Row> look_at(Store& store, std::string_view name, const std::vector<GenerationEntry>& generations);

// What Checkpointer's resume() would do now: the engine's own choice, without its claim.
struct NextStart {
  enum class Kind { kAttempt, kFresh, kError };
  Kind kind = Kind::kFresh;
  std::size_t row = 0;  // of kAttempt
  std::string reason;
  std::vector<std::string> evidence{};  // what was passed over, each with its reason
};
NextStart next_start(const Survey& survey);

// The row that loading would take; also where a start stops because of something newer. Nothing when none is usable.
std::optional<std::size_t> newest_usable(const Survey& survey);

// A directory that holds one checkpoint, split into its parent and its name.
struct AttemptPath {
  std::string parent;
  std::string name;
};
std::optional<AttemptPath> attempt_path(Store& store);

nlohmann::ordered_json to_json(const Row& row);
// On stdout. Only ASCII, so that no terminal is at the mercy of a name.
void print_json(const nlohmann::ordered_json& document);

}  // namespace unbroken::cli
