// Times of calls too short to be timed one by one.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>

#include "kernels/backend.h"
#include "rank/bench_math.h"

namespace k3 {

// Seconds of one of `n_call` calls that `batch` queues on the backend, `repeat` times over, after one untimed batch. before:
// called in front of each, untimed.
inline Spread time_calls(Backend& backend, std::int64_t n_call, std::int64_t repeat,
                         const std::function<void()>& before, const std::function<void()>& batch) {
  std::vector<double> seconds;
  for (std::int64_t i = -1; i < repeat; ++i) {
    backend.synchronize();
    if (before) before();
    const auto begin = std::chrono::steady_clock::now();
    batch();
    backend.synchronize();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    if (i >= 0) seconds.push_back(took.count() / static_cast<double>(n_call));
  }
  return spread_of(seconds);
}

}  // namespace k3
