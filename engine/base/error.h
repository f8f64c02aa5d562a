// Errors are values. A function that can fail returns Result<T>; no exception crosses an engine interface.
//
// An Error says what went wrong (code), whether the same call may succeed later (retryable), whether bytes that
// were believed safe may be gone (data_may_be_lost), and a message of the form "action object: cause".
// Thread safety: plain values.
#pragma once

#include <expected>
#include <string>
#include <string_view>
#include <utility>

namespace unbroken {

enum class Code {
  kInvalidArgument,  // the caller's input is wrong; the message says what fits
  kNotFound,         // the object does not exist (never used for "could not find out": that is kUnavailable)
  kAlreadyExists,    // create-if-absent lost
  kPermission,       // EACCES, EPERM, EROFS, HTTP 403
  kNoSpace,          // ENOSPC, EDQUOT
  kIo,               // the device or the file system failed (EIO and kin)
  kUnavailable,      // the store or a peer cannot be reached now; absence must not be concluded
  kDeadline,         // a deadline passed
  kUnknown,          // the outcome of a publishing operation is unclear and could not be settled by reading
  kDamaged,          // bytes are there but are not what was written
  kFenced,           // a newer generation owns the run, or the root belongs to another run
  kUnsupported,      // format version, dtype, store ability
  kCancelled,        // given up on request
  kInternal,         // a bug in Unbroken
};

// The code's name as users see it in logs and JSON, e.g. "no_space".
std::string_view code_name(Code code);

struct Error {
  Code code = Code::kInternal;
  std::string message;
  bool retryable = false;
  bool data_may_be_lost = false;

  // The same error with "context: " before its message: the caller adds the action that it was about.
  Error in(std::string_view context) && {
    message = std::string(context) + ": " + message;
    return std::move(*this);
  }
  Error in(std::string_view context) const& { return Error(*this).in(context); }
};

template <class T>
class [[nodiscard]] Result : public std::expected<T, Error> {
 public:
  using Base = std::expected<T, Error>;
  using Base::Base;
  // Implicit, so that `return make_error(...)` reads as what it does.
  Result(Error error) : Base(std::unexpect, std::move(error)) {}  // NOLINT(google-explicit-constructor)
  // A deliberate drop; `why` is for the reader, and makes drops findable.
  void ignore([[maybe_unused]] std::string_view why) const {}
};

using Status = Result<void>;

inline Error make_error(Code code, std::string message) {
  const bool retryable = code == Code::kUnavailable || code == Code::kDeadline;
  return Error{.code = code, .message = std::move(message), .retryable = retryable};
}

// An Error from errno: "action object: strerror (NAME)"; the code follows from the number.
Error errno_error(int number, std::string_view action, std::string_view object);

// Returns the error of `expression` (a Status) from the enclosing function.
#define UNBROKEN_TRY(expression)                                                                             \
  do {                                                                                                       \
    if (auto unbroken_status_ = (expression); !unbroken_status_) return std::move(unbroken_status_).error(); \
  } while (false)

#define UNBROKEN_CONCAT_(a, b) a##b
#define UNBROKEN_CONCAT(a, b) UNBROKEN_CONCAT_(a, b)
// `UNBROKEN_ASSIGN(auto value, call())`: the value, or the error returned from the enclosing function.
#define UNBROKEN_ASSIGN(declaration, expression) \
  UNBROKEN_ASSIGN_(UNBROKEN_CONCAT(unbroken_result_, __LINE__), declaration, expression)
#define UNBROKEN_ASSIGN_(name, declaration, expression) \
  auto name = (expression);                             \
  if (!name) return std::move(name).error();            \
  declaration = std::move(*name)

// For our own bugs; stays on in release. Prints and aborts.
[[noreturn]] void assertion_failed(const char* expression, const char* file, int line);
#define UNBROKEN_ASSERT(expression) \
  ((expression) ? void(0) : ::unbroken::assertion_failed(#expression, __FILE__, __LINE__))

}  // namespace unbroken
