#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdint>
#include <exception>
#include <span>
#include <string>
#include <string_view>

#include "cli/command.h"
#include "cli/terminal.h"

namespace unbroken::cli {
namespace {

constexpr const char* kExitCodes =
    "Exit codes:\n"
    "  0  done; verify: every byte is what was written; why: a start would go on or begin\n"
    "  1  a check failed: damaged, not usable, or nothing there to check\n"
    "  2  the command line is wrong\n"
    "  3  the root, or some of it, cannot be read; export: OUT cannot be written\n"
    "\n"
    "Data goes to stdout, words to stderr. Colour on a terminal only; NO_COLOR turns it off.\n"
    "Nothing is ever written to a root; nothing that was pickled is opened, but by export, which runs nothing in it.";

constexpr const char* kExamples =
    "Examples:\n"
    "  unbroken ls runs/7                     what is there, newest first\n"
    "  unbroken verify runs/7                 read every byte of the newest usable checkpoint\n"
    "  unbroken verify runs/7 --all           of all of them\n"
    "  unbroken verify runs/7/step-1200-g7-4f1c9a2e\n"
    "  unbroken why runs/7                    what each start chose, and what one would choose now\n"
    "  unbroken export runs/7 models/7        its weights as safetensors\n"
    "  unbroken ls runs/7 --json | jq -r .newest_usable\n";

constexpr const char* kExport = "export";
constexpr const char* kRootHelp = "the directory that the run's Checkpointer was given";
constexpr const char* kJsonHelp = "print JSON (docs/cli.md describes it)";

std::string is_step(const std::string& text) {
  std::uint64_t step = 0;
  const char* end = text.data() + text.size();
  const auto [parsed, error] = std::from_chars(text.data(), end, step);
  return error == std::errc() && parsed == end ? "" : text + " is not a step: those are whole numbers from 0";
}

void add_ls(CLI::App& app, LsOptions& options) {
  CLI::App* command = app.add_subcommand("ls", "List the attempts at checkpoints below a root, newest first");
  command->add_option("ROOT", options.root, kRootHelp)->required()->option_text(" ");
  command->add_flag("--json", options.json, kJsonHelp);
  command->add_flag("--all", options.all, "all attempts, not the newest 30 alone (JSON always has all)");
  command->footer(
      "States:\n"
      "  complete     committed, all files there with their lengths, on the run's branch\n"
      "  incomplete   never committed\n"
      "  damaged      was committed; something is missing or differs\n"
      "  orphan       whole, but the run went on from an earlier step\n"
      "  retired      condemned by retention; about to go\n"
      "  unsupported  written by a newer version\n"
      "  foreign      a DCP checkpoint that Unbroken did not write\n"
      "  unreadable   could not be looked at\n"
      "A start would go on from the one with the *. ls exits with 0 whatever the states are.\n"
      "\n"
      "Example: unbroken ls runs/7");
}

void add_verify(CLI::App& app, VerifyOptions& options) {
  CLI::App* command = app.add_subcommand("verify", "Read every byte of checkpoints and compare checksums");
  command->add_option("ROOT", options.root, std::string(kRootHelp) + ", or the directory of one attempt")
      ->required()
      ->option_text(" ");
  auto* attempt = command->add_option("ATTEMPT", options.attempt, "an attempt in it; without, the newest usable one")
                      ->option_text(" ");
  auto* step = command->add_option("--step", options.step, "the usable attempt of this step, or else its newest")
                   ->check(is_step)
                   ->option_text("N");
  auto* all = command->add_flag("--all", options.all, "all attempts")->option_text(" ");
  attempt->excludes(step)->excludes(all);
  step->excludes(all);
  command->add_flag("--json", options.json, kJsonHelp);
  command->footer(
      "Exits with 1 when a byte differs or a file is missing, and also when the attempt that was asked for\n"
      "could not be verified: never committed, retired, of a newer version, or foreign (DCP's own files\n"
      "have no checksums). With --all, of these only a newer version counts.\n"
      "\n"
      "Examples:\n"
      "  unbroken verify runs/7\n"
      "  unbroken verify runs/7 --step 1200\n"
      "  unbroken verify runs/7/step-1200-g7-4f1c9a2e");
}

void add_why(CLI::App& app, WhyOptions& options) {
  CLI::App* command =
      app.add_subcommand("why", "Tell the run's lives: what each started from, what it refused, and why");
  command->add_option("ROOT", options.root, kRootHelp)->required()->option_text(" ");
  command->add_flag("--json", options.json, kJsonHelp);
  command->footer(
      "Also says what a start would choose now, without claiming anything; exits with 1 when that start would\n"
      "stop with an error.\n"
      "\n"
      "Example: unbroken why runs/7");
}

int run(int argc, char** argv) {
  const std::span arguments(argv, static_cast<std::size_t>(argc));
  // Its options, --help too, are Python's to read.
  if (arguments.size() > 1 && std::string_view(arguments[1]) == kExport) return export_weights(arguments.subspan(2));
  CLI::App app("Looks after the checkpoints of a training run.", "unbroken");
  app.set_version_flag("--version", "unbroken " UNBROKEN_VERSION, "print the version");
  app.set_help_flag("-h,--help", "print this help");
  app.require_subcommand(1);
  app.footer(std::string(kExamples) + "\n" + kExitCodes);
  app.get_formatter()->column_width(26);
  LsOptions ls_options;
  VerifyOptions verify_options;
  WhyOptions why_options;
  add_ls(app, ls_options);
  add_verify(app, verify_options);
  add_why(app, why_options);
  app.add_subcommand(kExport, "Write the weights of a checkpoint as safetensors, for Hugging Face tools (runs Python)");
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help_or_version) {
    return app.exit(help_or_version);
  } catch (const CLI::ParseError& error) {
    say_error(error.what());
    say_hint("unbroken --help, or unbroken COMMAND --help");
    return kUsage;
  }
  if (app.got_subcommand("ls")) return ls(ls_options);
  if (app.got_subcommand("verify")) return verify(verify_options);
  return why(why_options);
}

}  // namespace
}  // namespace unbroken::cli

int main(int argc, char** argv) {
  using namespace unbroken::cli;  // NOLINT(google-build-using-namespace)
  try {
    const int exit_code = run(argc, argv);
    if (flush_output()) return exit_code;
    say_error("write to standard output: not everything got through");
  } catch (const std::exception& error) {
    say_error(std::string("this should not have happened: ") + error.what());
  }
  return kUnreadable;
}
