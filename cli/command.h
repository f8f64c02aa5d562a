// The commands of `unbroken`, one .cc each. They look and never change: nothing below a root is written, nothing that
// was pickled is opened (but by export). Data goes to stdout, words to stderr. Each returns the exit code. The main
// thread.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace unbroken::cli {

// docs/cli.md and --help say the same.
enum ExitCode : int {
  kOk = 0,
  kCheckFailed = 1,  // damaged, not usable, or nothing there to check
  kUsage = 2,
  kUnreadable = 3,  // the root, or some of it, cannot be read
};

struct LsOptions {
  std::string root;
  bool json = false;
  bool all = false;
};
int ls(const LsOptions& options);

struct VerifyOptions {
  std::string root;     // or the directory of one attempt
  std::string attempt;  // "" = not named
  std::optional<std::uint64_t> step;
  bool all = false;
  bool json = false;
};
int verify(const VerifyOptions& options);

struct WhyOptions {
  std::string root;
  bool json = false;
};
int why(const WhyOptions& options);

// `export`, which needs torch: becomes `python -m unbroken export`, with these arguments. It comes back only when there
// is no Python.
int export_weights(std::span<char* const> arguments);

}  // namespace unbroken::cli
