// AVX2 with FMA and F16C: a vector is two registers. See kernel_avx512.cpp.
#include <immintrin.h>

#include "kernels/cpu/simd.h"

namespace k3::cpu {
namespace {

struct Avx2 {
  struct V {
    __m256 lo, hi;
  };
  static constexpr int kRows = 2, kTokens = 2;

  K3_INLINE static V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  K3_INLINE static V set(float f) { return {_mm256_set1_ps(f), _mm256_set1_ps(f)}; }
  K3_INLINE static V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  K3_INLINE static V load(const float* p, int n) {
    alignas(32) float rest[16] = {};
    for (int i = 0; i < n; ++i) rest[i] = p[i];
    return load(rest);
  }
  K3_INLINE static void store(float* p, V v) {
    _mm256_storeu_ps(p, v.lo);
    _mm256_storeu_ps(p + 8, v.hi);
  }
  K3_INLINE static V add(V a, V b) {
    return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
  }
  K3_INLINE static V sub(V a, V b) {
    return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
  }
  K3_INLINE static V mul(V a, V b) {
    return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
  }
  K3_INLINE static V fma(V a, V b, V c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
  }

  K3_INLINE static float half(std::uint16_t h) { return _cvtsh_ss(h); }
  K3_INLINE static V from_i8(__m128i q) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(q)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(q, 8)))};
  }
  K3_INLINE static V from_half(const std::uint16_t* h) {
    return {_mm256_cvtph_ps(load_bytes(h)), _mm256_cvtph_ps(load_bytes(h + 8))};
  }
  K3_INLINE static V from_bf16(const std::uint16_t* h) {
    const auto widen = [](__m128i b) __attribute__((always_inline)) {
      return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(b), 16));
    };
    return {widen(load_bytes(h)), widen(load_bytes(h + 8))};
  }

  // Lane l with l + 8, then + 4, + 2, + 1: combine() of the plain table.
  K3_INLINE static float sum(V v) {
    const __m256 a = _mm256_add_ps(v.lo, v.hi);
    const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
  }
  // Only for tiles of 4 rows and 4 tokens, which 16 registers do not hold.
  static void sum_16(const V (&)[16], float*, std::int64_t) {}
};

}  // namespace

const KernelTable& avx2_table() {
  static constexpr KernelTable table = simd_table<Avx2>("avx2");
  return table;
}

}  // namespace k3::cpu
