// Data calls over NCCL, control calls over another Comm. Shows no NCCL or CUDA type.
#pragma once

#include <memory>

#include "comm/comm.h"

namespace k3 {

// A Comm whose data calls are queued on the given stream, over the ranks of `control`, each on its own device (the one
// current in the calling thread). Collective: the unique id travels over `control`, which also carries every control call.
//
// Sums give every rank the same bits, but in NCCL's order, not in rank order. Data calls may be captured into a graph;
// destroy such graphs before the Comm. PointStats of data calls hold the host's time to queue them, not the device's.
//
// Faults: a data call that does not finish within the time limit, or an error that NCCL reports, aborts the communicator, so
// that the host's wait ends; the next call on this Comm then throws CommError naming the call that was waited for.
//
// Throws CommError where NCCL fails, and where this build has no CUDA part.
std::unique_ptr<Comm> make_nccl_comm(std::unique_ptr<Comm> control);

// "NCCL 2.28.3", or nothing where this build has no CUDA part.
std::string nccl_library_version();

}  // namespace k3
