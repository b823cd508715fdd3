// The block types of GGUF files, once. Plain data: every room may include this file.
// Layout of each block: tests/data/dequant (byte-exact vectors) and the tables in kernels/codebooks.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace k3 {

// Values are ggml's type ids, as stored in a GGUF tensor header.
enum class BlockType : std::uint32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ2_K = 10,
  kQ3_K = 11,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kIQ2_XXS = 16,
  kIQ2_XS = 17,
  kIQ3_XXS = 18,
  kIQ1_S = 19,
  kIQ4_NL = 20,
  kIQ3_S = 21,
  kIQ2_S = 22,
  kIQ4_XS = 23,
  kIQ1_M = 29,
  kBF16 = 30,
  kTQ1_0 = 34,
  kTQ2_0 = 35,
  kMXFP4 = 39,
};

struct BlockTraits {
  BlockType type;
  const char* name;      // as ggml spells it: "Q8_0"
  std::int32_t elems;    // elements in a block; a row is a whole number of blocks
  std::int32_t bytes;    // bytes in a block
  std::int32_t granule;  // elements that share a scale (1, 16 or 32): the finest place a band may end
};

// The traits of `type`; every enumerator has them.
const BlockTraits& traits(BlockType type);

// The type stored as `id` in a file, or nothing when no decoder exists for it.
std::optional<BlockType> block_type_from_id(std::uint32_t id);

// The type ggml spells `name` ("IQ1_S", any case), or nothing.
std::optional<BlockType> block_type_from_name(std::string_view name);

// ggml's name for any id, decoded here or not ("Q8_K"); "type 77" for an id ggml does not know.
// So an error can say which type a file asks for.
const char* block_type_name(std::uint32_t id);

// Bytes of n_elem consecutive elements; n_elem must be a multiple of the block.
inline std::uint64_t block_bytes(BlockType type, std::uint64_t n_elem) {
  const BlockTraits& t = traits(type);
  return n_elem / static_cast<std::uint64_t>(t.elems) * static_cast<std::uint64_t>(t.bytes);
}

}  // namespace k3
