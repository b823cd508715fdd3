// How a communicator that moves host bytes reaches data that live on a device. A device backend
// implements it; without one, data are host memory already.
#pragma once

#include <cstddef>

#include "comm/comm.h"

namespace k3 {

class HostStage {
 public:
  virtual ~HostStage() = default;

  // Host memory that the copies below are fast from (pinned, where the device knows such). Throws
  // when there is none.
  virtual std::byte* allocate(std::size_t bytes) = 0;
  virtual void release(std::byte* memory) noexcept = 0;

  // host <- device, after all work that `stream` holds. The bytes are there on return.
  virtual void to_host(void* host, const void* device, std::size_t bytes, StreamHandle stream) = 0;
  // device <- host, before any later work on `stream`. `host` may be overwritten on return.
  virtual void to_device(void* device, const void* host, std::size_t bytes,
                         StreamHandle stream) = 0;
};

}  // namespace k3
