// AVX-512 (F, BW, DQ, VL) with FMA and F16C: a vector is one register. Compiled with those flags whatever the build is
// for, and called only where the processor has them (kernel_table.cpp). Includes nothing whose functions others share.
#include <immintrin.h>

#include "kernels/cpu/simd.h"

namespace k3::cpu {
namespace {

struct Avx512 {
  using V = __m512;
  static constexpr int kRows = 4, kTokens = 4;

  K3_INLINE static V zero() { return _mm512_setzero_ps(); }
  K3_INLINE static V set(float f) { return _mm512_set1_ps(f); }
  K3_INLINE static V load(const float* p) { return _mm512_loadu_ps(p); }
  K3_INLINE static V load(const float* p, int n) {
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p);
  }
  K3_INLINE static void store(float* p, V v) { _mm512_storeu_ps(p, v); }
  K3_INLINE static V add(V a, V b) { return _mm512_add_ps(a, b); }
  K3_INLINE static V sub(V a, V b) { return _mm512_sub_ps(a, b); }
  K3_INLINE static V mul(V a, V b) { return _mm512_mul_ps(a, b); }
  K3_INLINE static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }

  K3_INLINE static float half(std::uint16_t h) { return _cvtsh_ss(h); }
  K3_INLINE static V from_i8(__m128i q) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(q)); }
  K3_INLINE static V from_half(const std::uint16_t* h) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(h)));
  }
  K3_INLINE static V from_bf16(const std::uint16_t* h) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(h));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  // Lane l with l + 8, then + 4, + 2, + 1: combine() of the plain table.
  K3_INLINE static float sum(V v) {
    const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
  }

  // y[t * y_stride + r] = sum(acc[4 t + r]): 16 sums at once, in the same order. Each step adds two halves of a vector and
  // packs two results into one.
  K3_INLINE static void sum_16(const V (&acc)[16], float* y, std::int64_t y_stride) {
    V a[8], b[4], c[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {  // acc i and i + 8, eight lanes each
      a[i] = add(_mm512_shuffle_f32x4(acc[i], acc[i + 8], 0x44),
                 _mm512_shuffle_f32x4(acc[i], acc[i + 8], 0xee));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {  // i, i + 8, i + 4, i + 12, four lanes each
      b[i] = add(_mm512_shuffle_f32x4(a[i], a[i + 4], 0x88),
                 _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {  // in each quarter: two lanes of i, two of i + 2
      c[i] = add(_mm512_shuffle_ps(b[i], b[i + 2], 0x44), _mm512_shuffle_ps(b[i], b[i + 2], 0xee));
    }
    // In each quarter: 0, 2, 1, 3 of its four.
    const V d = add(_mm512_shuffle_ps(c[0], c[1], 0x88), _mm512_shuffle_ps(c[0], c[1], 0xdd));
    const V e = _mm512_permute_ps(d, 0xd8);
    _mm_storeu_ps(y, _mm512_castps512_ps128(e));
    _mm_storeu_ps(y + 2 * y_stride, _mm512_extractf32x4_ps(e, 1));
    _mm_storeu_ps(y + y_stride, _mm512_extractf32x4_ps(e, 2));
    _mm_storeu_ps(y + 3 * y_stride, _mm512_extractf32x4_ps(e, 3));
  }
};

}  // namespace

const KernelTable& avx512_table() {
  static constexpr KernelTable table = simd_table<Avx512>("avx512");
  return table;
}

}  // namespace k3::cpu
