// Data calls through the memory of the other ranks' devices, control calls over another Comm. Shows no CUDA type.
#pragma once

#include <memory>

#include "comm/comm.h"

namespace k3 {

// A Comm whose data calls are kernels on the given stream, over the ranks of `control`, which all run on one node and each
// on the device current in the calling thread. Every rank maps the windows of all others (CUDA IPC; never multicast); 2 to
// 64 ranks, one is legal. Collective; the handles travel over `control`, which also carries every control call.
//
// sum() adds in rank order, so that every rank holds the bits of MpiComm's sum whatever the size. Data calls may be captured
// into a graph and replayed. send() and recv() use windows too; a send of a few MB does not wait for its recv(). PointStats
// of data calls hold the host's time to queue them.
//
// Faults: a device that waits longer for a peer than the time limit stops sending and lets its stream run on; the next call on
// this Comm or on one that was split from it throws CommError naming the call that was waited for (in a graph: its number at
// capture) and the rank that did not come.
//
// Throws AgreedFault on all ranks where one has no access to another's memory: other nodes, no peer access, no IPC.
std::unique_ptr<Comm> make_peer_comm(std::unique_ptr<Comm> control);

}  // namespace k3
