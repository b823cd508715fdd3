// Writes GGUF files as a stream: metadata and tensor table first, then each tensor's bytes as the caller produces them.
// Tensor data is never held in memory. Files appear under their name only when whole (written to PATH.PID.tmp, renamed).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "loader/blocks.h"
#include "loader/gguf.h"

namespace k3 {

struct TensorDecl {
  std::string name;
  BlockType type = BlockType::kF32;
  std::vector<std::int64_t> dims;  // fastest first, 1 to 4

  std::uint64_t bytes() const;  // throws std::invalid_argument for a shape the type cannot hold
};

using MetadataEntries = std::vector<std::pair<std::string, Value>>;

struct GgufWriteOptions {
  std::uint32_t version = 3;
  std::uint64_t alignment = 32;  // a power of two; general.alignment is written when it is not 32
  bool header_only = false;      // no tensor data: reads back with GgufReadOptions::header_only
  std::uint64_t max_part_bytes = 0;  // start a new part before tensor data passes this; 0: no limit
  std::int64_t max_part_tensors = 0;  // likewise by count
  bool metadata_part = false;         // when split: the first part holds no tensors
};

// Takes the bytes of the tensor being written, in order, in pieces of any size.
using Put = std::function<void(std::span<const std::byte>)>;
// Called once per tensor, in order; must put exactly decl.bytes() bytes.
using Fill = std::function<void(std::size_t index, const TensorDecl& decl, const Put& put)>;

// Writes `path`, or, when the options split it, NAME-00001-of-0000N.gguf ... for a path NAME.gguf, each with split.no,
// split.count and split.tensors.count. Returns the paths written. Throws std::invalid_argument for a shape or a fill of
// the wrong size, std::system_error when the disk refuses; then no new file is left behind.
std::vector<std::string> write_gguf(const std::string& path, const MetadataEntries& metadata,
                                    const std::vector<TensorDecl>& tensors,
                                    const GgufWriteOptions& options, const Fill& fill);

// The header alone, padded to the alignment; tensor offsets follow in order, each padded likewise.
std::vector<std::byte> encode_gguf_header(const MetadataEntries& metadata,
                                          std::span<const TensorDecl> tensors,
                                          const GgufWriteOptions& options);

}  // namespace k3
