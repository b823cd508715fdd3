#include "rank/band.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace k3 {

Band band_of(std::int64_t n, std::int64_t r, std::int64_t world, std::int64_t unit) {
  if (n < 0 || unit < 1 || world < 1 || r < 0 || r >= world) {
    throw std::invalid_argument("band_of: " + std::to_string(n) + " elements in units of " +
                                std::to_string(unit) + ", band " + std::to_string(r) + " of " +
                                std::to_string(world));
  }
  const std::int64_t n_unit = n / unit + (n % unit != 0);
  // floor(r * n_unit / world) without the product, which may overflow.
  const auto edge = [&](std::int64_t i) {
    const std::int64_t units = n_unit / world * i + n_unit % world * i / world;
    return units >= n_unit ? n : units * unit;
  };
  return {edge(r), edge(r + 1)};
}

}  // namespace k3
