// IQ1_S rows in planes (layout.h), decoded by the grouped product into pairs of f16: weight = d * (2s + 1) * (code - 1 + delta),
// delta = +-1/8. The scale of a group of 32 is rounded to f16 once, each weight once more.
#pragma once

#include <cstdint>

#include "kernels/cuda/codec.cuh"
#include "kernels/cuda/tensor_core.cuh"

namespace k3::cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

struct Iq1sOctets {
  // Weights come out 4 times too large: that leaves room to scale codes in place instead of shifting them.
  static constexpr float kFactor = 0.25f;

  struct Row {
    const std::byte* bytes;  // null: a row past the matrix, decoded as zeros
  };
  // As loaded, for 32 elements: whoever loads ahead must not touch what has yet to arrive.
  struct Packed {
    uint2 codes;
    std::uint32_t nibbles;  // of this group and its neighbour
    std::uint32_t shift;    // which of the two
    std::uint32_t d;
  };
  struct Scale {
    __half2 step[2], shift;  // 4 * d * (2s + 1), a quarter of that; the first times delta
  };

  static __device__ __forceinline__ std::uint32_t and_or(std::uint32_t a, std::uint32_t b,
                                                         std::uint32_t c) {
    std::uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
  }

  std::int64_t n_in, first, scales_at, d_at;

  explicit __device__ __forceinline__ Iq1sOctets(const Weight& w) : n_in(w.n_in), first(w.first) {
    scales_at = (n_in / 4 + 15) / 16 * 16;
    d_at = scales_at + ((n_in / 32 + 1) / 2 + 15) / 16 * 16;
  }
  static __device__ __forceinline__ Row row(const Weight& w, std::int64_t mat, std::int64_t r) {
    return {r < w.n_out ? w.data + mat * w.mat_bytes + r * w.row_bytes : nullptr};
  }
  // Elements [i, i + 32), i a multiple of 32; those past the row have d = 0.
  __device__ __forceinline__ Packed load(const Row& r, std::int64_t i) const {
    if (r.bytes == nullptr || i >= n_in) return {{0, 0}, 0, 0, 0};
    const auto* nibbles = reinterpret_cast<const std::uint8_t*>(r.bytes + scales_at);
    const auto* d = reinterpret_cast<const std::uint16_t*>(r.bytes + d_at);
    return {*reinterpret_cast<const uint2*>(r.bytes + i / 4), nibbles[i / 64],
            static_cast<std::uint32_t>(i % 64 / 8), d[(first + i) / 256]};
  }
  static __device__ __forceinline__ Scale scale(const Packed& p) {
    const std::uint32_t nibble = p.nibbles >> p.shift;
    const __half d = __ushort_as_half(static_cast<unsigned short>(p.d));
    const __half quarter =
        __float2half_rn(__half2float(d) * static_cast<float>(2 * (nibble & 7) + 1));
    const __half step = __hmul(quarter, __float2half_rn(4.0f));
    const __half shift = __hmul(step, __float2half_rn(nibble & 8 ? -0.125f : 0.125f));
    return {{__half2half2(step), __half2half2(quarter)}, __half2half2(shift)};
  }
  // Octet o of the 4: its pairs in the order of element_of_slot().
  static __device__ __forceinline__ void octet(const Packed& p, const Scale& s, int o,
                                               std::uint32_t (&f)[4]) {
    std::uint32_t magic;  // 1024 twice, in a register: an instruction holds one constant
    asm("mov.b32 %0, 0x64006400;" : "=r"(magic));
    const std::uint32_t codes = (o < 2 ? p.codes.x : p.codes.y) >> (o % 2 * 4);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      // Code c in bits 0-1 or 2-3 of 1024: 1024 + c or 1024 + 4c. Less 1024 + 1 or 1024 + 4, it is exact.
      const std::uint32_t mask = j < 2 ? 0x00030003u : 0x000c000cu;
      const std::uint32_t bits = and_or(j % 2 == 0 ? codes : codes >> 8, mask, magic);
      const __half2 zero = __half2half2(__ushort_as_half(j < 2 ? 0x6401 : 0x6404));
      const __half2 v =
          __hfma2(__hsub2(*reinterpret_cast<const __half2*>(&bits), zero), s.step[j / 2], s.shift);
      f[j] = *reinterpret_cast<const std::uint32_t*>(&v);
    }
  }
};

#else

struct Iq1sOctets {};

#endif

}  // namespace k3::cuda
