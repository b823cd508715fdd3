#include "rank/band.h"

#include <doctest/doctest.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <stdexcept>

namespace {

using k3::Band;
using k3::band_of;

using Cutter = std::function<Band(std::int64_t n, std::int64_t r, std::int64_t world)>;

bool tiles(const Cutter& cut, std::int64_t n, std::int64_t world) {
  std::int64_t at = 0;
  for (std::int64_t r = 0; r < world; ++r) {
    const Band b = cut(n, r, world);
    if (b.begin != at || b.end < b.begin) return false;
    at = b.end;
  }
  return at == n;
}

TEST_CASE("bands tile an axis for any length, world and unit") {
  for (std::int64_t unit : {1, 2, 3, 16, 32, 256}) {
    const Cutter cut = [&](auto n, auto r, auto world) { return band_of(n, r, world, unit); };
    for (std::int64_t world = 1; world <= 64; ++world) {
      for (std::int64_t n = 0; n <= 300; n += n < 70 ? 1 : 23) CHECK(tiles(cut, n, world));
      for (const std::int64_t n : {896, 3072, 3584, 7168, 163840}) CHECK(tiles(cut, n, world));
    }
  }
}

TEST_CASE("chunks of floor(n / world) lose the end of the axis, and the check sees it") {
  const Cutter chunks = [](auto n, auto r, auto world) {
    return Band{n / world * r, n / world * (r + 1)};
  };
  CHECK(tiles(chunks, 896, 8));
  CHECK_FALSE(tiles(chunks, 896, 3));
}

TEST_CASE("boundaries are floor(r n / world) in units, clipped to the axis") {
  CHECK(band_of(896, 1, 3) == Band{298, 597});
  CHECK(band_of(3072, 3, 8, 32) == Band{1152, 1536});
  CHECK(band_of(100, 2, 3, 32) == Band{64, 100});
  CHECK(band_of(100, 0, 3, 32) == Band{0, 32});
}

TEST_CASE("interior boundaries are multiples of the unit and bands differ by one unit at most") {
  for (std::int64_t world = 1; world <= 16; ++world) {
    std::int64_t least = std::numeric_limits<std::int64_t>::max(), most = 0;
    for (std::int64_t r = 0; r < world; ++r) {
      const Band b = band_of(3072, r, world, 32);
      CHECK(b.begin % 32 == 0);
      least = std::min(least, b.size());
      most = std::max(most, b.size());
    }
    CHECK(most - least <= 32);
  }
}

TEST_CASE("more ranks than units leave empty bands that still tile") {
  int empty = 0;
  for (std::int64_t r = 0; r < 64; ++r) empty += band_of(5, r, 64).empty();
  CHECK(empty == 59);
}

TEST_CASE("lengths near the limit of 64 bits do not overflow") {
  const std::int64_t n = std::numeric_limits<std::int64_t>::max();
  for (std::int64_t unit : {1, 3, 256}) {
    const Cutter cut = [&](auto len, auto r, auto world) { return band_of(len, r, world, unit); };
    CHECK(tiles(cut, n, 7));
    CHECK(tiles(cut, n, 64));
  }
}

TEST_CASE("impossible cuts are refused") {
  CHECK_THROWS_AS(band_of(-1, 0, 1), std::invalid_argument);
  CHECK_THROWS_AS(band_of(10, 0, 0), std::invalid_argument);
  CHECK_THROWS_AS(band_of(10, 3, 3), std::invalid_argument);
  CHECK_THROWS_AS(band_of(10, -1, 3), std::invalid_argument);
  CHECK_THROWS_AS(band_of(10, 0, 3, 0), std::invalid_argument);
}

}  // namespace
