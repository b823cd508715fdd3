#include "loader/atomic_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cerrno>
#include <filesystem>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace k3 {
namespace {

constexpr std::size_t kBuffer = 1 << 20;

// What a rename may replace. A device or a FIFO would be gone afterwards (root can do that to /dev/null); and a symbolic
// link, /dev/stdout among them, means the file it leads to.
std::string replaceable(std::string path) {
  struct stat st;
  if (::stat(path.c_str(), &st) != 0) return path;  // new, or for open() to refuse
  if (!S_ISREG(st.st_mode)) {
    throw std::invalid_argument(path + ": is " +
                                (S_ISDIR(st.st_mode) ? "a directory" : "a device, FIFO or socket") +
                                ", expected the name of a file");
  }
  std::error_code no_name;  // a deleted file that is still open
  const std::filesystem::path real = std::filesystem::canonical(path, no_name);
  if (no_name) {
    throw std::invalid_argument(path + ": leads to no name, expected the name of a file");
  }
  return std::filesystem::is_symlink(path, no_name) ? real.string() : path;
}

}  // namespace

AtomicFile::AtomicFile(std::string path)
    : path_(replaceable(std::move(path))),
      tmp_(path_ + "." + std::to_string(::getpid()) + ".tmp") {  // two jobs may write the same file
  fd_ = ::open(tmp_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd_ < 0) {
    const int error = errno;
    throw std::system_error(error, std::generic_category(), path_ + ": create");
  }
  buffer_.reserve(kBuffer);
}

AtomicFile::AtomicFile(AtomicFile&& other) noexcept
    : path_(std::move(other.path_)),
      tmp_(std::exchange(other.tmp_, std::string())),
      fd_(std::exchange(other.fd_, -1)),
      buffer_(std::move(other.buffer_)) {}

AtomicFile::~AtomicFile() {
  if (fd_ >= 0) ::close(fd_);
  if (!tmp_.empty()) ::unlink(tmp_.c_str());
}

void AtomicFile::fail(const char* what) const {
  const int error = errno;
  throw std::system_error(error, std::generic_category(), path_ + ": " + what);
}

void AtomicFile::write(std::span<const std::byte> bytes) {
  if (buffer_.size() + bytes.size() > kBuffer) flush();
  if (bytes.size() < kBuffer) {
    buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
  } else {
    write_through(bytes);
  }
}

void AtomicFile::write_through(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd_, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail("write");
    bytes = bytes.subspan(static_cast<std::size_t>(n));
  }
}

void AtomicFile::flush() {
  write_through(buffer_);
  buffer_.clear();
}

void AtomicFile::sync() {
  flush();
  if (::fsync(fd_) != 0) fail("sync");
  // Network file systems report a full disk as late as here.
  if (::close(std::exchange(fd_, -1)) != 0) fail("close");
}

void AtomicFile::commit() {
  if (fd_ >= 0) sync();
  if (::rename(tmp_.c_str(), path_.c_str()) != 0) fail("rename");
  tmp_.clear();
}

}  // namespace k3
