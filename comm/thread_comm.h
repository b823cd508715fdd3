// Ranks as threads of one process: for tests, under a debugger and TSan. Data is host memory; sums
// give the same bits as MpiComm's. Stricter than MPI in three ways, so that tests find what a
// cluster would hang on: send() always waits for its recv(); ranks that are in different calls, or
// in the same call with different sizes, are an error at once; and a rank that waits for one that
// has failed or returned throws instead of waiting for ever.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "comm/comm.h"

namespace k3 {

// One Comm for each of `world` ranks; give each to its own thread. A thread that gives up without
// run_ranks leaves the others waiting, unless a time limit is set.
std::vector<std::unique_ptr<Comm>> make_thread_comms(int world);

// Runs `body` once per rank, each in its own thread, and returns when all have ended. Where a rank
// throws, ranks that wait for it throw too, and the first failing rank's exception is rethrown
// here.
void run_ranks(int world, const std::function<void(Comm&)>& body);

}  // namespace k3
