// The parts of a model seen as one. A model is a single GGUF file, or N files named NAME-00001-of-0000N.gguf, of which
// any may be given; the others are looked for beside it.
//
// Files are mapped read-only as a whole, with random access advised: nothing is read from disk but what is touched or
// asked for with will_need() or populate(). The kernel may still map neighbours of a touched page that the page cache
// already holds (fault-around, 64 KiB by default), which costs address-space entries but no reads.
// A file that another process shortens after open() raises SIGBUS when its lost pages are touched; nothing here can
// turn that into an error.
//
// Errors: std::invalid_argument for what the files say (exit code 2), std::system_error for what the system refuses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "loader/gguf.h"
#include "loader/source.h"

namespace k3 {

// A regular file, opened and mapped read-only. read_at() reads through the descriptor, so that parsing a header costs
// large reads and no page faults, and leaves nothing mapped behind.
class FileSource : public Source {
 public:
  explicit FileSource(const std::string& path);
  ~FileSource() override;
  FileSource(FileSource&& other) noexcept;
  FileSource& operator=(FileSource&& other) noexcept;

  const std::string& name() const override { return path_; }
  std::uint64_t size() const override { return size_; }
  void read_at(std::uint64_t offset, std::span<std::byte> out) const override;
  const std::byte* data() const { return data_; }

 private:
  void close() noexcept;

  std::string path_;
  int fd_ = -1;
  std::uint64_t size_ = 0;
  std::byte* data_ = nullptr;
};

struct OpenOptions {
  bool ignore_split_count = false;  // a stale split.tensors.count becomes a warning
  bool header_only =
      false;  // for planning: tensor data may be absent; data() and its kin then throw where it is
};

struct PartInfo {
  std::string path;
  std::uint64_t bytes = 0;
  std::size_t n_tensors = 0;
};

class ModelFile {
 public:
  static ModelFile open(const std::string& path, const OpenOptions& options = {});
  // A model that no file holds: a name, metadata and tensors without bytes; data() and its kin throw.
  static ModelFile outline(const std::string& name, Metadata metadata,
                           std::vector<TensorInfo> tensors);

  // The first part's metadata; it has the keys of the whole model.
  const Metadata& metadata() const { return headers_.front().metadata; }
  // All parts' tensors, in the order of the parts and of their tables.
  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  const TensorInfo* find(std::string_view name) const;  // null when absent

  const std::vector<PartInfo>& parts() const { return parts_; }
  std::uint64_t bytes() const;         // of all files
  std::uint64_t tensor_bytes() const;  // of all tensors
  // One line each, for rank 0 to print once.
  const std::vector<std::string>& warnings() const { return warnings_; }

  // "model-00007-of-00014.gguf: blk.41.attn_q.weight", the beginning of an error about a tensor.
  std::string where(const TensorInfo& t) const;

  // First byte of the tensor in the mapping; valid as long as this object. At least 8-byte aligned.
  const std::byte* data(const TensorInfo& t) const;

  // Bytes [begin, end) of the tensor will be used soon: starts reading them in the background (rounded to pages).
  void will_need(const TensorInfo& t, std::uint64_t begin, std::uint64_t end) const;
  // The same, and returns when they are in memory and mapped: no page fault is left for the first use.
  void populate(const TensorInfo& t, std::uint64_t begin, std::uint64_t end) const;
  // Bytes [begin, end) have been copied elsewhere: unmaps the whole pages among them (the page cache may keep them).
  void release(const TensorInfo& t, std::uint64_t begin, std::uint64_t end) const;
  // The tensor's pages are mapped one by one from now on: a huge page of the page cache, mapped whole, would hold what other
  // ranks own. For tensors that are used in part.
  void map_singly(const TensorInfo& t) const;

  // 32 hex digits that tell models apart: a hash over every part's size, all header bytes, and samples of 256 bytes at 64
  // places spread evenly over each part's data. Reads some MB whatever the model's size. It is no proof against
  // intent, and a change between the samples goes unseen; it catches another quant, another fine-tune, a part of another set.
  std::string fingerprint() const;

 private:
  ModelFile() = default;
  void index_tensors();
  void check_tensor_counts(bool ignore);
  const std::byte* checked_range(const TensorInfo& t, std::uint64_t begin, std::uint64_t end) const;

  std::vector<FileSource> files_;
  std::vector<GgufHeader> headers_;  // tensors moved out into tensors_
  std::vector<PartInfo> parts_;
  std::vector<TensorInfo> tensors_;
  std::unordered_map<std::string_view, std::size_t> index_;  // views into tensors_
  std::vector<std::string> warnings_;
};

// NAME-00002-of-00009.gguf taken apart; part counts from 1.
struct SplitName {
  std::string prefix;  // directory and NAME
  int part = 0;
  int count = 0;
};
std::optional<SplitName> parse_split_name(std::string_view path);
std::string split_path(std::string_view prefix, int part, int count);

}  // namespace k3
