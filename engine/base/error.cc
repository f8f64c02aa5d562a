#include "base/error.h"

#include <fmt/core.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace unbroken {

std::string_view code_name(Code code) {
  switch (code) {
    case Code::kInvalidArgument: return "invalid_argument";
    case Code::kNotFound: return "not_found";
    case Code::kAlreadyExists: return "already_exists";
    case Code::kPermission: return "permission";
    case Code::kNoSpace: return "no_space";
    case Code::kIo: return "io";
    case Code::kUnavailable: return "unavailable";
    case Code::kDeadline: return "deadline";
    case Code::kUnknown: return "unknown";
    case Code::kDamaged: return "damaged";
    case Code::kFenced: return "fenced";
    case Code::kUnsupported: return "unsupported";
    case Code::kCancelled: return "cancelled";
    case Code::kInternal: return "internal";
  }
  return "internal";
}

namespace {

Code code_of_errno(int number) {
  switch (number) {
    case ENOENT: return Code::kNotFound;
    case EEXIST: return Code::kAlreadyExists;
    case EACCES:
    case EPERM:
    case EROFS: return Code::kPermission;
    case ENOSPC:
    case EDQUOT: return Code::kNoSpace;
    case ENOTDIR:
    case EISDIR:
    case ELOOP:
    case EXDEV:
    case ENAMETOOLONG:
    case EINVAL: return Code::kInvalidArgument;
    case ENOSYS:
    case EOPNOTSUPP: return Code::kUnsupported;
    case EAGAIN:
    case EMFILE:
    case ENFILE:
    case ENOMEM:
    case ESTALE:
    case ETIMEDOUT:
    case ENOTCONN: return Code::kUnavailable;
    default: return Code::kIo;
  }
}

}  // namespace

Error errno_error(int number, std::string_view action, std::string_view object) {
  const char* name = ::strerrorname_np(number);
  return make_error(
      code_of_errno(number),
      fmt::format("{} {}: {} ({})", action, object,
                  ::strerrordesc_np(number) ? ::strerrordesc_np(number) : "unknown error", name ? name : "?"));
}

void assertion_failed(const char* expression, const char* file, int line) {
  std::fprintf(stderr, "unbroken: internal error: %s is false at %s:%d; please report this\n", expression, file, line);
  std::abort();
}

}  // namespace unbroken
