// Which CPUs the ranks of a node compute on.
#pragma once

#include "comm/mpi_comm.h"
#include "rank/run_config.h"

namespace k3 {

// The CPUs that the ranks of this host may use together, shared out; at least 1. Sees the binding of each rank, so ranks
// bound to cores and ranks free to roam get the same. Collective.
int threads_per_rank(World& world, Comm& comm);

// How this rank's CPU backend is to run: config.threads (at least 1), its instructions, and, unless --bind no, CPUs of its
// own among those that the launcher gave the ranks of this host (kernels/cpu/places.h). Collective. Throws AgreedFault
// where a rank cannot tell the machine's cores.
CpuOptions cpu_options(const RunConfig& config, World& world, Comm& comm);

}  // namespace k3
