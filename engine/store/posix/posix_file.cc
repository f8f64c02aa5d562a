#include "store/posix/posix_file.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>

#include "store/ranges.h"

namespace unbroken::posix {
namespace {

// Aligned ranges go through the direct descriptor, all others through the buffered one. That is safe at once: direct
// ranges are whole blocks, so they share none with a disjoint range, and the kernel writes back and drops cached pages
// of a range that is written directly.
class PosixWriter final : public Writer {
 public:
  PosixWriter(const Errors& errors, std::string path, Fd buffered, Fd direct)
      : errors_(errors),
        path_(std::move(path)),
        buffered_(std::move(buffered)),
        direct_(std::move(direct)),
        use_direct_(static_cast<bool>(direct_)) {}

  Status write_at(std::uint64_t offset, std::span<const std::byte> bytes) override {
    UNBROKEN_TRY(check_range("write", path_, offset, bytes.size()));
    if (finished_.load()) return already_finished("write");
    if (use_direct_.load(std::memory_order_relaxed) && is_aligned(offset, bytes.data(), bytes.size())) {
      const std::size_t done = write_direct(offset, bytes);
      offset += done;
      bytes = bytes.subspan(done);
    }
    if (const int error = write_all(buffered_.get(), offset, bytes); error != 0) {
      return errors_.error(error, "write", path_, bytes.size());
    }
    return {};
  }

  Status finish(std::uint64_t length) override {
    if (finished_.exchange(true)) return already_finished("finish");
    if (length > static_cast<std::uint64_t>(std::numeric_limits<off_t>::max())) {
      return errors_.error(EFBIG, "truncate", path_);
    }
    if (uninterrupted([&] { return ::ftruncate(buffered_.get(), static_cast<off_t>(length)); }) != 0) {
      return condemned(errno, "truncate");
    }
    if (const int error = sync_data(buffered_.get()); error != 0) return condemned(error, "fdatasync");
    if (const int error = direct_.close(); error != 0) return condemned(error, "close");
    if (const int error = buffered_.close(); error != 0) return condemned(error, "close");
    return {};
  }

 private:
  // Writes as much as direct I/O takes, and says how much that was. Whatever goes wrong here, the buffered descriptor
  // tries next, and its answer is the one that counts: EINVAL only means that the file system does not like this range.
  std::size_t write_direct(std::uint64_t offset, std::span<const std::byte> bytes) {
    std::size_t done = 0;
    while (done < bytes.size()) {
      const ssize_t written = uninterrupted([&] {
        return ::pwrite(direct_.get(), bytes.data() + done, bytes.size() - done, static_cast<off_t>(offset + done));
      });
      if (written < 0 && (errno == EINVAL || errno == EOPNOTSUPP)) use_direct_.store(false);
      if (written <= 0) break;
      done += static_cast<std::size_t>(written);
      if (!is_aligned(offset + done, nullptr, 0)) break;  // a short write ended within a block
    }
    return done;
  }

  Error condemned(int number, std::string_view action) const {
    Error error = errors_.error(number, action, path_);
    error.data_may_be_lost = true;
    error.retryable = false;  // the kernel may have dropped what it could not write and forgotten that it did
    error.message += "; the object cannot be trusted and has to be written anew under another name";
    return error;
  }

  Error already_finished(std::string_view action) const {
    return make_error(Code::kInvalidArgument, fmt::format("{} {}: the object was finished already", action, path_));
  }

  const Errors& errors_;
  const std::string path_;
  Fd buffered_;
  Fd direct_;
  std::atomic<bool> use_direct_;
  std::atomic<bool> finished_{false};
};

class PosixReader final : public Reader {
 public:
  PosixReader(const Errors& errors, std::string path, Fd fd, ReaderOptions options)
      : errors_(errors), path_(std::move(path)), fd_(std::move(fd)), options_(options) {}

  std::uint64_t size() const override { return options_.size; }

  Status read_at(std::uint64_t offset, std::span<std::byte> into) override {
    UNBROKEN_ASSIGN(const std::size_t wanted, bytes_to_read(path_, options_.direct, options_.size, offset, into));
    std::size_t done = 0;
    while (done < wanted) {
      const ssize_t got = read_some(offset + done, into.subspan(done));
      if (got < 0) return errors_.error(errno, "read", path_);
      if (got == 0) return ends_early(path_, offset + wanted, offset + done);
      done += static_cast<std::size_t>(got);
      // Direct I/O cannot go on within a block; only the end of the object gives such a short count.
      if (options_.unbuffered && done < wanted && !is_aligned(offset + done, nullptr, 0)) {
        return ends_early(path_, offset + wanted, offset + done);
      }
    }
    return {};
  }

  void will_need(std::uint64_t offset, std::uint64_t length) override {
    if (options_.direct) return;
    static_cast<void>(
        ::posix_fadvise(fd_.get(), static_cast<off_t>(offset), static_cast<off_t>(length), POSIX_FADV_WILLNEED));
  }

  bool is_cached(std::uint64_t offset, std::uint64_t length) override {
    return is_resident(fd_.get(), offset, std::min(length, options_.size - std::min(offset, options_.size)));
  }

 private:
  ssize_t read_some(std::uint64_t offset, std::span<std::byte> into) {
    const auto read = [&] { return ::pread(fd_.get(), into.data(), into.size(), static_cast<off_t>(offset)); };
    const ssize_t got = uninterrupted(read);
    if (got >= 0 || errno != EINVAL || !options_.unbuffered) return got;
    // This file system took O_DIRECT and does not like the range. Other threads' reads are right either way.
    const int flags = ::fcntl(fd_.get(), F_GETFL);
    if (flags < 0 || ::fcntl(fd_.get(), F_SETFL, flags & ~O_DIRECT) != 0) return -1;
    return uninterrupted(read);
  }

  const Errors& errors_;
  const std::string path_;
  const Fd fd_;
  const ReaderOptions options_;
};

}  // namespace

std::unique_ptr<Writer> make_writer(const Errors& errors, std::string path, Fd buffered, Fd direct) {
  return std::make_unique<PosixWriter>(errors, std::move(path), std::move(buffered), std::move(direct));
}

std::unique_ptr<Reader> make_reader(const Errors& errors, std::string path, Fd fd, ReaderOptions options) {
  return std::make_unique<PosixReader>(errors, std::move(path), std::move(fd), options);
}

}  // namespace unbroken::posix
