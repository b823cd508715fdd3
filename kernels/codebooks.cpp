#include "kernels/codebooks.h"

namespace k3 {

constexpr Grid<std::uint64_t, 2048> kIq1sGrid = expand_grid<std::uint64_t>(kIq1sPacked, kIq1Levels);
constexpr Grid<std::uint64_t, 256> kIq2xxsGrid =
    expand_grid<std::uint64_t>(kIq2xxsPacked, kIq2Levels);
constexpr Grid<std::uint64_t, 512> kIq2xsGrid =
    expand_grid<std::uint64_t>(kIq2xsPacked, kIq2Levels);
constexpr Grid<std::uint64_t, 1024> kIq2sGrid = expand_grid<std::uint64_t>(kIq2sPacked, kIq2Levels);
constexpr Grid<std::uint32_t, 256> kIq3xxsGrid =
    expand_grid<std::uint32_t>(kIq3xxsPacked, kIq3xxsLevels);
constexpr Grid<std::uint32_t, 512> kIq3sGrid = expand_grid<std::uint32_t>(kIq3sPacked, kIq3sLevels);

}  // namespace k3
