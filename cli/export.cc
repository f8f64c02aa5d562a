// `unbroken export`: hands over to the Python package, since reading weights takes torch.
//
// Which Python: the one beside this command, where pip has installed both, and else python3 of the search path. Its own
// directory is not searched for modules, as `python -m` would, so that no file that lies about can take part.
#include <fmt/core.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "cli/command.h"
#include "cli/terminal.h"

namespace unbroken::cli {
namespace {

constexpr const char* kProgram = R"(
import sys
if sys.path[:1] == [""]:
    del sys.path[0]
try:
    from unbroken.__main__ import main
except ImportError as error:
    sys.stderr.write(
        f"error: export needs the Python package unbroken, which {sys.executable} cannot import: {error}\n"
        f"hint: install it there (pip install unbroken), or run: PYTHON -m unbroken export, with a Python that has it\n"
    )
    sys.exit(3)
sys.exit(main(sys.argv[1:]))
)";

// Empty when there is none.
std::string python_beside_this_command() {
  std::error_code failed;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", failed);
  if (failed) return {};
  for (const char* name : {"python3", "python"}) {
    const auto path = self.parent_path() / name;
    if (::access(path.c_str(), X_OK) == 0) return path.string();
  }
  return {};
}

}  // namespace

int export_weights(std::span<char* const> arguments) {
  std::string python = python_beside_this_command();
  if (python.empty()) python = "python3";
  std::string option = "-c";
  std::string program = kProgram;
  std::string command = "export";
  std::vector<char*> all = {python.data(), option.data(), program.data(), command.data()};
  all.insert(all.end(), arguments.begin(), arguments.end());
  all.push_back(nullptr);
  ::execvp(python.c_str(), all.data());
  say_error(fmt::format("export needs Python with the package unbroken; start {}: {}", python, std::strerror(errno)));
  say_hint("install Python and the package (pip install unbroken), or put the python3 that has it on the search path");
  return kUnreadable;
}

}  // namespace unbroken::cli
