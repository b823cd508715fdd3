#include "apps/batch_output.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <filesystem>
#include <stdexcept>
#include <string_view>
#include <system_error>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace k3 {
namespace {

constexpr std::size_t kRead = std::size_t{1} << 20;
// Of an input: a number past this is not one that k3batch wrote, and DoneLines would take 8 bytes for each before it.
constexpr std::int64_t kMostLines = 1'000'000'000;

// The name of a new file is in its folder, which is on the disk only once that has been synced, too. Where a file system
// does not sync folders there is nothing to do about it.
void sync_folder(const std::filesystem::path& parent) {
  const std::string folder = parent.empty() ? "." : parent.string();
  const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;
  ::fsync(fd);
  ::close(fd);
}

}  // namespace

bool DoneLines::has(std::int64_t line) const {
  return line >= 0 && line < std::ssize(hashes_) && hashes_[static_cast<std::size_t>(line)] != 0;
}

void DoneLines::add(std::int64_t line, std::uint64_t hash) {
  if (has(line)) throw std::invalid_argument(fmt::format("input line {} is answered twice", line));
  if (line >= std::ssize(hashes_)) hashes_.resize(static_cast<std::size_t>(line) + 1);
  hashes_[static_cast<std::size_t>(line)] = hash;
  ++n_;
}

BatchOutput::BatchOutput(const std::string& path, bool resume) : path_(path) {
  if (path == "-") {
    path_ = "standard output";
    fd_ = STDOUT_FILENO;
    return;
  }
  try {
    open(path, resume);
  } catch (...) {
    if (fd_ >= 0) ::close(fd_);
    throw;
  }
}

BatchOutput::~BatchOutput() {
  if (fd_ >= 0 && fd_ != STDOUT_FILENO) ::close(fd_);
}

void BatchOutput::fail(int error, const char* what) const {
  throw std::system_error(error, std::generic_category(), path_ + ": " + what);
}

void BatchOutput::open(const std::string& path, bool resume) {
  const std::filesystem::path parent = std::filesystem::path(path).parent_path();
  std::error_code unknown;
  if (!parent.empty() && !std::filesystem::exists(parent, unknown)) {
    throw std::invalid_argument(path + ": no such folder: " + parent.string());
  }
  fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (fd_ < 0) fail(errno, "open");
  struct stat st {};
  if (::fstat(fd_, &st) != 0) fail(errno, "stat");
  is_file_ = S_ISREG(st.st_mode);
  if (!is_file_) return;  // /dev/stdout, a FIFO
  // Where a file system has no locks (some parallel ones), the job goes without.
  if (::flock(fd_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    throw std::invalid_argument(path + ": another job is writing it");
  }
  if (st.st_size == 0) return sync_folder(parent);
  if (!resume) {
    throw std::invalid_argument(
        fmt::format("{}: holds {} bytes already; --resume continues it, another name begins anew",
                    path, st.st_size));
  }
  read_back();
}

void BatchOutput::read_back() {
  std::string buffer;
  std::uint64_t at = 0;
  std::int64_t number = 0;
  for (;;) {
    const std::size_t had = buffer.size();
    buffer.resize(had + kRead);
    const ssize_t n = ::pread(fd_, buffer.data() + had, kRead, static_cast<off_t>(at));
    if (n < 0) fail(errno, "read");
    buffer.resize(had + static_cast<std::size_t>(n));
    at += static_cast<std::uint64_t>(n);
    std::size_t begin = 0;
    for (std::size_t end; (end = buffer.find('\n', begin)) != std::string::npos; begin = end + 1) {
      read_line(std::string_view(buffer).substr(begin, end - begin), ++number);
    }
    size_ += begin;
    buffer.erase(0, begin);
    if (n == 0) break;
  }
  n_cut_ = buffer.size();
  if (n_cut_ == 0) return;
  if (::ftruncate(fd_, static_cast<off_t>(size_)) != 0) fail(errno, "cut the last line");
}

void BatchOutput::read_line(std::string_view text, std::int64_t number) {
  const auto refuse = [&](const std::string& why) {
    throw std::invalid_argument(fmt::format("{}: line {}: {}", path_, number, why));
  };
  const auto json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_object() || !json.contains("line") || !json["line"].is_number_integer() ||
      !json.contains("line_hash") || !json["line_hash"].is_string()) {
    refuse("is not of a k3batch output: no object with line and line_hash");
  }
  const auto line = json["line"].get<std::int64_t>();
  const auto hex = json["line_hash"].get<std::string>();
  std::uint64_t hash = 0;
  const auto [stop, error] = std::from_chars(hex.data(), hex.data() + hex.size(), hash, 16);
  if (line < 1 || line > kMostLines || error != std::errc() || stop != hex.data() + hex.size() ||
      hash == 0) {
    refuse("line or line_hash is not what k3batch writes");
  }
  try {
    done_.add(line, hash);
  } catch (const std::invalid_argument& e) {
    refuse(e.what());
  }
  if (json.contains("error")) ++n_failed_;
}

void BatchOutput::add(const std::string& json) {
  pending_ += json;
  pending_ += '\n';
}

void BatchOutput::commit() {
  std::string_view left = pending_;
  std::uint64_t at = size_;
  while (!left.empty()) {
    const ssize_t n = is_file_ ? ::pwrite(fd_, left.data(), left.size(), static_cast<off_t>(at))
                               : ::write(fd_, left.data(), left.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      const int error = errno;
      // What stands there of a line would have to be cut off by the next run; better not to leave it.
      if (is_file_ && ::ftruncate(fd_, static_cast<off_t>(size_)) != 0)
        fail(errno, "write, then cut");
      fail(error, "write");
    }
    left.remove_prefix(static_cast<std::size_t>(n));
    at += static_cast<std::uint64_t>(n);
  }
  if (is_file_ && !pending_.empty() && ::fdatasync(fd_) != 0) fail(errno, "sync");
  size_ = at;
  pending_.clear();
}

}  // namespace k3
