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
  const char* name;    // as ggml spells it: "Q8_0"
  std::int32_t elems;  // elements in a block; a row is a whole number of blocks
  std::int32_t bytes;  // bytes in a block
  std::int32_t
      granule;  // elements that share a scale (1, 16 or 32): the finest place a band may end
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

// ---- blocks as they lie in the file ---------------------------------------------------------------------------------
// Multi-byte fields are little-endian and at even offsets, and every block but MXFP4's has an even size, so two-byte
// alignment (which the file's alignment gives) is enough. `d`, `m`: binary16 scale and minimum. `q`: codes. A 32-bit
// field is two 16-bit halves, low first. Field meaning: tests/data/dequant/FORMATS.md.

struct BlockQ4_0 {
  std::uint16_t d;
  std::uint8_t q[16];
};
struct BlockQ4_1 {
  std::uint16_t d, m;
  std::uint8_t q[16];
};
struct BlockQ5_0 {
  std::uint16_t d;
  std::uint16_t h[2];
  std::uint8_t q[16];
};
struct BlockQ5_1 {
  std::uint16_t d, m;
  std::uint16_t h[2];
  std::uint8_t q[16];
};
struct BlockQ8_0 {
  std::uint16_t d;
  std::int8_t q[32];
};
struct BlockQ2_K {
  std::uint8_t s[16];
  std::uint8_t q[64];
  std::uint16_t d, m;
};
struct BlockQ3_K {
  std::uint8_t h[32];
  std::uint8_t q[64];
  std::uint8_t s[12];
  std::uint16_t d;
};
struct BlockQ4_K {
  std::uint16_t d, m;
  std::uint8_t s[12];
  std::uint8_t q[128];
};
struct BlockQ5_K {
  std::uint16_t d, m;
  std::uint8_t s[12];
  std::uint8_t h[32];
  std::uint8_t q[128];
};
struct BlockQ6_K {
  std::uint8_t ql[128];
  std::uint8_t qh[64];
  std::int8_t s[16];
  std::uint16_t d;
};
struct BlockIQ1_S {
  std::uint16_t d;
  std::uint8_t q[32];
  std::uint16_t h[8];
};
struct BlockIQ1_M {
  std::uint8_t q[32];
  std::uint8_t h[16];
  std::uint16_t s[4];
};
struct BlockIQ2_XXS {
  struct Group {
    std::uint8_t q[4];
    std::uint16_t w[2];
  };
  std::uint16_t d;
  Group g[8];
};
struct BlockIQ2_XS {
  std::uint16_t d;
  std::uint16_t q[32];
  std::uint8_t s[8];
};
struct BlockIQ2_S {
  std::uint16_t d;
  std::uint8_t q[32];
  std::uint8_t sign[32];
  std::uint8_t h[8];
  std::uint8_t s[8];
};
struct BlockIQ3_XXS {
  std::uint16_t d;
  std::uint8_t q[64];
  std::uint16_t w[8][2];
};
struct BlockIQ3_S {
  std::uint16_t d;
  std::uint8_t q[64];
  std::uint8_t h[8];
  std::uint8_t sign[32];
  std::uint8_t s[4];
};
struct BlockIQ4_NL {
  std::uint16_t d;
  std::uint8_t q[16];
};
struct BlockIQ4_XS {
  std::uint16_t d;
  std::uint16_t sh;
  std::uint8_t sl[4];
  std::uint8_t q[128];
};
struct BlockMXFP4 {
  std::uint8_t e;
  std::uint8_t q[16];
};
struct BlockTQ1_0 {
  std::uint8_t q[48];
  std::uint8_t h[4];
  std::uint16_t d;
};
struct BlockTQ2_0 {
  std::uint8_t q[64];
  std::uint16_t d;
};

static_assert(sizeof(BlockQ4_0) == 18 && sizeof(BlockQ4_1) == 20);
static_assert(sizeof(BlockQ5_0) == 22 && sizeof(BlockQ5_1) == 24);
static_assert(sizeof(BlockQ8_0) == 34);
static_assert(sizeof(BlockQ2_K) == 84 && sizeof(BlockQ3_K) == 110 && sizeof(BlockQ4_K) == 144);
static_assert(sizeof(BlockQ5_K) == 176 && sizeof(BlockQ6_K) == 210);
static_assert(sizeof(BlockIQ1_S) == 50 && sizeof(BlockIQ1_M) == 56);
static_assert(sizeof(BlockIQ2_XXS) == 66 && sizeof(BlockIQ2_XS) == 74 && sizeof(BlockIQ2_S) == 82);
static_assert(sizeof(BlockIQ3_XXS) == 98 && sizeof(BlockIQ3_S) == 110);
static_assert(sizeof(BlockIQ4_NL) == 18 && sizeof(BlockIQ4_XS) == 136);
static_assert(sizeof(BlockMXFP4) == 17);
static_assert(sizeof(BlockTQ1_0) == 54 && sizeof(BlockTQ2_0) == 66);

}  // namespace k3
