// Writers and readers of the posix driver. See store.h for the contract.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "store/posix/posix_io.h"
#include "store/store.h"

namespace unbroken::posix {

// Makes an Error of an errno that came up on an object; what the store knows (its root, free space) is added.
class Errors {
 public:
  virtual ~Errors() = default;
  virtual Error error(int number, std::string_view action, std::string_view path, std::uint64_t needed = 0) const = 0;
};

// `direct` may be empty: then all writes go through the page cache. Both are open for writing on the same file.
std::unique_ptr<Writer> make_writer(const Errors& errors, std::string path, Fd buffered, Fd direct);

// `direct`: the caller asked for it, so the rules of alignment hold; `unbuffered`: the descriptor really is O_DIRECT.
struct ReaderOptions {
  bool direct = false;
  bool unbuffered = false;
  std::uint64_t size = 0;
};
std::unique_ptr<Reader> make_reader(const Errors& errors, std::string path, Fd fd, ReaderOptions options);

}  // namespace unbroken::posix
