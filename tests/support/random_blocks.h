// Random weights of any type, and random activations.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <random>
#include <vector>

#include "kernels/cpu/dequant.h"
#include "loader/blocks.h"

namespace k3::test {

inline constexpr BlockType kAllTypes[] = {
    BlockType::kF32,     BlockType::kF16,     BlockType::kBF16,   BlockType::kQ4_0,
    BlockType::kQ4_1,    BlockType::kQ5_0,    BlockType::kQ5_1,   BlockType::kQ8_0,
    BlockType::kQ2_K,    BlockType::kQ3_K,    BlockType::kQ4_K,   BlockType::kQ5_K,
    BlockType::kQ6_K,    BlockType::kIQ2_XXS, BlockType::kIQ2_XS, BlockType::kIQ2_S,
    BlockType::kIQ3_XXS, BlockType::kIQ3_S,   BlockType::kIQ1_S,  BlockType::kIQ1_M,
    BlockType::kIQ4_NL,  BlockType::kIQ4_XS,  BlockType::kMXFP4,  BlockType::kTQ1_0,
    BlockType::kTQ2_0};

inline std::vector<float> random_values(std::size_t n, unsigned seed, float low = -1,
                                        float high = 1) {
  std::mt19937 rng(seed);
  std::uniform_real_distribution<float> u(low, high);
  std::vector<float> v(n);
  for (float& x : v) x = u(rng);
  return v;
}

// Blocks of random bytes, each drawn again until its values are finite and small.
inline std::vector<std::byte> random_blocks(BlockType type, std::int64_t n_elem, unsigned seed) {
  const BlockTraits& t = traits(type);
  std::mt19937 rng(seed);
  std::vector<std::byte> bytes(static_cast<std::size_t>(n_elem / t.elems * t.bytes));
  std::vector<float> value(static_cast<std::size_t>(t.elems));
  for (std::size_t at = 0; at < bytes.size(); at += static_cast<std::size_t>(t.bytes)) {
    do {
      for (std::int32_t i = 0; i < t.bytes; ++i)
        bytes[at + static_cast<std::size_t>(i)] = static_cast<std::byte>(rng());
      dequantize(type, bytes.data() + at, value.data(), t.elems);
    } while (!std::all_of(value.begin(), value.end(), [](float v) { return std::abs(v) < 1e3f; }));
  }
  return bytes;
}

}  // namespace k3::test
