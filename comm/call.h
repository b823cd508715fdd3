// One call in progress: counts itself at its Point, measures itself, shows itself on the board, and
// names itself in error lines.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "comm/call_board.h"
#include "comm/comm.h"

namespace k3 {

class Call {
 public:
  using Clock = std::chrono::steady_clock;

  // Counted at the start, so that a call that fails or never ends has its number too.
  Call(const char* op, Point point, PointStats& stats, std::size_t bytes,
       const CallContext& context = {})
      : op_(op),
        point_(point),
        stats_(stats),
        place_(context.place),
        board_(context.board.get()),
        begin_(Clock::now()) {
    ++stats_.calls;
    stats_.bytes += bytes;
    if (board_ != nullptr) board_->begin(op, point, stats_.calls, place_);
  }
  ~Call() {
    stats_.seconds += seconds();
    if (board_ != nullptr) board_->end();
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  void add_bytes(std::size_t bytes) { stats_.bytes += bytes; }
  const char* op() const { return op_; }
  Point point() const { return point_; }
  double seconds() const { return std::chrono::duration<double>(Clock::now() - begin_).count(); }
  std::uint64_t number() const { return stats_.calls; }
  Place place() const { return place_; }
  // "sum(AttnOut) call 12, layer 3"
  std::string name() const { return call_name(op_, point_, stats_.calls, place_); }

 private:
  const char* op_;
  Point point_;
  PointStats& stats_;
  Place place_;
  CallBoard* board_;
  Clock::time_point begin_;
};

}  // namespace k3
