#include "bindings/errors.h"

#include <fmt/core.h>

#include <array>
#include <string>

namespace nb = nanobind;

namespace unbroken::bindings {
namespace {

struct ErrorClass {
  Code code;
  const char* name;
  const char* meaning;
};

constexpr std::array kErrorClasses{
    ErrorClass{Code::kInvalidArgument, "InvalidArgumentError",
               "The caller's input is wrong; the message says what fits."},
    ErrorClass{Code::kNotFound, "NotFoundError", "The object is known not to exist."},
    ErrorClass{Code::kAlreadyExists, "AlreadyExistsError", "The object exists and was to be made."},
    ErrorClass{Code::kPermission, "PermissionDeniedError", "The place does not allow it."},
    ErrorClass{Code::kNoSpace, "NoSpaceError", "The place is full, or a quota is used up."},
    ErrorClass{Code::kIo, "IoError", "The device or the file system failed."},
    ErrorClass{Code::kUnavailable, "UnavailableError", "The store or a peer cannot be reached now."},
    ErrorClass{Code::kDeadline, "DeadlineError", "It did not happen in time."},
    ErrorClass{Code::kUnknown, "UnknownOutcomeError", "Whether a publishing operation took effect is not known."},
    ErrorClass{Code::kDamaged, "DamagedError", "Bytes are there but are not what was written."},
    ErrorClass{Code::kFenced, "FencedError", "A newer start owns the run, or the root belongs to another run."},
    ErrorClass{Code::kUnsupported, "UnsupportedError", "The format version, dtype or place is not supported."},
    ErrorClass{Code::kCancelled, "CancelledError", "Given up on request."},
    ErrorClass{Code::kInternal, "InternalError", "A bug in Unbroken; please report it."},
};
static_assert(kErrorClasses.size() == static_cast<std::size_t>(Code::kInternal) + 1);

// They live as long as the interpreter, which an extension module never leaves.
PyObject* base_class = nullptr;
std::array<PyObject*, kErrorClasses.size()> classes{};

PyObject* new_class(nb::module_& module, const char* name, const char* meaning, nb::handle bases,
                    const nb::dict& attributes) {
  const auto full_name = fmt::format("{}.{}", nb::cast<const char*>(module.attr("__name__")), name);
  PyObject* made = PyErr_NewExceptionWithDoc(full_name.c_str(), meaning, bases.ptr(), attributes.ptr());
  if (!made) throw nb::python_error();
  module.attr(name) = nb::handle(made);
  return made;
}

nb::dict class_attributes(const Error& error) {
  nb::dict attributes;
  const auto name = code_name(error.code);
  attributes["code"] = nb::str(name.data(), name.size());
  attributes["retryable"] = error.retryable;
  attributes["data_may_be_lost"] = error.data_may_be_lost;
  return attributes;
}

void raise(const Error& error) {
  const nb::handle type(classes[static_cast<std::size_t>(error.code)]);
  nb::object raised = type(nb::str(error.message.data(), error.message.size()));
  raised.attr("retryable") = error.retryable;
  raised.attr("data_may_be_lost") = error.data_may_be_lost;
  PyErr_SetObject(type.ptr(), raised.ptr());
}

void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const EngineException& exception) {
    raise(exception.error());
  }
}

// What str() says of it; its __str__ is someone else's code and may raise itself.
std::string text_of_exception(nb::handle value) {
  try {
    return nb::str(value).c_str();
  } catch (nb::python_error&) {
    return "(its __str__ raises)";
  }
}

}  // namespace

void bind_errors(nb::module_& module) {
  base_class = new_class(module, "Error",
                         "What the engine of Unbroken raises: `code` names the kind, `retryable` says that the "
                         "same call may succeed later, `data_may_be_lost` that bytes believed safe may be gone.",
                         PyExc_Exception, class_attributes(make_error(Code::kInternal, "")));
  const nb::handle base(base_class);
  for (const auto& [code, name, meaning] : kErrorClasses) {
    // Options that Python checks raise ValueError; to a user it is the same mistake wherever it is found.
    const nb::tuple bases =
        code == Code::kInvalidArgument ? nb::make_tuple(base, nb::handle(PyExc_ValueError)) : nb::make_tuple(base);
    classes[static_cast<std::size_t>(code)] =
        new_class(module, name, meaning, bases, class_attributes(make_error(code, "")));
  }
  nb::register_exception_translator(translate);
}

Error error_of_python(nb::python_error& raised, std::string_view action, Code code) {
  const nb::handle value = raised.value();
  const std::string text = text_of_exception(value);
  for (const auto& known : kErrorClasses) {
    if (PyErr_GivenExceptionMatches(value.ptr(), classes[static_cast<std::size_t>(known.code)])) {
      return Error{.code = known.code,
                   .message = fmt::format("{}: {}", action, text),
                   .retryable = nb::cast<bool>(value.attr("retryable")),
                   .data_may_be_lost = nb::cast<bool>(value.attr("data_may_be_lost"))};
    }
  }
  const nb::str type(raised.type().attr("__name__"));
  return make_error(code, fmt::format("{}: {}: {}", action, type.c_str(), text));
}

}  // namespace unbroken::bindings
