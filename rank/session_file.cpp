#include "rank/session_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include <fmt/format.h>

#include "rank/json_text.h"

namespace k3 {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kMagic = "k3-session-part\n";
constexpr int kVersion = 1;
constexpr std::array kCaches = {"f32", "f16", "bf16"};  // as CacheType counts

std::string hex(std::uint64_t v) { return fmt::format("{:016x}", v); }

std::uint64_t read_hex(const Json& v) { return std::stoull(v.get<std::string>(), nullptr, 16); }

// At most `bytes` from `at`; fewer at the file's end.
std::size_t read_at(int fd, std::uint64_t at, void* to, std::size_t bytes,
                    const std::string& name) {
  std::size_t done = 0;
  while (done < bytes) {
    const ssize_t n =
        ::pread(fd, static_cast<char*>(to) + done, bytes - done, static_cast<off_t>(at + done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw std::system_error(errno, std::generic_category(), name);
    if (n == 0) break;
    done += static_cast<std::size_t>(n);
  }
  return done;
}

int open_file(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0 && errno == ENOENT) throw std::invalid_argument(path + ": no such file");
  if (fd < 0) throw std::system_error(errno, std::generic_category(), path);
  return fd;
}

}  // namespace

std::uint64_t session_hash(std::span<const std::byte> bytes) {
  std::uint64_t h = 0xcbf29ce484222325ull ^ bytes.size();
  while (!bytes.empty()) {
    std::uint64_t word = 0;
    const std::size_t n = std::min<std::size_t>(bytes.size(), sizeof word);
    std::memcpy(&word, bytes.data(), n);
    h = (h ^ word) * 0x9e3779b97f4a7c15ull;
    h ^= h >> 29;
    bytes = bytes.subspan(n);
  }
  return h;
}

std::string session_part_path(const std::string& path, const std::string& tag, std::size_t part) {
  return fmt::format("{}.{}.{}", path, tag, part);
}

std::string session_head_text(const SessionHead& head) {
  Json parts = Json::array();
  for (const SessionPartSum& p : head.parts)
    parts.push_back({{"bytes", p.bytes}, {"index_hash", hex(p.index_hash)}});
  const Json j = {{"k3_session", kVersion},
                  {"model_fingerprint", head.fingerprint},
                  {"cache", kCaches[static_cast<std::size_t>(head.cache)]},
                  {"tag", head.tag},
                  {"parts", parts},
                  {"ids", head.ids},
                  {"seen", head.seen},
                  {"generated", head.generated}};
  return write_json(j) + "\n";
}

SessionHead parse_session_head(const std::string& text, const std::string& path) {
  const auto refuse = [&](const std::string& why) {
    throw std::invalid_argument(path + ": is not a session file: " + why);
  };
  SessionHead h;
  try {
    const Json j = read_json(text);
    if (!j.is_object() || !j.contains("k3_session")) refuse("has no member k3_session");
    if (j["k3_session"] != kVersion)
      refuse(fmt::format("version {}, expected {}", write_json(j["k3_session"]), kVersion));
    h.fingerprint = j.at("model_fingerprint").get<std::string>();
    const auto cache = j.at("cache").get<std::string>();
    const auto at = std::find(kCaches.begin(), kCaches.end(), cache);
    if (at == kCaches.end()) refuse("cache " + cache);
    h.cache = static_cast<CacheType>(at - kCaches.begin());
    h.tag = j.at("tag").get<std::string>();
    if (h.tag.find_first_not_of("0123456789abcdef-") != std::string::npos) refuse("tag " + h.tag);
    for (const Json& p : j.at("parts"))
      h.parts.push_back({p.at("bytes").get<std::uint64_t>(), read_hex(p.at("index_hash"))});
    h.ids = j.at("ids").get<std::vector<std::int32_t>>();
    h.seen = j.at("seen").get<std::vector<std::int32_t>>();
    h.generated = j.at("generated").get<std::vector<std::int32_t>>();
  } catch (const nlohmann::json::exception& e) {
    refuse(e.what());
  } catch (const std::out_of_range&) {
    refuse("a hash that is none");
  } catch (const std::invalid_argument& e) {
    const std::string why = e.what();
    if (why.rfind(path, 0) == 0) throw;
    refuse(why);
  }
  return h;
}

SessionHead read_session_head(const std::string& path) {
  const int fd = open_file(path);
  std::string text;
  try {
    struct stat st {};
    if (::fstat(fd, &st) != 0) throw std::system_error(errno, std::generic_category(), path);
    if (!S_ISREG(st.st_mode)) throw std::invalid_argument(path + ": is not a regular file");
    text.resize(static_cast<std::size_t>(st.st_size));
    text.resize(read_at(fd, 0, text.data(), text.size(), path));
  } catch (...) {
    ::close(fd);
    throw;
  }
  ::close(fd);
  return parse_session_head(text, path);
}

// ---- writing --------------------------------------------------------------------------------------------------------

SessionPartWriter::SessionPartWriter(const std::string& path) : file_(path) {
  file_.write(std::as_bytes(std::span(kMagic)));
  at_ = kMagic.size();
}

void SessionPartWriter::add(const std::string& entry, std::span<const std::byte> blob) {
  if (!index_.empty()) index_ += ",\n";
  index_ += fmt::format(R"({{{}, "at": {}, "bytes": {}, "hash": "{}"}})", entry, at_, blob.size(),
                        hex(session_hash(blob)));
  file_.write(blob);
  at_ += blob.size();
}

void SessionPartWriter::add_heads(int layer, const Band& heads, std::span<const std::byte> blob) {
  add(fmt::format(R"("layer": {}, "heads": [{}, {}])", layer, heads.begin, heads.end), blob);
}

void SessionPartWriter::add_rows(int layer, const RowShard& deal, std::span<const std::byte> blob) {
  add(fmt::format(R"("layer": {}, "deal": [{}, {}, {}])", layer, deal.part, deal.n_part,
                  deal.block),
      blob);
}

SessionPartSum SessionPartWriter::commit() {
  const std::string index = "[" + index_ + "]\n";
  const std::uint64_t tail[] = {index.size(), session_hash(std::as_bytes(std::span(index)))};
  file_.write(std::as_bytes(std::span(index)));
  file_.write(std::as_bytes(std::span(tail)));
  file_.commit();
  return {at_ + index.size() + sizeof tail, tail[1]};
}

// ---- reading --------------------------------------------------------------------------------------------------------

SessionParts::SessionParts(const std::string& path, const SessionHead& head)
    : path_(path), tag_(head.tag) {
  try {
    for (std::size_t i = 0; i < head.parts.size(); ++i) open_part(i, head.parts[i]);
  } catch (...) {
    for (const int fd : fds_) ::close(fd);
    throw;
  }
}

SessionParts::~SessionParts() {
  for (const int fd : fds_) ::close(fd);
}

void SessionParts::refuse(std::size_t part, const std::string& why) const {
  throw std::invalid_argument(session_part_path(path_, tag_, part) + ": " + why);
}

void SessionParts::open_part(std::size_t part, const SessionPartSum& sum) {
  const std::string name = session_part_path(path_, tag_, part);
  fds_.push_back(open_file(name));
  struct stat st {};
  if (::fstat(fds_.back(), &st) != 0) throw std::system_error(errno, std::generic_category(), name);
  if (static_cast<std::uint64_t>(st.st_size) != sum.bytes)
    refuse(part, fmt::format("holds {} bytes, {} says {}", st.st_size, path_, sum.bytes));
  std::uint64_t tail[2] = {};
  if (sum.bytes < kMagic.size() + sizeof tail) refuse(part, "is not a part of a session");
  read_at(fds_.back(), sum.bytes - sizeof tail, tail, sizeof tail, name);
  if (tail[0] > sum.bytes - sizeof tail - kMagic.size())
    refuse(part, "its index has no room in it");
  std::string index(tail[0], '\0');
  read_at(fds_.back(), sum.bytes - sizeof tail - tail[0], index.data(), index.size(), name);
  if (tail[1] != sum.index_hash || session_hash(std::as_bytes(std::span(index))) != tail[1])
    refuse(part, "its index is not the one that was written");
  read_index(part, index);
}

void SessionParts::read_index(std::size_t part, const std::string& text) {
  try {
    for (const Json& e : read_json(text)) {
      Blob b;
      b.part = part;
      b.at = e.at("at").get<std::uint64_t>();
      b.bytes = e.at("bytes").get<std::uint64_t>();
      b.hash = read_hex(e.at("hash"));
      if (e.contains("heads")) {
        b.heads = {e["heads"].at(0).get<std::int64_t>(), e["heads"].at(1).get<std::int64_t>()};
      } else {
        b.is_rows = true;
        b.deal.part = e.at("deal").at(0).get<std::int64_t>();
        b.deal.n_part = e["deal"].at(1).get<std::int64_t>();
        b.deal.block = e["deal"].at(2).get<std::int64_t>();
      }
      blobs_.emplace(e.at("layer").get<int>(), b);
    }
  } catch (const std::exception& e) {
    refuse(part, std::string("its index: ") + e.what());
  }
}

// The blobs of one layer stay: its heads are asked for one by one.
const std::vector<std::byte>& SessionParts::load(const Blob& blob) {
  const auto key = std::pair(blob.part, blob.at);
  if (const auto it = loaded_.find(key); it != loaded_.end()) return it->second;
  std::vector<std::byte> bytes(blob.bytes);
  const std::string name = session_part_path(path_, tag_, blob.part);
  if (read_at(fds_[blob.part], blob.at, bytes.data(), bytes.size(), name) != bytes.size() ||
      session_hash(bytes) != blob.hash) {
    refuse(blob.part, fmt::format("bytes {} to {} are not those that were written", blob.at,
                                  blob.at + blob.bytes));
  }
  return loaded_.emplace(key, std::move(bytes)).first->second;
}

void SessionParts::read_head(int layer, std::int64_t head, std::span<std::byte> to) {
  if (std::exchange(loaded_layer_, layer) != layer) loaded_.clear();
  const auto [begin, end] = blobs_.equal_range(layer);
  for (auto it = begin; it != end; ++it) {
    const Blob& b = it->second;
    if (b.is_rows || head < b.heads.begin || head >= b.heads.end) continue;
    const std::vector<std::byte>& bytes = load(b);
    if (bytes.size() != to.size() * static_cast<std::size_t>(b.heads.size()))
      refuse(b.part, fmt::format("layer {}: {} bytes for {} heads, expected {} for each", layer,
                                 bytes.size(), b.heads.size(), to.size()));
    const auto at = static_cast<std::size_t>(head - b.heads.begin) * to.size();
    std::memcpy(to.data(), bytes.data() + at, to.size());
    return;
  }
  throw std::invalid_argument(
      fmt::format("{}: no part holds head {} of layer {}", path_, head, layer));
}

void SessionParts::read_rows(int layer, const RowShard& deal, std::int64_t length,
                             std::size_t row_bytes, std::span<std::byte> to) {
  if (std::exchange(loaded_layer_, layer) != layer) loaded_.clear();
  const auto [begin, end] = blobs_.equal_range(layer);
  for (auto it = begin; it != end; ++it) {
    const Blob& b = it->second;
    if (b.is_rows && load(b).size() != row_bytes * static_cast<std::size_t>(b.deal.rows(length)))
      refuse(b.part, fmt::format("layer {}: {} bytes of cache rows, expected {} of {} each", layer,
                                 b.bytes, b.deal.rows(length), row_bytes));
  }
  std::size_t row = 0;
  for (std::int64_t pos = 0; pos < length; ++pos) {
    if (!deal.keeps(pos)) continue;
    auto it = begin;
    while (it != end && !(it->second.is_rows && it->second.deal.keeps(pos))) ++it;
    if (it == end)
      throw std::invalid_argument(
          fmt::format("{}: no part holds position {} of layer {}", path_, pos, layer));
    const std::size_t from = row_bytes * static_cast<std::size_t>(it->second.deal.rows(pos));
    std::memcpy(to.data() + row_bytes * row++, load(it->second).data() + from, row_bytes);
  }
}

}  // namespace k3
