// The one definition of a sum over ranks: ((part[0] + part[1]) + part[2]) + ..., element by
// element. Every backend that adds on the host uses it, so the bits do not depend on the backend,
// the message size or the rank that adds.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>

namespace k3 {

// out[i] = sum over r of parts[r][begin + i], i < n. `out` may be parts[r] + begin of one of the
// parts.
inline void ordered_sum(std::span<const float* const> parts, std::size_t begin, std::size_t n,
                        float* out) {
  constexpr std::size_t kBlock = 1024;
  std::array<float, kBlock> acc;  // parts are read to the end of the block before `out` is written
  for (std::size_t at = 0; at < n; at += kBlock) {
    const std::size_t m = std::min(kBlock, n - at);
    std::copy_n(parts[0] + begin + at, m, acc.data());
    for (std::size_t r = 1; r < parts.size(); ++r) {
      const float* part = parts[r] + begin + at;
      for (std::size_t i = 0; i < m; ++i) acc[i] += part[i];
    }
    std::copy_n(acc.data(), m, out + at);
  }
}

}  // namespace k3
