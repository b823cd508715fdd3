// One call in progress: counts itself at its Point, measures itself, and names itself in error
// lines.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "comm/comm.h"

namespace k3 {

class Call {
 public:
  using Clock = std::chrono::steady_clock;

  // Counted at the start, so that a call that fails or never ends has its number too.
  Call(const char* op, Point point, PointStats& stats, std::size_t bytes)
      : op_(op), point_(point), stats_(stats), begin_(Clock::now()) {
    ++stats_.calls;
    stats_.bytes += bytes;
  }
  ~Call() { stats_.seconds += seconds(); }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  void add_bytes(std::size_t bytes) { stats_.bytes += bytes; }
  const char* op() const { return op_; }
  Point point() const { return point_; }
  double seconds() const { return std::chrono::duration<double>(Clock::now() - begin_).count(); }
  // "sum(AttnOut) call 12"
  std::string name() const {
    return std::string(op_) + "(" + point_name(point_) + ") call " + std::to_string(stats_.calls);
  }

 private:
  const char* op_;
  Point point_;
  PointStats& stats_;
  Clock::time_point begin_;
};

}  // namespace k3
