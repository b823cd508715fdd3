#include "apps/raw_read.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <exception>
#include <system_error>
#include <thread>

namespace k3 {
namespace {

constexpr std::uint64_t kPiece = std::uint64_t{8} << 20;

[[noreturn]] void fail(const std::string& path) {
  throw std::system_error(errno ? errno : EIO, std::generic_category(), path);
}

class Descriptor {
 public:
  explicit Descriptor(const std::string& path) : path_(path), fd_(open(path.c_str(), O_RDONLY)) {
    if (fd_ < 0) fail(path);
  }
  Descriptor(Descriptor&& other) noexcept : path_(std::move(other.path_)), fd_(other.fd_) {
    other.fd_ = -1;
  }
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }
  const std::string& path() const { return path_; }
  std::size_t size() const {
    struct stat facts {};
    if (fstat(fd_, &facts) != 0) fail(path_);
    return static_cast<std::size_t>(facts.st_size);
  }

 private:
  std::string path_;
  int fd_;
};

void read_piece(const Descriptor& file, const FileExtent& piece, std::vector<std::byte>& scratch) {
  for (std::uint64_t at = 0; at < piece.bytes;) {
    const ssize_t n =
        pread(file.get(), scratch.data(), piece.bytes - at, static_cast<off_t>(piece.begin + at));
    if (n < 0 && errno == EINTR) continue;
    if (n == 0) errno = EIO;  // shorter than its header said
    if (n <= 0) fail(file.path());
    at += static_cast<std::uint64_t>(n);
  }
}

}  // namespace

RawRead raw_read(const std::vector<std::string>& paths, const std::vector<FileExtent>& extents,
                 int n_thread) {
  std::vector<Descriptor> files;
  for (const std::string& p : paths) files.emplace_back(p);
  const std::vector<FileExtent> pieces = cut_extents(extents, kPiece);
  std::atomic<std::size_t> next{0};
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(std::max(1, n_thread)));
  const auto work = [&](std::size_t t) {
    try {
      std::vector<std::byte> scratch(kPiece);
      for (std::size_t i = next++; i < pieces.size(); i = next++) {
        read_piece(files.at(static_cast<std::size_t>(pieces[i].part)), pieces[i], scratch);
      }
    } catch (...) {
      errors[t] = std::current_exception();
    }
  };
  RawRead out;
  const auto begin = std::chrono::steady_clock::now();
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < errors.size(); ++t) threads.emplace_back(work, t);
  for (std::thread& t : threads) t.join();
  out.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  for (const std::exception_ptr& e : errors) {
    if (e) std::rethrow_exception(e);
  }
  for (const FileExtent& p : pieces) out.bytes += p.bytes;
  return out;
}

std::optional<double> cached_share(const std::vector<std::string>& paths) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  std::size_t held = 0, all = 0;
  for (const std::string& path : paths) {
    const Descriptor file(path);
    const std::size_t size = file.size();
    if (size == 0) continue;
    void* map = mmap(nullptr, size, PROT_READ, MAP_SHARED, file.get(), 0);
    if (map == MAP_FAILED) return std::nullopt;
    std::vector<unsigned char> pages((size + page - 1) / page);
    const bool told = mincore(map, size, pages.data()) == 0;
    munmap(map, size);
    if (!told) return std::nullopt;
    held += static_cast<std::size_t>(
        std::count_if(pages.begin(), pages.end(), [](unsigned char p) { return (p & 1) != 0; }));
    all += pages.size();
  }
  if (all == 0) return std::nullopt;
  return static_cast<double>(held) / static_cast<double>(all);
}

void evict(const std::vector<std::string>& paths) {
  for (const std::string& path : paths) {
    const Descriptor file(path);
    errno = posix_fadvise(file.get(), 0, 0, POSIX_FADV_DONTNEED);
    if (errno != 0) fail(path);
  }
}

}  // namespace k3
