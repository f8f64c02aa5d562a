// How an engine's Error leaves the extension: as one Python exception class for each Code, all of them subclasses of
// unbroken._engine.Error, with the attributes `code` (its name), `retryable` and `data_may_be_lost`.
//
// A binding calls unwrap() on what the engine returns. It does so without the GIL or with it: the Python exception is
// made later, when nanobind translates.
#pragma once

#include <nanobind/nanobind.h>

#include <exception>
#include <utility>

#include "base/error.h"

namespace unbroken::bindings {

// Carries an Error from a binding to the translator; nothing else throws or catches it.
class EngineException final : public std::exception {
 public:
  explicit EngineException(Error error) : error_(std::move(error)) {}
  const Error& error() const { return error_; }
  const char* what() const noexcept override { return error_.message.c_str(); }

 private:
  Error error_;
};

// The value of `result`; throws its Error.
template <class T>
T unwrap(Result<T> result) {
  if (!result) throw EngineException(std::move(result).error());
  if constexpr (!std::is_void_v<T>) return std::move(*result);
}

// Makes the exception classes in `module`, and has Errors translated to them.
void bind_errors(nanobind::module_& module);

// The other way, for a Python implementation of an engine interface (a board): what a call into Python raised, as an
// Error. An exception that came out of the engine keeps its code; any other becomes `code`, with its type and text in
// the message after `action`. Needs the GIL.
Error error_of_python(nanobind::python_error& raised, std::string_view action, Code code);

}  // namespace unbroken::bindings
