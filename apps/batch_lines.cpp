#include "apps/batch_lines.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <utility>

namespace k3 {
namespace {

constexpr std::size_t kRead = std::size_t{256} << 10;

bool is_blank(std::string_view text) {
  return text.find_first_not_of(" \t\r\v\f") == std::string_view::npos;
}

}  // namespace

std::uint64_t line_hash(std::string_view bytes, std::uint64_t seed) {
  for (const char c : bytes) {
    seed = (seed ^ static_cast<std::uint8_t>(c)) * 0x100000001b3ull;
  }
  return seed;
}

LineReader::LineReader(const std::string& path, std::size_t max_line_bytes)
    : name_(path == "-" ? "standard input" : path), limit_(max_line_bytes) {
  fd_ = path == "-" ? STDIN_FILENO : ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd_ < 0 && errno == ENOENT) throw std::invalid_argument(path + ": no such file");
  if (fd_ < 0) throw std::system_error(errno, std::generic_category(), path);
  owned_ = path != "-";
  struct stat st {};
  const bool known = ::fstat(fd_, &st) == 0;
  if (known && S_ISDIR(st.st_mode)) {
    if (owned_) ::close(fd_);
    throw std::invalid_argument(name_ + ": is a directory");
  }
  if (known && S_ISREG(st.st_mode)) total_ = static_cast<std::uint64_t>(st.st_size);
}

LineReader::~LineReader() {
  if (owned_ && fd_ >= 0) ::close(fd_);
}

// True: there is more in the buffer, or the end was met.
bool LineReader::fill(int wait_ms) {
  struct pollfd p {};
  p.fd = fd_;
  p.events = POLLIN;
  // A signal ends the wait: whoever asks looks at what it meant.
  if (::poll(&p, 1, wait_ms) <= 0) return false;
  buffer_.erase(0, std::exchange(at_, 0));
  scanned_ = std::min(scanned_, buffer_.size());
  const std::size_t had = buffer_.size();
  buffer_.resize(had + kRead);
  const ssize_t n = ::read(fd_, buffer_.data() + had, kRead);
  const int error = errno;
  buffer_.resize(had + static_cast<std::size_t>(n > 0 ? n : 0));
  if (n < 0 && (error == EINTR || error == EAGAIN)) return false;
  if (n < 0) throw std::system_error(error, std::generic_category(), name_);
  ended_ = n == 0;
  return true;
}

// A whole line (at the end: whatever is left) into `line`; false: there is none, or it is passed over.
bool LineReader::take_line(InputLine& line, bool at_end) {
  const std::size_t from = std::max(at_, scanned_);
  std::size_t end = buffer_.find('\n', from);
  if (end == std::string::npos && at_end && (at_ < buffer_.size() || passing_)) {
    end = buffer_.size();
  }
  if (end == std::string::npos) {
    scanned_ = buffer_.size();
    // Of a line past the limit only the beginning is kept.
    if (buffer_.size() - at_ <= limit_ && !passing_) return false;
    const std::string_view piece = std::string_view(buffer_).substr(at_);
    if (!std::exchange(passing_, true)) {
      long_line_ = {number_ + 1, std::string(piece.substr(0, 256)), true, line_hash({})};
    }
    long_line_.hash = line_hash(piece, long_line_.hash);
    n_taken_ += piece.size();
    buffer_.clear();
    at_ = scanned_ = 0;
    return false;
  }
  std::string_view text = std::string_view(buffer_).substr(at_, end - at_);
  n_taken_ += text.size() + (end < buffer_.size() ? 1 : 0);
  ++number_;
  if (std::exchange(passing_, false)) {
    line = std::move(long_line_);
    line.hash = line_hash(text, line.hash);
  } else {
    if (!text.empty() && text.back() == '\r') text.remove_suffix(1);
    if (number_ == 1 && text.substr(0, 3) == "\xef\xbb\xbf")
      text.remove_prefix(3);  // editors' mark
    line = {number_, {}, text.size() > limit_, line_hash(text)};
    line.text = text.substr(0, line.too_long ? 256 : text.size());
  }
  at_ = std::min(end + 1, buffer_.size());
  scanned_ = at_;
  return true;
}

LineReader::Outcome LineReader::next(InputLine& line, int wait_ms) {
  for (;;) {
    if (take_line(line, ended_)) {
      if (line.too_long || !is_blank(line.text)) return Outcome::kLine;
      continue;
    }
    if (ended_) return Outcome::kEnd;
    // The rest of a regular file is always there.
    if (!fill(total_ > 0 ? -1 : wait_ms)) return Outcome::kNothingYet;
  }
}

}  // namespace k3
