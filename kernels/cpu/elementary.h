// exp, tanh and the logistic function in single precision: no branches and no tables, so that loops over them are
// vectorised, and no fused steps, so that every instruction set gives the same bits. Within 2 units in the last place of the
// true value (tests/kernels/elementary_test.cpp); NaN gives NaN. Polynomials: Cephes, expf and tanhf.
#pragma once

#include <cstdint>

namespace k3::cpu {

// Compiled once for each instruction set: an out-of-line copy would be shared between them.
#define K3_INLINE [[gnu::always_inline]] inline

K3_INLINE float power_of_two(std::int32_t n) {
  return __builtin_bit_cast(float, (static_cast<std::uint32_t>(n) + 127u) << 23);
}

K3_INLINE float exp_f32(float x) {
  x = x > 89.0f ? 89.0f : x;
  x = x < -104.0f ? -104.0f : x;
  // Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
  constexpr float kRound = 12582912.0f;
  const float shifted = x * 1.44269504088896341f + kRound;
  const float n = shifted - kRound;
  // ln 2 in two parts; n times the first is exact.
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const float e = (p * r * r + r) + 1.0f;
  // 2^n as two factors: n reaches from -150, where the result is subnormal, to 128, where it is infinite.
  const auto k = static_cast<std::int32_t>(__builtin_bit_cast(std::uint32_t, shifted) -
                                           __builtin_bit_cast(std::uint32_t, kRound));
  const std::int32_t half = k >> 1;
  return e * power_of_two(half) * power_of_two(k - half);
}

K3_INLINE float sigmoid(float x) { return 1.0f / (1.0f + exp_f32(-x)); }

K3_INLINE float tanh_f32(float x) {
  const std::uint32_t sign = __builtin_bit_cast(std::uint32_t, x) & 0x80000000u;
  const float a = __builtin_bit_cast(float, __builtin_bit_cast(std::uint32_t, x) ^ sign);
  const float large = 1.0f - 2.0f / (exp_f32(2.0f * a) + 1.0f);
  const float z = a * a;
  float p = -5.70498872745e-3f;
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const float small = p * z * a + a;
  const float t = a < 0.625f ? small : large;
  return __builtin_bit_cast(float, __builtin_bit_cast(std::uint32_t, t) | sign);
}

}  // namespace k3::cpu
