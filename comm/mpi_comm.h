// Ranks as MPI processes. This header shows no MPI type, so that a main needs none.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "comm/comm.h"
#include "comm/host_stage.h"
#include "comm/launcher.h"

namespace k3 {

// MPI_Init_thread (funneled: only the thread that made the World may communicate) to MPI_Finalize;
// the first object in main. Where MPI runs already, it neither starts nor ends it. Throws
// LaunchError when MPI does not start, or when this process is one of several singletons
// (check_singletons). Destroyed while an exception unwinds it calls MPI_Abort: the other ranks wait
// in a collective, and MPI_Finalize would wait for them.
class World {
 public:
  World();
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  const LaunchFacts& facts() const { return facts_; }
  // What this rank waits for, in any group of the world.
  const std::shared_ptr<CallBoard>& board() const { return board_; }

 private:
  LaunchFacts facts_;
  std::shared_ptr<CallBoard> board_ = std::make_shared<CallBoard>();
  int rank_ = 0;
  int size_ = 1;
  bool owner_ = false;
  int exceptions_ = 0;  // in flight when the World was made
};

struct MpiOptions {
  // Sizes at which a call changes its ways; results are the same bits at any value.
  std::size_t max_message_bytes = std::size_t{1} << 30;  // longer ones are cut: MPI counts are ints
  std::size_t small_sum_bytes =
      std::size_t{32} << 10;  // a sum whose ranks receive no more is one exchange, not two
  std::size_t scratch_floats = std::size_t{4} << 20;  // a data call works in pieces of this size
};

// The Comm of all ranks of the world. `stage`: where data calls get device memory (host_stage.h);
// none: data is host memory. It and the World must outlive the Comm and all groups split from it.
std::unique_ptr<Comm> make_mpi_comm(World& world, HostStage* stage = nullptr,
                                    const MpiOptions& options = {});

// This rank among the ranks that share its host, in world order: which device it takes. Collective.
struct LocalGroup {
  int rank = 0;
  int size = 1;
};
LocalGroup local_group(World& world);

// What the MPI library says it is, one line.
std::string mpi_library_version();

// Ends every rank of the job with this exit code. For a failure that the ranks could not agree on;
// print the line first.
[[noreturn]] void abort_world(int exit_code);

}  // namespace k3
