// Seeded synthetic weights: block i of a tensor is a pure function of (kind, type, key, i), so that any part of a model
// can be made anywhere, on a host or on a device, in any order. Plain inline functions, integers and single roundings: the
// same bytes come out of every compiler that keeps to IEEE arithmetic.
//
// Matrices: random but valid blocks whose values have mean about 0 and the standard deviation asked for. Every block has
// its own scale (within 25 %) and sign of scale, so a block or scale in the wrong place shows.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "kernels/half.h"
#include "loader/blocks.h"

// half.h's functions are constexpr: nvcc takes them in device code with --expt-relaxed-constexpr.
#ifdef __CUDACC__
#define K3_SYNTH_FN __host__ __device__ inline
#else
#define K3_SYNTH_FN inline
#endif

namespace k3 {

enum class SynthKind : std::uint8_t {
  kMatrix,  // mean 0, standard deviation `sigma`
  kNorm,    // around 1, within +-sigma
  kDecay,   // ssm_a: -A with A from 0.25 to 4.25, most of them small
  kDt,      // ssm_dt: -5 to 2, so that decays range from almost none to almost full
};

struct SynthTensor {
  SynthKind kind = SynthKind::kMatrix;
  BlockType type = BlockType::kF32;  // kMatrix: any; else F32
  std::uint64_t key = 0;             // synth_key(seed, name)
  float sigma = 0;
};

// splitmix64's finaliser: every input bit reaches every output bit.
K3_SYNTH_FN std::uint64_t synth_mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// FNV-1a of the name, mixed with the seed.
K3_SYNTH_FN std::uint64_t synth_key(std::uint64_t seed, const char* name, std::size_t n) {
  std::uint64_t h = 0xcbf29ce484222325u;
  for (std::size_t i = 0; i < n; ++i) {
    h = (h ^ static_cast<std::uint8_t>(name[i])) * 0x100000001b3u;
  }
  return synth_mix(h ^ synth_mix(seed + 0x9e3779b97f4a7c15u));
}

// The random words of one block, in order.
class SynthWords {
 public:
  K3_SYNTH_FN SynthWords(std::uint64_t key, std::uint64_t block)
      : state_(synth_mix(key + block * 0x9e3779b97f4a7c15u)) {}
  K3_SYNTH_FN std::uint64_t next() {
    state_ += 0xd1342543de82ef95u;  // odd, and not the step between blocks
    return synth_mix(state_);
  }

 private:
  std::uint64_t state_;
};

// About normal: the sum of four 16-bit uniforms, as an integer of standard deviation 37837.2.
K3_SYNTH_FN float synth_normal(std::uint64_t word, float sigma) {
  const std::int32_t sum = static_cast<std::int32_t>(word & 0xffff) +
                           static_cast<std::int32_t>(word >> 16 & 0xffff) +
                           static_cast<std::int32_t>(word >> 32 & 0xffff) +
                           static_cast<std::int32_t>(word >> 48) - 2 * 0xffff;
  return static_cast<float>(sum) * (sigma / 37837.2f);
}

// [0, 1) in 24 bits.
K3_SYNTH_FN float synth_uniform(std::uint64_t word) {
  return static_cast<float>(word >> 40) * 0x1p-24f;
}

// Standard deviation of a type's values when its scale field is 1 and the rest random as below, the scale's own spread
// included. tests/rank/synth_test.cpp holds them against the decoders.
K3_SYNTH_FN float synth_unit(BlockType type) {
  switch (type) {
    case BlockType::kQ4_0:
    case BlockType::kQ4_1:
      return 4.66f;
    case BlockType::kQ5_0:
    case BlockType::kQ5_1:
      return 9.32f;
    case BlockType::kQ8_0:
      return 74.5f;
    case BlockType::kQ2_K:
      return 9.93f;
    case BlockType::kQ3_K:
      return 43.7f;
    case BlockType::kQ4_K:
      return 194.3f;
    case BlockType::kQ5_K:
      return 389.5f;
    case BlockType::kQ6_K:
      return 1375.0f;
    case BlockType::kIQ4_NL:
      return 68.0f;
    case BlockType::kIQ4_XS:
      return 1257.0f;
    case BlockType::kIQ2_XXS:
      return 53.8f;
    case BlockType::kIQ2_XS:
      return 56.1f;
    case BlockType::kIQ2_S:
      return 56.8f;
    case BlockType::kIQ3_XXS:
      return 144.0f;
    case BlockType::kIQ3_S:
      return 141.2f;
    case BlockType::kIQ1_S:
    case BlockType::kIQ1_M:
      return 7.26f;
    case BlockType::kTQ1_0:
    case BlockType::kTQ2_0:
      return 0.825f;
    default:
      return 1.0f;
  }
}

K3_SYNTH_FN void synth_put16(std::uint8_t* to, std::uint32_t v) {
  to[0] = static_cast<std::uint8_t>(v);
  to[1] = static_cast<std::uint8_t>(v >> 8);
}

// Bits 0..6 of the word: how far the scale is from its mean; bit 7: its sign.
K3_SYNTH_FN float synth_scale(BlockType type, std::uint64_t word, float sigma) {
  const float spread = static_cast<float>(192 + static_cast<int>(word & 127)) * 0x1p-8f;
  const float d = sigma / synth_unit(type) * spread;
  return word & 128 ? -d : d;
}

// The 12 bytes of 6-bit scales and minima of Q4_K and Q5_K, the minimum of a group equal to its scale: with
// m = mean(v) * d the group's values then have mean 0.
K3_SYNTH_FN void synth_k_scales(std::uint8_t* s, std::uint64_t word) {
  for (int g = 0; g < 4; ++g) {
    const auto low = static_cast<std::uint32_t>(16 + (word >> (6 * g)) % 48);
    const auto high = static_cast<std::uint32_t>(16 + (word >> (24 + 6 * g)) % 48);
    s[g] = s[g + 4] = static_cast<std::uint8_t>(low | high >> 4 << 6);
    s[g + 8] = static_cast<std::uint8_t>((high & 15) | (high & 15) << 4);
  }
}

// Base-3 digits as a byte of TQ1_0: v of 0 .. 242 as a fraction of 256, rounded up.
K3_SYNTH_FN std::uint8_t synth_trits(std::uint32_t v) {
  return static_cast<std::uint8_t>((v * 256 + 242) / 243);
}

K3_SYNTH_FN void synth_tq1_0(std::uint8_t* b, SynthWords& words) {
  for (int i = 0; i < 52; ++i) {
    const auto r = static_cast<std::uint32_t>(words.next() >> 32);
    // The last four bytes hold four digits each, the lowest of five unused.
    b[i] = i < 48 ? synth_trits(r % 243) : synth_trits(r % 81 * 3);
  }
}

K3_SYNTH_FN void synth_tq2_0(std::uint8_t* b, SynthWords& words) {
  for (int i = 0; i < 64; ++i) {
    const auto r = static_cast<std::uint32_t>(words.next() >> 32) % 81;
    b[i] = static_cast<std::uint8_t>(r % 3 | r / 3 % 3 << 2 | r / 9 % 3 << 4 | r / 27 << 6);
  }
}

// The exponent of MXFP4: a power of two below sigma or the one above, mixed so that the mean square is right.
K3_SYNTH_FN std::uint8_t synth_mxfp4_exponent(std::uint64_t word, float sigma) {
  const float target = sigma / 5.8523f;  // the root of the mean square of the sixteen values
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(target);
  const auto exponent =
      static_cast<int>(bits >> 23 & 255);  // target = mantissa * 2^(exponent - 127)
  const float mantissa = std::bit_cast<float>((bits & 0x7fffffu) | 0x3f800000u);
  const float chance = (mantissa * mantissa - 1.0f) / 3.0f;
  const int e = exponent + 1 + (synth_uniform(word) < chance);
  return static_cast<std::uint8_t>(e < 2 ? 2 : e > 254 ? 254 : e);
}

// The fields of a block that are not free: scales, and what must fit them. The rest of `b` is already random.
K3_SYNTH_FN void synth_fields(BlockType type, std::uint8_t* b, SynthWords& words, float sigma) {
  const std::uint64_t word = words.next();
  const float d = synth_scale(type, word, sigma);
  const std::uint32_t half = float_to_half(d);
  switch (type) {
    case BlockType::kQ4_1:
    case BlockType::kQ5_1:
      synth_put16(b, half);
      synth_put16(b + 2, float_to_half(d * (type == BlockType::kQ4_1 ? -7.5f : -15.5f)));
      break;
    case BlockType::kQ2_K:
      for (int i = 0; i < 16; ++i) b[i] = static_cast<std::uint8_t>((b[i] & 15) * 17);
      synth_put16(b + 80, half);
      synth_put16(b + 82, float_to_half(d * 1.5f));
      break;
    case BlockType::kQ3_K:
      synth_put16(b + 108, half);
      break;
    case BlockType::kQ4_K:
    case BlockType::kQ5_K:
      synth_put16(b, half);
      synth_put16(b + 2, float_to_half(d * (type == BlockType::kQ4_K ? 7.5f : 15.5f)));
      synth_k_scales(b + 4, words.next());
      break;
    case BlockType::kQ6_K:
      synth_put16(b + 208, half);
      break;
    case BlockType::kIQ1_M:
      // The scale's four nibbles are the top ones of the four words of small scales.
      for (int i = 0; i < 4; ++i) {
        std::uint8_t* top = b + 48 + 2 * i + 1;
        *top = static_cast<std::uint8_t>((*top & 15) | (half >> (4 * i) & 15) << 4);
      }
      break;
    case BlockType::kTQ1_0:
      synth_tq1_0(b, words);
      synth_put16(b + 52, half);
      break;
    case BlockType::kTQ2_0:
      synth_tq2_0(b, words);
      synth_put16(b + 64, half);
      break;
    case BlockType::kMXFP4:
      b[0] = synth_mxfp4_exponent(word, sigma);
      break;
    default:  // Q4_0, Q5_0, Q8_0 and the other IQ types begin with their scale
      synth_put16(b, half);
      break;
  }
}

// One element of a tensor of unquantized values.
K3_SYNTH_FN float synth_value(SynthKind kind, std::uint64_t word, float sigma) {
  const float u = synth_uniform(word);
  switch (kind) {
    case SynthKind::kNorm:
      return 1.0f + (2.0f * u - 1.0f) * sigma;
    case SynthKind::kDecay: {
      const float square = u * u;
      return -(0.25f + 4.0f * square);
    }
    case SynthKind::kDt: {
      const float wide = 7.0f * u;
      return wide - 5.0f;
    }
    default:
      return synth_normal(word, sigma);
  }
}

// Block `block` of tensor `t`, traits(t.type).bytes bytes; `n_byte` is that number (device code has no traits()).
K3_SYNTH_FN void synth_block(const SynthTensor& t, std::uint64_t block, std::uint8_t* to,
                             int n_byte) {
  SynthWords words(t.key, block);
  if (t.type == BlockType::kF32 || t.type == BlockType::kF16 || t.type == BlockType::kBF16) {
    const float v = synth_value(t.kind, words.next(), t.sigma);
    if (t.type == BlockType::kF32) {
      const std::uint32_t bits = std::bit_cast<std::uint32_t>(v);
      synth_put16(to, bits);
      synth_put16(to + 2, bits >> 16);
    } else {
      synth_put16(to, t.type == BlockType::kF16 ? float_to_half(v) : float_to_bf16(v));
    }
    return;
  }
  for (int i = 0; i < n_byte; i += 8) {
    std::uint64_t w = words.next();
    for (int j = i; j < i + 8 && j < n_byte; ++j, w >>= 8) to[j] = static_cast<std::uint8_t>(w);
  }
  synth_fields(t.type, to, words, t.sigma);
}

}  // namespace k3
