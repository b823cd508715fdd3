// Signs of life of ranks that work for long without speaking. Rank 0 hears all, all hear rank 0: whoever is stuck, somebody
// notices, and the messages stay few.
#pragma once

#include <mpi.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace k3 {

class MpiPulse {
 public:
  // Messages travel on `comm` under a tag of their own. It must stay as long as a stretch lasts.
  MpiPulse(MPI_Comm comm, int rank, int size);

  struct Stuck {
    int rank = 0;  // of the group
    double seconds = 0;
    double done = 0;  // share of its work, 0 to 1
  };

  // Tells the others how far this rank is, at most a few times a second, and listens. limit_s == 0: nobody is ever stuck.
  std::optional<Stuck> beat(std::uint64_t done, std::uint64_t total, double limit_s);
  // Waits until all ranks have called it; the stretch is over then. Also returns when a rank is stuck.
  std::optional<Stuck> finish(double limit_s);

 private:
  using Clock = std::chrono::steady_clock;
  struct Message {
    std::uint64_t step = 0;  // grows with every sign of life
    std::uint64_t done = 0, total = 0;
    std::int32_t last = 0;
  };
  struct Partner {
    int rank = 0;
    Message heard;
    Clock::time_point since;  // when it last moved
    Message out;
    MPI_Request sending = MPI_REQUEST_NULL;
  };

  void begin();
  void listen();
  void tell(const Message& m, bool surely);
  std::optional<Stuck> stuck(double limit_s) const;
  bool all_last() const;

  MPI_Comm comm_;
  int rank_;
  std::vector<Partner> partners_;
  Message mine_;
  bool running_ = false;
  Clock::time_point told_;
};

}  // namespace k3
