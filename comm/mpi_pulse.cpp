#include "comm/mpi_pulse.h"

#include <algorithm>
#include <thread>

#include "comm/comm.h"

namespace k3 {
namespace {

constexpr int kTag = 1000;  // beyond those of the points
constexpr std::chrono::milliseconds kInterval{100};
constexpr std::chrono::milliseconds kNap{2};

void check(int error) {
  if (error != MPI_SUCCESS) throw CommError("a sign of life: MPI error " + std::to_string(error));
}

double seconds(std::chrono::steady_clock::duration d) {
  return std::chrono::duration<double>(d).count();
}

}  // namespace

MpiPulse::MpiPulse(MPI_Comm comm, int rank, int size) : comm_(comm), rank_(rank) {
  for (int r = 0; r < size; ++r) {
    if (r == rank || (rank != 0 && r != 0)) continue;
    partners_.emplace_back();
    partners_.back().rank = r;
  }
}

void MpiPulse::begin() {
  if (running_) return;
  running_ = true;
  mine_ = {};
  told_ = {};
  for (Partner& p : partners_) {
    p.heard = {};
    p.since = Clock::now();
  }
}

void MpiPulse::listen() {
  for (Partner& p : partners_) {
    // What comes after its last message belongs to the next stretch.
    while (p.heard.last == 0) {
      int there = 0;
      check(MPI_Iprobe(p.rank, kTag, comm_, &there, MPI_STATUS_IGNORE));
      if (!there) break;
      Message m;
      check(MPI_Recv(&m, sizeof m, MPI_BYTE, p.rank, kTag, comm_, MPI_STATUS_IGNORE));
      if (m.step != p.heard.step) p.since = Clock::now();
      p.heard = m;
    }
  }
}

// `surely`: waits for a message before it that is still under way; otherwise this one is left out.
void MpiPulse::tell(const Message& m, bool surely) {
  for (Partner& p : partners_) {
    int done = 1;
    if (surely) {
      check(MPI_Wait(&p.sending, MPI_STATUS_IGNORE));
    } else {
      check(MPI_Test(&p.sending, &done, MPI_STATUS_IGNORE));
    }
    if (!done) continue;
    p.out = m;
    check(MPI_Isend(&p.out, sizeof p.out, MPI_BYTE, p.rank, kTag, comm_, &p.sending));
  }
  told_ = Clock::now();
}

std::optional<MpiPulse::Stuck> MpiPulse::stuck(double limit_s) const {
  if (limit_s <= 0) return std::nullopt;
  for (const Partner& p : partners_) {
    const double waited = seconds(Clock::now() - p.since);
    if (p.heard.last != 0 || waited <= limit_s) continue;
    const double total = static_cast<double>(p.heard.total);
    return Stuck{p.rank, waited, total > 0 ? static_cast<double>(p.heard.done) / total : 0.0};
  }
  return std::nullopt;
}

bool MpiPulse::all_last() const {
  return std::all_of(partners_.begin(), partners_.end(),
                     [](const Partner& p) { return p.heard.last != 0; });
}

std::optional<MpiPulse::Stuck> MpiPulse::beat(std::uint64_t done, std::uint64_t total,
                                              double limit_s) {
  if (partners_.empty()) return std::nullopt;
  begin();
  if (Clock::now() - told_ < kInterval) return std::nullopt;
  ++mine_.step;
  mine_.done = done;
  mine_.total = total;
  tell(mine_, false);
  listen();
  return stuck(limit_s);
}

std::optional<MpiPulse::Stuck> MpiPulse::finish(double limit_s) {
  if (partners_.empty()) return std::nullopt;
  begin();
  Message last = mine_;
  ++last.step;
  last.last = 1;
  if (rank_ != 0) tell(last, true);
  for (listen(); !all_last(); listen()) {
    if (const std::optional<Stuck> s = stuck(limit_s)) return s;
    // Rank 0 waits for the slowest, and the others for rank 0: they must hear that it lives.
    if (rank_ == 0 && Clock::now() - told_ >= kInterval) {
      ++mine_.step;
      tell(mine_, false);
    }
    std::this_thread::sleep_for(kNap);
  }
  if (rank_ == 0) {
    last.step = mine_.step + 1;
    tell(last, true);
  }
  for (Partner& p : partners_) check(MPI_Wait(&p.sending, MPI_STATUS_IGNORE));
  running_ = false;
  return std::nullopt;
}

}  // namespace k3
