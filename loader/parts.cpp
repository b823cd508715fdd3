#include "loader/parts.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22  // Linux 5.14; older kernels answer EINVAL
#endif

namespace k3 {
namespace {

// Linux reads no more than a device's largest request per MADV_WILLNEED, silently; this is the least of the usual ones.
constexpr std::uint64_t kAdviseStep = 128 << 10;
// populate() asks for one window while it waits for the one before.
constexpr std::uint64_t kPopulateStep = 64 << 20;

std::uint64_t page_bytes() {
  static const std::uint64_t bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

std::byte* page_floor(const std::byte* p) {
  const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(p);
  return reinterpret_cast<std::byte*>(address / page_bytes() * page_bytes());
}

std::byte* page_ceil(const std::byte* p) { return page_floor(p + page_bytes() - 1); }

const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISSOCK(mode)) return "a socket";
  return "a device";
}

std::string file_part(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  return slash == std::string::npos ? path : path.substr(slash + 1);
}

std::string of(int part, int count) {
  return "part " + std::to_string(part) + " of " + std::to_string(count);
}

// ---- the fingerprint ------------------------------------------------------------------------------------------

class Hash {
 public:
  void add(std::uint64_t word) {
    for (std::uint64_t& lane : lanes_) {
      lane = (lane ^ word) * 0x9e3779b97f4a7c15u;
      lane ^= lane >> 29;
      word = word << 23 | word >> 41;  // the lanes see different words
    }
  }
  void add(std::span<const std::byte> bytes) {
    add(bytes.size());
    for (std::size_t i = 0; i < bytes.size(); i += 8) {
      std::uint64_t word = 0;
      std::memcpy(&word, bytes.data() + i, std::min<std::size_t>(8, bytes.size() - i));
      add(word);
    }
  }
  std::string hex() {
    add(std::uint64_t{0});
    add(std::uint64_t{0});
    char text[33];
    std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(lanes_[0]),
                  static_cast<unsigned long long>(lanes_[1]));
    return text;
  }

 private:
  std::array<std::uint64_t, 2> lanes_{0x243f6a8885a308d3u, 0x13198a2e03707344u};
};

void add_range(Hash& hash, const FileSource& file, std::uint64_t begin, std::uint64_t end) {
  std::vector<std::byte> buffer;
  while (begin < end) {
    buffer.resize(static_cast<std::size_t>(std::min<std::uint64_t>(end - begin, 1 << 20)));
    file.read_at(begin, buffer);
    hash.add(buffer);
    begin += buffer.size();
  }
}

void add_part(Hash& hash, const FileSource& file, const GgufHeader& header) {
  constexpr std::uint64_t kSamples = 64;
  constexpr std::uint64_t kSampleBytes = 256;
  hash.add(file.size());
  add_range(hash, file, 0, header.header_bytes);
  const std::uint64_t begin = std::min(header.data_begin, file.size());
  const std::uint64_t span = file.size() - begin;
  if (span <= kSamples * kSampleBytes) return add_range(hash, file, begin, file.size());
  // The first and the last bytes are among them. The division comes first: the product would overflow for huge files.
  const std::uint64_t step = (span - kSampleBytes) / (kSamples - 1);
  for (std::uint64_t i = 0; i + 1 < kSamples; ++i) {
    add_range(hash, file, begin + i * step, begin + i * step + kSampleBytes);
  }
  add_range(hash, file, file.size() - kSampleBytes, file.size());
}

// ---- what the parts say of each other ------------------------------------------------------------------------------

void check_siblings_exist(const SplitName& name) {
  std::vector<int> missing;
  for (int part = 1; part <= name.count; ++part) {
    struct stat st;
    if (::stat(split_path(name.prefix, part, name.count).c_str(), &st) != 0 && errno == ENOENT) {
      missing.push_back(part);
    }
  }
  if (missing.empty()) return;
  std::string text =
      of(missing[0], name.count) + " missing: " + split_path(name.prefix, missing[0], name.count);
  if (missing.size() > 1) {
    constexpr std::size_t kListed = 6;
    text += " (and " + std::to_string(missing.size() - 1) + " more: part";
    for (std::size_t i = 1; i < std::min(missing.size(), kListed); ++i) {
      text += (i > 1 ? ", " : " ") + std::to_string(missing[i]);
    }
    text += missing.size() > kListed ? ", ...)" : ")";
  }
  throw std::invalid_argument(text);
}

// The part's own idea of its place against its name.
void check_place(const GgufHeader& h, int part, int count) {
  const auto stored_count = h.metadata.get<std::uint32_t>("split.count");
  const auto stored_no = h.metadata.get<std::uint32_t>("split.no");
  if (count == 1 && !stored_count && !stored_no) return;
  if (!stored_count || !stored_no) {
    throw std::invalid_argument(h.file + ": named " + of(part, count) + ", but has no key " +
                                (stored_count ? "split.no" : "split.count"));
  }
  if (*stored_count != static_cast<std::uint32_t>(count)) {
    throw std::invalid_argument(h.file + ": split.count is " + std::to_string(*stored_count) +
                                ", the name says " + std::to_string(count));
  }
  if (*stored_no != static_cast<std::uint32_t>(part - 1)) {
    throw std::invalid_argument(h.file + ": is part " +
                                std::to_string(std::uint64_t{*stored_no} + 1) +
                                " by its split.no, part " + std::to_string(part) +
                                " by its name (a copy of another part?)");
  }
}

// A file whose name does not say that it is a part must not be one: its siblings could not be found.
void check_is_whole(const GgufHeader& h) {
  const std::int64_t count = h.metadata.get<std::int64_t>("split.count").value_or(1);
  if (count > 1) {
    throw std::invalid_argument(h.file + ": split.count says it is one of " +
                                std::to_string(count) +
                                " parts, but it is not named NAME-0000N-of-0000N.gguf, so the "
                                "others cannot be found");
  }
}

// Keys that later parts have of their own.
bool is_own_key(const std::string& key) {
  return key.starts_with("split.") || key == "general.alignment";
}

void check_same_model(const GgufHeader& first, const GgufHeader& other,
                      std::vector<std::string>& warnings) {
  for (const auto& [key, value] : other.metadata.entries()) {
    if (is_own_key(key)) continue;
    const Value* in_first = first.metadata.find(key);
    if (!in_first) {
      warnings.push_back(other.file + ": " + printable(key) +
                         ": the first part lacks this key; it is ignored");
    } else if (!(*in_first == value)) {
      throw std::invalid_argument(other.file + ": " + printable(key) + ": is " + value.describe() +
                                  ", " + file_part(first.file) + " has " + in_first->describe() +
                                  ": the parts are of different models");
    }
  }
}

void check_count(const std::string& file, const std::string& found, std::int64_t stated,
                 std::int64_t actual, bool ignore, std::vector<std::string>& warnings) {
  if (stated == actual) return;
  const std::string line =
      file + ": split.tensors.count is " + std::to_string(stated) + ", " + found;
  if (!ignore) throw std::invalid_argument(line + " (--ignore-split-count loads it all the same)");
  warnings.push_back(line + "; ignored as asked");
}

}  // namespace

// ---- FileSource -----------------------------------------------------------------------------------------------------

FileSource::FileSource(const std::string& path) : path_(path) {
  // Without O_NONBLOCK the open of a FIFO waits for a writer.
  fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd_ < 0) {
    const int error = errno;
    if (error == ENOENT || error == ENOTDIR) throw std::invalid_argument(path + ": no such file");
    throw std::system_error(error, std::generic_category(), path + ": open");
  }
  try {
    struct stat st;
    if (::fstat(fd_, &st) != 0) {
      throw std::system_error(errno, std::generic_category(), path + ": stat");
    }
    if (!S_ISREG(st.st_mode)) {
      throw std::invalid_argument(path + ": is " + kind_of(st.st_mode) + ", expected a GGUF file");
    }
    if (st.st_size == 0) throw std::invalid_argument(path + ": is empty, expected a GGUF file");
    size_ = static_cast<std::uint64_t>(st.st_size);
    void* map = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, fd_, 0);
    if (map == MAP_FAILED) {
      throw std::system_error(errno, std::generic_category(),
                              path + ": mmap of " + std::to_string(size_) + " bytes");
    }
    data_ = static_cast<std::byte*>(map);
    if (::madvise(data_, size_, MADV_RANDOM) != 0) {
      throw std::system_error(errno, std::generic_category(), path + ": madvise");
    }
  } catch (...) {
    close();
    throw;
  }
}

FileSource::~FileSource() { close(); }

FileSource::FileSource(FileSource&& other) noexcept
    : path_(std::move(other.path_)),
      fd_(std::exchange(other.fd_, -1)),
      size_(std::exchange(other.size_, 0)),
      data_(std::exchange(other.data_, nullptr)) {}

FileSource& FileSource::operator=(FileSource&& other) noexcept {
  if (this != &other) {
    close();
    path_ = std::move(other.path_);
    fd_ = std::exchange(other.fd_, -1);
    size_ = std::exchange(other.size_, 0);
    data_ = std::exchange(other.data_, nullptr);
  }
  return *this;
}

void FileSource::close() noexcept {
  if (data_) ::munmap(data_, size_);
  if (fd_ >= 0) ::close(fd_);
  data_ = nullptr;
  fd_ = -1;
}

void FileSource::read_at(std::uint64_t offset, std::span<std::byte> out) const {
  check_range(offset, out.size());
  while (!out.empty()) {
    const ssize_t n = ::pread(fd_, out.data(), out.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw std::system_error(errno, std::generic_category(), path_ + ": read");
    if (n == 0) throw std::invalid_argument(path_ + ": became shorter while it was read");
    offset += static_cast<std::uint64_t>(n);
    out = out.subspan(static_cast<std::size_t>(n));
  }
}

// ---- names ----------------------------------------------------------------------------------------------------------

std::optional<SplitName> parse_split_name(std::string_view path) {
  // PREFIX-00002-of-00009.gguf
  constexpr std::string_view kShape = "-#####-of-#####.gguf";
  if (path.size() <= kShape.size()) return std::nullopt;
  const std::string_view tail = path.substr(path.size() - kShape.size());
  for (std::size_t i = 0; i < kShape.size(); ++i) {
    const bool digit = tail[i] >= '0' && tail[i] <= '9';
    if (kShape[i] == '#' ? !digit : tail[i] != kShape[i]) return std::nullopt;
  }
  const auto number = [&](std::size_t at) {
    int n = 0;
    for (const char c : tail.substr(at, 5)) n = n * 10 + (c - '0');
    return n;
  };
  const SplitName name{std::string(path.substr(0, path.size() - kShape.size())), number(1),
                       number(10)};
  if (name.part < 1 || name.part > name.count) return std::nullopt;
  return name;
}

std::string split_path(std::string_view prefix, int part, int count) {
  char tail[48];
  std::snprintf(tail, sizeof tail, "-%05d-of-%05d.gguf", part, count);
  return std::string(prefix) + tail;
}

// ---- ModelFile ------------------------------------------------------------------------------------------------------

ModelFile ModelFile::open(const std::string& path, const OpenOptions& options) {
  ModelFile m;
  const std::optional<SplitName> split = parse_split_name(path);
  const int count = split ? split->count : 1;
  if (split) check_siblings_exist(*split);
  for (int part = 1; part <= count; ++part) {
    m.files_.emplace_back(split ? split_path(split->prefix, part, count) : path);
    const FileSource& file = m.files_.back();
    m.headers_.push_back(read_gguf(file, {part - 1, options.header_only}));
    const GgufHeader& h = m.headers_.back();
    m.parts_.push_back({file.name(), file.size(), h.tensors.size()});
    if (split) check_place(h, part, count);
    if (part > 1) check_same_model(m.headers_.front(), h, m.warnings_);
  }
  if (!split) check_is_whole(m.headers_.front());
  m.index_tensors();
  m.check_tensor_counts(options.ignore_split_count);
  return m;
}

ModelFile ModelFile::outline(const std::string& name, Metadata metadata,
                             std::vector<TensorInfo> tensors) {
  ModelFile m;
  GgufHeader header;
  header.file = name;
  header.metadata = std::move(metadata);
  header.tensors = std::move(tensors);
  m.parts_.push_back({name, 0, header.tensors.size()});
  m.headers_.push_back(std::move(header));
  m.index_tensors();
  return m;
}

void ModelFile::index_tensors() {
  std::size_t total = 0;
  for (const GgufHeader& h : headers_) total += h.tensors.size();
  tensors_.reserve(total);
  for (GgufHeader& h : headers_) {
    for (TensorInfo& t : h.tensors) tensors_.push_back(std::move(t));
    h.tensors.clear();
  }
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    const auto [it, is_new] = index_.emplace(tensors_[i].name, i);
    if (!is_new) {
      throw std::invalid_argument(
          where(tensors_[i]) + ": the tensor is also in " +
          file_part(parts_[static_cast<std::size_t>(tensors_[it->second].part)].path));
    }
  }
}

void ModelFile::check_tensor_counts(bool ignore) {
  constexpr const char* kKey = "split.tensors.count";
  const auto first = metadata().get<std::int64_t>(kKey);
  for (std::size_t i = 1; i < headers_.size(); ++i) {
    const auto stated = headers_[i].metadata.get<std::int64_t>(kKey);
    if (stated && first) {
      check_count(headers_[i].file, "the first part says " + std::to_string(*first), *stated,
                  *first, ignore, warnings_);
    }
  }
  if (first) {
    const std::string held = std::to_string(tensors_.size());
    const std::string found = parts_.size() == 1 ? "the file holds " + held + " tensors"
                                                 : "the " + std::to_string(parts_.size()) +
                                                       " parts hold " + held + " tensors";
    check_count(parts_.front().path, found, *first, static_cast<std::int64_t>(tensors_.size()),
                ignore, warnings_);
  }
}

const TensorInfo* ModelFile::find(std::string_view name) const {
  const auto it = index_.find(name);
  return it == index_.end() ? nullptr : &tensors_[it->second];
}

std::uint64_t ModelFile::bytes() const {
  std::uint64_t total = 0;
  for (const PartInfo& p : parts_) total += p.bytes;
  return total;
}

std::uint64_t ModelFile::tensor_bytes() const {
  std::uint64_t total = 0;
  for (const TensorInfo& t : tensors_) total += t.bytes;
  return total;
}

std::string ModelFile::where(const TensorInfo& t) const {
  return file_part(parts_[static_cast<std::size_t>(t.part)].path) + ": " + printable(t.name);
}

const std::byte* ModelFile::checked_range(const TensorInfo& t, std::uint64_t begin,
                                          std::uint64_t end) const {
  if (begin > end || end > t.bytes) {
    throw std::invalid_argument(where(t) + ": bytes " + std::to_string(begin) + " to " +
                                std::to_string(end) + " wanted, it has " + std::to_string(t.bytes));
  }
  if (files_.empty()) throw std::invalid_argument(where(t) + ": an outline holds no data");
  const FileSource& file = files_[static_cast<std::size_t>(t.part)];
  if (t.offset + end > file.size()) {
    throw std::invalid_argument(where(t) + ": ends at byte " + std::to_string(t.offset + end) +
                                ", file has " + std::to_string(file.size()) +
                                " (a header without data?)");
  }
  return file.data() + t.offset + begin;
}

const std::byte* ModelFile::data(const TensorInfo& t) const { return checked_range(t, 0, t.bytes); }

void ModelFile::will_need(const TensorInfo& t, std::uint64_t begin, std::uint64_t end) const {
  if (begin == end) return;
  const std::byte* first = checked_range(t, begin, end);
  std::byte* const stop = page_ceil(first + (end - begin));
  for (std::byte* p = page_floor(first); p < stop; p += kAdviseStep) {
    const std::size_t n = std::min<std::size_t>(kAdviseStep, static_cast<std::size_t>(stop - p));
    // A hint: where it cannot be taken the bytes are read on first use.
    if (::madvise(p, n, MADV_WILLNEED) != 0) return;
  }
}

void ModelFile::populate(const TensorInfo& t, std::uint64_t begin, std::uint64_t end) const {
  const auto window_end = [&](std::uint64_t at) {
    return end - at > kPopulateStep ? at + kPopulateStep : end;
  };
  if (begin < end) will_need(t, begin, window_end(begin));
  while (begin < end) {
    const std::uint64_t next = window_end(begin);
    if (next < end) will_need(t, next, window_end(next));
    const std::byte* first = checked_range(t, begin, next);
    std::byte* const from = page_floor(first);
    std::byte* const stop = page_ceil(first + (next - begin));
    while (::madvise(from, static_cast<std::size_t>(stop - from), MADV_POPULATE_READ) != 0) {
      if (errno == EINTR || errno == EAGAIN) continue;
      if (errno != EINVAL) {
        throw std::system_error(errno, std::generic_category(), where(t) + ": reading its pages");
      }
      for (const volatile std::byte* p = from; p < stop; p += page_bytes()) static_cast<void>(*p);
      break;
    }
    begin = next;
  }
}

// Advice only: a kernel without huge pages refuses it, and needs it not.
void ModelFile::map_singly(const TensorInfo& t) const {
  const std::byte* first = checked_range(t, 0, t.bytes);
  std::byte* const from = page_floor(first);
  std::byte* const stop = page_ceil(first + t.bytes);
  if (from < stop) ::madvise(from, static_cast<std::size_t>(stop - from), MADV_NOHUGEPAGE);
}

void ModelFile::release(const TensorInfo& t, std::uint64_t begin, std::uint64_t end) const {
  const std::byte* first = checked_range(t, begin, end);
  std::byte* const from = page_ceil(first);
  std::byte* const stop = page_floor(first + (end - begin));
  if (from < stop) ::madvise(from, static_cast<std::size_t>(stop - from), MADV_DONTNEED);
}

std::string ModelFile::fingerprint() const {
  Hash hash;
  hash.add(parts_.size());
  if (files_.empty()) {
    const std::string& name = parts_.front().path;
    hash.add(std::as_bytes(std::span(name)));
  }
  for (std::size_t i = 0; i < files_.size(); ++i) add_part(hash, files_[i], headers_[i]);
  return hash.hex();
}

}  // namespace k3
