// The frame of a main with ranks: MPI, from exceptions to one line and an exit code, signals.
#pragma once

#include <functional>
#include <string>

#include "comm/mpi_comm.h"

namespace k3 {

// One rank of a job. Starts MPI, refuses singletons, runs `body` and ends MPI in order. Exactly one line reaches stderr
// whatever goes wrong:
//  - AgreedFault is on all ranks alike: rank 0 prints it, all end with its code;
//  - any other exception is this rank's own: it prints "rank R/W: line" and ends the job (MPI_Abort), for the others
//    wait for it in a collective.
int rank_main(const std::string& program, const std::function<int(World&, Comm&)>& body);

// --help and --version: `print` without MPI, once, by the process that the launcher calls rank 0. A page is to be had in
// whatever way the program was started, an interactive shell of a job script among them.
int page_main(const std::string& program, const std::function<void()>& print);

// Runs `work` on rank 0 alone; all ranks return when it has, or throw its error as AgreedFault. Collective.
void on_rank_0(Comm& comm, const std::function<void()>& work);

// From here on SIGINT, SIGTERM and SIGUSR1 ask for an end after the current step (Engine::request_stop); a second one of
// the first two ends the process at once. Writing to a closed pipe, or past the allowed size of a file, becomes an error
// instead of a signal.
void stop_on_signals();
bool stop_asked() noexcept;

}  // namespace k3
