// A sequence on disk: what it remembers, cut as the ranks that wrote it were, for any other set of ranks to read.
//
// PATH holds one JSON object (SessionHead) and names PATH.<tag>.<i>, one part a rank that wrote. A part is
//   "k3-session-part\n" | blobs | index (JSON) | bytes of the index, its hash, both u64 little-endian
// with a blob for every KDA layer's band of heads ([heads][s: key, value | window: conv_kernel - 1, q k v, head_dim], f32) and one
// for the rows of every MLA layer's latent cache that the rank keeps. PATH is replaced last, so it never names parts that are not
// whole, and the parts of a session that it named before go only then.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/backend.h"
#include "loader/atomic_file.h"
#include "rank/band.h"

namespace k3 {

struct SessionPartSum {
  std::uint64_t bytes = 0;
  std::uint64_t index_hash = 0;
};

struct SessionHead {
  std::string fingerprint;  // of the model
  CacheType cache = CacheType::kF32;
  std::string tag;
  std::vector<std::int32_t> ids;        // all that the sequence has read
  std::vector<std::int32_t> seen;       // distinct ids, for the repetition penalty
  std::vector<std::int32_t> generated;  // distinct ids that were drawn
  std::vector<SessionPartSum> parts;
};
std::string session_head_text(const SessionHead& head);
// Throws std::invalid_argument naming `path`.
SessionHead parse_session_head(const std::string& text, const std::string& path);
SessionHead read_session_head(const std::string& path);
std::string session_part_path(const std::string& path, const std::string& tag, std::size_t part);

// Order matters, and every bit: 8 bytes at a time, for gigabytes pass through it.
std::uint64_t session_hash(std::span<const std::byte> bytes);

class SessionPartWriter {
 public:
  // Throws what AtomicFile throws.
  explicit SessionPartWriter(const std::string& path);
  // `blob`: the band's heads one after another.
  void add_heads(int layer, const Band& heads, std::span<const std::byte> blob);
  // `blob`: the rows that `deal` keeps of the sequence's positions.
  void add_rows(int layer, const RowShard& deal, std::span<const std::byte> blob);
  SessionPartSum commit();

 private:
  void add(const std::string& entry, std::span<const std::byte> blob);

  AtomicFile file_;
  std::uint64_t at_ = 0;
  std::string index_;  // JSON, but for the brackets around it
};

class SessionParts {
 public:
  // Opens the parts of `path` and reads their indexes. Throws std::invalid_argument naming the part that is missing or not
  // what `head` says, std::system_error for what the system refuses.
  SessionParts(const std::string& path, const SessionHead& head);
  ~SessionParts();
  SessionParts(const SessionParts&) = delete;
  SessionParts& operator=(const SessionParts&) = delete;

  // What one head of a KDA layer remembers. Throws std::invalid_argument where no part has it, it has another size, or its
  // bytes are not those that were written.
  void read_head(int layer, std::int64_t head, std::span<std::byte> to);
  // The rows that `deal` keeps of the first `length` positions.
  void read_rows(int layer, const RowShard& deal, std::int64_t length, std::size_t row_bytes,
                 std::span<std::byte> to);

 private:
  struct Blob {
    std::size_t part = 0;
    std::uint64_t at = 0, bytes = 0, hash = 0;
    Band heads;
    RowShard deal;
    bool is_rows = false;
  };
  void open_part(std::size_t part, const SessionPartSum& sum);
  void read_index(std::size_t part, const std::string& text);
  const std::vector<std::byte>& load(const Blob& blob);
  [[noreturn]] void refuse(std::size_t part, const std::string& why) const;

  std::string path_, tag_;
  std::vector<int> fds_;
  std::multimap<int, Blob> blobs_;                                                  // by layer
  std::map<std::pair<std::size_t, std::uint64_t>, std::vector<std::byte>> loaded_;  // of one layer
  int loaded_layer_ = -1;
};

}  // namespace k3
