#include "base/board.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <nanobind/trampoline.h>

#include "base/memory_board.h"
#include "bindings/errors.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace unbroken::bindings {
namespace {

nb::bytes to_bytes(std::string_view text) { return nb::bytes(text.data(), text.size()); }

std::string to_text(nb::handle bytes) {
  const auto value = nb::cast<nb::bytes>(bytes);
  return {value.c_str(), value.size()};
}

// Typed, so that the stub says what is in it.
using OptionalBytesList = nb::typed<nb::list, std::optional<nb::bytes>>;

OptionalBytesList to_list(const std::vector<std::optional<std::string>>& values) {
  nb::list list;
  for (const auto& value : values) list.append(value ? nb::object(to_bytes(*value)) : nb::none());
  return list;
}

// A board written in Python. Its methods are looked up on the object, so a subclass overrides them as usual; what they
// raise becomes an Error.
class PythonBoard final : public Board {
 public:
  NB_TRAMPOLINE(Board);

  Status set(std::string_view key, std::string_view value) override {
    return call("set a key on the board", [&](nb::handle self) -> Status {
      self.attr("set")(nb::str(key.data(), key.size()), to_bytes(value));
      return {};
    });
  }

  Result<std::vector<std::optional<std::string>>> get(std::span<const std::string> keys) override {
    return call("read the board", [&](nb::handle self) -> Result<std::vector<std::optional<std::string>>> {
      std::vector<std::optional<std::string>> answers;
      for (const nb::handle answer : self.attr("get")(to_names(keys))) {
        answers.push_back(answer.is_none() ? std::nullopt : std::optional(to_text(answer)));
      }
      if (answers.size() != keys.size()) return make_error(Code::kInternal, "read the board: not one answer a key");
      return answers;
    });
  }

  Result<std::string> set_if_absent(std::string_view key, std::string_view value) override {
    return call("set a key on the board", [&](nb::handle self) -> Result<std::string> {
      return to_text(self.attr("set_if_absent")(nb::str(key.data(), key.size()), to_bytes(value)));
    });
  }

  Status erase(std::span<const std::string> keys) override {
    return call("erase keys on the board", [&](nb::handle self) -> Status {
      self.attr("erase")(to_names(keys));
      return {};
    });
  }

 private:
  static nb::list to_names(std::span<const std::string> keys) {
    nb::list names;
    for (const auto& key : keys) names.append(nb::str(key.data(), key.size()));
    return names;
  }

  template <class Work>
  std::invoke_result_t<Work, nb::handle> call(std::string_view action, Work work) {
    const nb::gil_scoped_acquire acquired;
    try {
      return work(nb_trampoline.base());
    } catch (nb::python_error& raised) {
      return error_of_python(raised, action, Code::kUnavailable);
    } catch (const std::exception& exception) {
      return make_error(Code::kInternal, std::string(action) + ": " + exception.what());
    }
  }
};

OptionalBytesList collect(Board& board, const std::vector<std::string>& keys, double timeout_seconds) {
  std::vector<std::optional<std::string>> values;
  {
    const nb::gil_scoped_release released;
    values = unwrap(board_collect(board, keys, Deadline::after_seconds(timeout_seconds)));
  }
  return to_list(values);
}

nb::bytes wait(Board& board, const std::string& key, double timeout_seconds) {
  std::string value;
  {
    const nb::gil_scoped_release released;
    value = unwrap(board_wait(board, key, Deadline::after_seconds(timeout_seconds)));
  }
  return to_bytes(value);
}

}  // namespace

void bind_board(nb::module_& module) {
  nb::class_<Board, PythonBoard>(module, "Board",
                                 "Where the ranks of one start talk. Subclasses define set(key, value), get(keys), "
                                 "set_if_absent(key, value) and erase(keys); values are bytes. Called from any thread.")
      .def(nb::init<>());
  nb::class_<MemoryBoard, Board>(module, "MemoryBoard", "A board for a world of one.")
      .def(nb::init<>())
      .def(
          "set",
          [](MemoryBoard& self, const std::string& key, const nb::bytes& value) {
            unwrap(self.set(key, to_text(value)));
          },
          "key"_a, "value"_a)
      .def(
          "get",
          [](MemoryBoard& self, const std::vector<std::string>& keys) { return to_list(unwrap(self.get(keys))); },
          "keys"_a)
      .def(
          "set_if_absent",
          [](MemoryBoard& self, const std::string& key, const nb::bytes& value) {
            return to_bytes(unwrap(self.set_if_absent(key, to_text(value))));
          },
          "key"_a, "value"_a)
      .def(
          "erase", [](MemoryBoard& self, const std::vector<std::string>& keys) { unwrap(self.erase(keys)); }, "keys"_a)
      .def("__len__", &MemoryBoard::size);
  module.def("board_wait", &wait, "board"_a, "key"_a, "timeout_seconds"_a,
             "What `key` holds, once it is set. DeadlineError when it is not in time.");
  module.def("board_collect", &collect, "board"_a, "keys"_a, "timeout_seconds"_a,
             "What the keys hold once all are set, or at the end of the time: None for those that are not.");
}

}  // namespace unbroken::bindings
