// Data calls of a communicator that moves host bytes (MPI), for a backend whose memory is elsewhere: through the host.
#pragma once

#include "comm/host_stage.h"
#include "kernels/backend.h"

namespace k3 {

class DeviceStage final : public HostStage {
 public:
  // `backend` must outlive it. Calls must come in with the backend's own stream.
  explicit DeviceStage(Backend& backend) : backend_(backend) {}

  std::byte* allocate(std::size_t bytes) override { return new std::byte[bytes]; }
  void release(std::byte* memory) noexcept override { delete[] memory; }
  void to_host(void* host, const void* device, std::size_t bytes, StreamHandle) override {
    backend_.download(host, device, bytes);
  }
  void to_device(void* device, const void* host, std::size_t bytes, StreamHandle) override {
    backend_.upload(device, host, bytes);
  }

 private:
  Backend& backend_;
};

}  // namespace k3
