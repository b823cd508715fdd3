// What Open MPI chose to move messages with, as it says itself.
#pragma once

#include <string>

#include "comm/mpi_comm.h"

namespace k3 {

// "ob1 over self, tcp, vader" or "ucx", from the parts of Open MPI that are still open after its choice (MPI's tool
// interface lists their settings and no others'). The world must have spoken already: some parts are opened late. Empty where
// another MPI, or another release, does not tell.
std::string mpi_transport(const World& world);

}  // namespace k3
