// What the NCCL part offers, for builds without it.
#include "comm/nccl_comm.h"

namespace k3 {

std::unique_ptr<Comm> make_nccl_comm(std::unique_ptr<Comm>) {
  throw CommError("this build has no NCCL (nvcc or nccl.h was not found at configure)");
}

std::string nccl_library_version() { return ""; }

}  // namespace k3
