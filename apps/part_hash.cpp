#include "apps/part_hash.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <exception>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <thread>

#include <fmt/format.h>
#include "apps/sealing.h"
#include "loader/parts.h"

namespace k3 {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kReadBytes = std::size_t{4} << 20;
constexpr std::size_t kHexDigits = 64;

bool is_digest(std::string_view text) {
  return text.size() == kHexDigits && text.find_first_not_of("0123456789abcdef") == text.npos;
}

struct ChunkId {
  std::size_t part = 0;
  std::size_t chunk = 0;
};

// What the hashes are of: another size or time of change and an old journal says nothing.
std::string identity_of(const std::vector<std::string>& paths, std::uint64_t chunk_bytes) {
  std::string out = fmt::format("k3 hash journal 1, chunks of {}", chunk_bytes);
  for (const std::string& path : paths) {
    struct stat st;
    if (::stat(path.c_str(), &st) != 0)
      throw std::system_error(errno, std::generic_category(), path);
    out += fmt::format("; {} {} {}.{:09}", fs::path(path).filename().string(), st.st_size,
                       st.st_mtim.tv_sec, st.st_mtim.tv_nsec);
  }
  std::replace(out.begin(), out.end(), '\n', ' ');
  return out + "\n";
}

// Lines "part chunk digest" after the identity. A kill may leave the last one torn.
class Journal {
 public:
  Journal(const std::string& path, const std::string& identity, std::vector<HashedPart>& parts)
      : path_(path) {
    fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (fd_ < 0) fail("open");
    if (::flock(fd_, LOCK_EX | LOCK_NB) != 0) {
      ::close(fd_);
      throw std::invalid_argument(path + ": another process is hashing with this journal");
    }
    const std::size_t good = take_up(read_all(), identity, parts);
    if (::ftruncate(fd_, static_cast<off_t>(good)) != 0) fail("truncate");
    if (good == 0) append(identity);
  }
  ~Journal() { ::close(fd_); }
  Journal(const Journal&) = delete;
  Journal& operator=(const Journal&) = delete;

  void add(const ChunkId& id, const std::string& digest) {
    append(fmt::format("{} {} {}\n", id.part, id.chunk, digest));
  }

 private:
  std::string read_all() {
    std::string text;
    std::array<char, 65536> buffer{};
    for (off_t at = 0;;) {
      const ssize_t n = ::pread(fd_, buffer.data(), buffer.size(), at);
      if (n < 0) fail("read");
      if (n == 0) return text;
      text.append(buffer.data(), static_cast<std::size_t>(n));
      at += n;
    }
  }

  // Bytes that hold whole lines; 0: it is of other files.
  static std::size_t take_up(std::string_view text, const std::string& identity,
                             std::vector<HashedPart>& parts) {
    if (!text.starts_with(identity)) return 0;
    std::size_t good = identity.size();
    for (;;) {
      const std::size_t end = text.find('\n', good);
      if (end == text.npos || !take_line(text.substr(good, end - good), parts)) return good;
      good = end + 1;
    }
  }

  static bool take_line(std::string_view line, std::vector<HashedPart>& parts) {
    ChunkId id;
    const char* const end = line.data() + line.size();
    auto [after_part, bad_part] = std::from_chars(line.data(), end, id.part);
    if (bad_part != std::errc() || after_part == end || *after_part != ' ') return false;
    auto [after, bad] = std::from_chars(after_part + 1, end, id.chunk);
    if (bad != std::errc() || after == end || *after != ' ') return false;
    const std::string_view digest(after + 1, static_cast<std::size_t>(end - after - 1));
    if (!is_digest(digest) || id.part >= parts.size() || id.chunk >= parts[id.part].chunks.size())
      return false;
    parts[id.part].chunks[id.chunk] = digest;
    return true;
  }

  void append(std::string_view line) {
    while (!line.empty()) {
      const ssize_t n = ::write(fd_, line.data(), line.size());
      if (n < 0) fail("write");
      line.remove_prefix(static_cast<std::size_t>(n));
    }
  }
  [[noreturn]] void fail(const char* what) const {
    throw std::system_error(errno, std::generic_category(), path_ + ": " + what);
  }

  std::string path_;
  int fd_ = -1;
};

// Chunks still to be hashed, handed out to threads; what they find, and how the run ends.
class Run {
 public:
  Run(const std::vector<std::string>& paths, const HashOptions& options) : options_(options) {
    for (const std::string& path : paths) {
      files_.push_back(std::make_unique<FileSource>(path));
      HashedPart p;
      p.file = fs::path(path).filename().string();
      p.bytes = files_.back()->size();
      p.chunks.resize(
          static_cast<std::size_t>((p.bytes + options.chunk_bytes - 1) / options.chunk_bytes));
      parts_.push_back(std::move(p));
    }
    if (!options.journal.empty())
      journal_.emplace(options.journal, identity_of(paths, options.chunk_bytes), parts_);
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      for (std::size_t c = 0; c < parts_[i].chunks.size(); ++c) {
        state_.total += bytes_of({i, c});
        if (parts_[i].chunks[c].empty()) {
          todo_.push_back({i, c});
        } else {
          state_.done += bytes_of({i, c});
        }
      }
    }
    state_.resumed = state_.done;
  }

  std::vector<HashedPart> finish() {
    std::vector<std::thread> threads;
    const auto n = std::min<std::size_t>(static_cast<std::size_t>(options_.threads), todo_.size());
    for (std::size_t i = 0; i < n; ++i) threads.emplace_back([this] { work(); });
    for (std::thread& t : threads) t.join();
    if (error_) std::rethrow_exception(error_);
    for (HashedPart& p : parts_) p.digest = digest_of(p.chunks);
    return std::move(parts_);
  }

 private:
  std::uint64_t bytes_of(const ChunkId& id) const {
    const std::uint64_t begin = id.chunk * options_.chunk_bytes;
    return std::min(options_.chunk_bytes, parts_[id.part].bytes - begin);
  }

  void work() {
    try {
      std::vector<std::byte> buffer;
      while (!stop_) {
        const std::size_t i = next_++;
        if (i >= todo_.size()) return;
        done(todo_[i], hash(todo_[i], buffer));
      }
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!error_) error_ = std::current_exception();
      stop_ = true;
    }
  }

  std::string hash(const ChunkId& id, std::vector<std::byte>& buffer) const {
    Sha256 sha;
    const std::uint64_t begin = id.chunk * options_.chunk_bytes, bytes = bytes_of(id);
    for (std::uint64_t at = 0; at < bytes && !stop_; at += buffer.size()) {
      buffer.resize(static_cast<std::size_t>(std::min<std::uint64_t>(kReadBytes, bytes - at)));
      files_[id.part]->read_at(begin + at, buffer);
      sha.add(buffer);
    }
    return sha.hex();
  }

  void done(const ChunkId& id, std::string digest) {
    const std::lock_guard lock(mutex_);
    if (stop_) return;  // a chunk that was not read to its end
    if (journal_) journal_->add(id, digest);
    parts_[id.part].chunks[id.chunk] = std::move(digest);
    state_.done += bytes_of(id);
    if (options_.progress) options_.progress(state_);
  }

  const HashOptions& options_;
  std::vector<std::unique_ptr<FileSource>> files_;
  std::vector<HashedPart> parts_;
  std::optional<Journal> journal_;
  std::vector<ChunkId> todo_;
  HashProgress state_;
  std::atomic<std::size_t> next_ = 0;
  std::atomic<bool> stop_ = false;
  std::mutex mutex_;
  std::exception_ptr error_;
};

}  // namespace

std::vector<HashedPart> hash_parts(const std::vector<std::string>& paths,
                                   const HashOptions& options) {
  if (options.chunk_bytes < 1 || options.threads < 1)
    throw std::invalid_argument("hash: chunks of no bytes, or no threads");
  return Run(paths, options).finish();
}

std::string digest_of(std::span<const std::string> chunks) {
  std::string raw;
  for (const std::string& hex : chunks) {
    for (std::size_t i = 0; i + 1 < hex.size(); i += 2)
      raw += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  }
  return sha256_hex(raw);
}

}  // namespace k3
