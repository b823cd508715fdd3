#include "apps/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include <fmt/core.h>

namespace k3 {

std::string human_bytes(double bytes) {
  const char* const units[] = {"B", "kB", "MB", "GB", "TB"};
  int unit = 0;
  while (bytes >= 1000 && unit < 4) {
    bytes /= 1000;
    ++unit;
  }
  return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.3g} {}", bytes, units[unit]);
}

std::string progress_line(const Progress& p) {
  const auto done = static_cast<double>(p.done);
  const auto total = static_cast<double>(p.total);
  const bool load = p.phase == Progress::Phase::kLoad;
  std::string line = load ? fmt::format("loading: {} of {}", human_bytes(done), human_bytes(total))
                          : fmt::format("prefill: {} of {} tokens", p.done, p.total);
  if (p.seconds > 0 && p.done > 0) {
    const double rate = done / p.seconds;
    line += load ? fmt::format(", {:.2f} GB/s", rate / 1e9) : fmt::format(", {:.1f} tok/s", rate);
    if (p.done < p.total) line += fmt::format(", {:.0f} s left", (total - done) / rate);
    if (p.done >= p.total) line += fmt::format(", {:.1f} s", p.seconds);
  }
  return line;
}

ProgressPrinter::ProgressPrinter() : live_(isatty(STDERR_FILENO) == 1) {}

void ProgressPrinter::operator()(const Progress& p) {
  if (p.phase != phase_) {
    finish();
    phase_ = p.phase;
    next_ = {};
    said_ = false;
    ended_ = false;
  }
  if (ended_) return;
  const bool last = p.done >= p.total;
  ended_ = last;
  const Clock::time_point now = Clock::now();
  // Plain lines go to files: the end of a phase, and a sign of life in a long one.
  if (!last && (now < next_ || (!live_ && !said_ && p.seconds < 10))) return;
  next_ = now + (live_ ? std::chrono::milliseconds(100) : std::chrono::seconds(10));
  said_ = true;
  const std::string text = progress_line(p);
  // \033[K wipes what a longer line left behind.
  if (live_) {
    std::fprintf(stderr, "\r%s\033[K", text.c_str());
    open_ = true;
    if (last) finish();
  } else {
    std::fprintf(stderr, "%s\n", text.c_str());
  }
  std::fflush(stderr);
}

void ProgressPrinter::line(const std::function<std::string()>& text) {
  const Clock::time_point now = Clock::now();
  if (now < next_line_) return;
  const bool first = next_line_ == Clock::time_point{};
  next_line_ = now + (live_ ? std::chrono::milliseconds(200) : std::chrono::seconds(10));
  if (!live_ && first) return;  // nothing has happened yet
  if (live_) {
    std::fprintf(stderr, "\r%s\033[K", text().c_str());
    open_ = true;
  } else {
    std::fprintf(stderr, "%s\n", text().c_str());
  }
  std::fflush(stderr);
}

void ProgressPrinter::finish() {
  if (open_) std::fputc('\n', stderr);
  open_ = false;
}

}  // namespace k3
