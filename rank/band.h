// The only place an axis is cut.
#pragma once

#include <cstdint>

namespace k3 {

// A rank's half-open range of one axis.
struct Band {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size() const { return end - begin; }
  bool empty() const { return end <= begin; }
  bool operator==(const Band&) const = default;
};

// Band r of `world` over n elements, cut only at multiples of `unit`: floor(r * ceil(n/unit) / world) * unit, clipped to n.
// The bands of r = 0 .. world-1 tile [0, n) exactly, also where nothing divides; some are empty when n/unit < world.
// Throws std::invalid_argument when n < 0, unit < 1, world < 1 or r is outside [0, world).
Band band_of(std::int64_t n, std::int64_t r, std::int64_t world, std::int64_t unit = 1);

}  // namespace k3
