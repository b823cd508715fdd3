#include "kernels/cpu/dequant.h"

#include <stdexcept>
#include <string>

#include "kernels/cpu/decode_blocks.h"

namespace k3 {
namespace {

struct Plain {};

}  // namespace

void dequantize(BlockType type, const std::byte* blocks, float* out, std::int64_t n_elem) {
  const BlockTraits& t = traits(type);
  if (n_elem < 0 || n_elem % t.elems != 0) {
    throw std::invalid_argument("dequantize: " + std::to_string(n_elem) +
                                " elements are not whole blocks of " + std::to_string(t.elems) +
                                " (" + t.name + ")");
  }
  if (n_elem > 0) cpu::decode_blocks<Plain>(type, blocks, out, n_elem);
}

void dequantize_range(BlockType type, const std::byte* row, std::int64_t first, std::int64_t n,
                      float* out) {
  if (n <= 0) return;
  const BlockTraits& t = traits(type);
  cpu::decode_range<Plain>(type, row, first, n, t.elems, t.bytes, out);
}

}  // namespace k3
