// Weights on their way from the mapped file to the device: reader threads gather a band's rows into pinned buffers, which a
// copy stream empties while the next is filled.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace k3::cuda {

// A strided 2-D band of host bytes: n_row rows of row_bytes, stride bytes apart.
struct HostRows {
  const std::byte* data = nullptr;
  std::int64_t n_row = 0;
  std::int64_t row_bytes = 0;
  std::int64_t stride = 0;
};

// Host memory is bounded: kBuffers * kBufferBytes pinned bytes, whatever is loaded.
class Staging {
 public:
  static constexpr std::size_t kBufferBytes = std::size_t{32} << 20;
  static constexpr int kBuffers = 3;

  // reader_threads: threads that copy out of the mapped file.
  explicit Staging(int reader_threads);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // Rows to device memory, device_pitch bytes from one to the next. The host bytes may go when this returns; the device
  // bytes are there for later work of `stream`.
  void upload(std::byte* device, std::int64_t device_pitch, const HostRows& rows,
              cudaStream_t stream);
  // Called after every piece, if set.
  std::function<void()> on_piece;

 private:
  void gather(std::byte* to, const HostRows& rows, std::int64_t begin, std::int64_t end) const;

  int reader_threads_;
  int next_ = 0;
  cudaStream_t copy_stream_ = nullptr;
  cudaEvent_t arrived_ = nullptr;
  std::array<std::byte*, kBuffers> buffer_{};
  std::array<cudaEvent_t, kBuffers> emptied_{};
};

}  // namespace k3::cuda
