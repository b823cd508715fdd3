// The device of this rank, and how its data reach the other ranks'.
#pragma once

#include <memory>

#include "comm/mpi_comm.h"
#include "rank/device_stage.h"
#include "rank/run_config.h"

namespace k3 {

// In this order, so that the communicator goes before the memory it moves.
struct RankDevice {
  std::unique_ptr<Backend> backend;
  std::unique_ptr<DeviceStage> stage;  // where data calls go through the host
  std::unique_ptr<Comm> own;           // null: the control communicator serves for data too

  Comm& comm(Comm& control) const { return own ? *own : control; }
};

// --backend cpu: threads of this process, data over `control`.
// --backend cuda: a rank takes the device of its number among the ranks of its node; where the launcher shows each rank one
// device only, that one. Two ranks on one device are refused unless --share-gpu, and then speak through the host; otherwise
// data go as --comm says: nccl (the default), peer (the devices' memory, on one node) or mpi (through the host).
// Collective. Throws AgreedFault where a rank finds no device, or an odd one out.
RankDevice make_rank_device(const RunConfig& config, World& world, Comm& control);

}  // namespace k3
