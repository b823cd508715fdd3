// The two 16-bit floats. Conversions to float are exact; to 16 bits they round to nearest, ties to even.
#pragma once

#include <bit>
#include <cstdint>

namespace k3 {

// IEEE binary16. Exponent and mantissa are moved to float's place and scaled by 2^(127-15): the multiplication
// normalises subnormals exactly, so there is no branch for them.
constexpr float half_to_float(std::uint16_t h) {
  const std::uint32_t rest = h & 0x7fffu;
  const float scaled = std::bit_cast<float>(rest << 13) * 0x1p112f;
  const std::uint32_t special = rest >= 0x7c00u ? 0x7f800000u : 0u;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(scaled) | special |
                              static_cast<std::uint32_t>(h & 0x8000u) << 16);
}

constexpr std::uint16_t float_to_half(float f) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(f);
  const std::uint32_t sign = bits >> 16 & 0x8000u;
  const std::uint32_t rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);
  if (rest >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // rounds past 65504
  if (rest < 0x38800000u) {
    // Subnormal: adding 0.5 puts the ulp at 2^-24, binary16's, and the addition rounds.
    const float shifted = std::bit_cast<float>(rest) + 0.5f;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u));
  }
  const std::uint32_t odd = rest >> 13 & 1u;
  return static_cast<std::uint16_t>(sign | ((rest - 0x38000000u + 0xfffu + odd) >> 13));
}

constexpr float bf16_to_float(std::uint16_t b) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(b) << 16);
}

constexpr std::uint16_t float_to_bf16(float f) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(f);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>(bits >> 16 | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

}  // namespace k3
