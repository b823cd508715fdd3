// RankReport on its way to rank 0.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "rank/engine.h"

namespace k3 {

// Fills in what the operating system knows of this process: host, resident set now and at its highest.
void describe_process(RankReport& report);

std::vector<std::byte> to_bytes(const RankReport& report);
RankReport report_from_bytes(std::span<const std::byte> bytes);

}  // namespace k3
