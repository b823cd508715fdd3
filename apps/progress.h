// How far loading and prefill have come, on stderr: a live line on a terminal, plain lines otherwise.
#pragma once

#include <chrono>
#include <functional>
#include <string>

#include "rank/engine.h"

namespace k3 {

class ProgressPrinter {
 public:
  ProgressPrinter();
  void operator()(const Progress& progress);
  // A line of another kind, made only when it is time to show one: live, or every 10 s.
  void line(const std::function<std::string()>& text);
  // Ends a live line, so that what follows starts in the first column.
  void finish();

 private:
  using Clock = std::chrono::steady_clock;
  bool live_;
  bool open_ = false;   // a live line is on the screen
  bool said_ = false;   // something of this phase has been printed
  bool ended_ = false;  // its last line has
  Progress::Phase phase_ = Progress::Phase::kLoad;
  Clock::time_point next_, next_line_;
};

// "12.3 GB", decimal.
std::string human_bytes(double bytes);

// One line about a phase: "loading 12.3 of 45.6 GB, 3.21 GB/s, 10 s left". Pure.
std::string progress_line(const Progress& progress);

}  // namespace k3
