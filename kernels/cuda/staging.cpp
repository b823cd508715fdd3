#include "kernels/cuda/staging.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "kernels/cuda/check.h"

namespace k3::cuda {

Staging::Staging(int reader_threads) : reader_threads_(std::max(1, reader_threads)) {
  check(cudaStreamCreateWithFlags(&copy_stream_, cudaStreamNonBlocking),
        "cudaStreamCreateWithFlags");
  check(cudaEventCreateWithFlags(&arrived_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  for (int i = 0; i < kBuffers; ++i) {
    const auto b = static_cast<std::size_t>(i);
    check(cudaMallocHost(reinterpret_cast<void**>(&buffer_[b]), kBufferBytes), "cudaMallocHost");
    check(cudaEventCreateWithFlags(&emptied_[b], cudaEventDisableTiming),
          "cudaEventCreateWithFlags");
  }
}

Staging::~Staging() {
  if (copy_stream_ != nullptr) cudaStreamSynchronize(copy_stream_);
  for (std::byte* b : buffer_) cudaFreeHost(b);
  for (cudaEvent_t e : emptied_) {
    if (e != nullptr) cudaEventDestroy(e);
  }
  if (arrived_ != nullptr) cudaEventDestroy(arrived_);
  if (copy_stream_ != nullptr) cudaStreamDestroy(copy_stream_);
}

void Staging::gather(std::byte* to, const HostRows& rows, std::int64_t begin,
                     std::int64_t end) const {
  const std::int64_t n = end - begin;
  // Small pieces are not worth a thread each.
  const std::int64_t wanted =
      std::min<std::int64_t>(reader_threads_, n * rows.row_bytes / (1 << 20) + 1);
  auto copy = [&](std::int64_t from, std::int64_t until) {
    if (rows.stride == rows.row_bytes) {
      std::memcpy(to + from * rows.row_bytes, rows.data + (begin + from) * rows.stride,
                  static_cast<std::size_t>((until - from) * rows.row_bytes));
      return;
    }
    for (std::int64_t r = from; r < until; ++r) {
      std::memcpy(to + r * rows.row_bytes, rows.data + (begin + r) * rows.stride,
                  static_cast<std::size_t>(rows.row_bytes));
    }
  };
  std::vector<std::jthread> readers;  // joined whatever happens
  for (std::int64_t i = 1; i < wanted; ++i)
    readers.emplace_back(copy, n * i / wanted, n * (i + 1) / wanted);
  copy(0, n / wanted);
}

void Staging::upload(std::byte* device, std::int64_t device_pitch, const HostRows& rows,
                     cudaStream_t stream) {
  if (rows.n_row == 0 || rows.row_bytes == 0) return;
  const auto per =
      std::max<std::int64_t>(1, static_cast<std::int64_t>(kBufferBytes) / rows.row_bytes);
  if (rows.row_bytes > static_cast<std::int64_t>(kBufferBytes)) {
    throw DeviceError("a weight's row of " + std::to_string(rows.row_bytes) +
                      " bytes exceeds the staging buffer");
  }
  // The target was just allocated, and is zeroed, on `stream`: the copy must not overtake that.
  check(cudaEventRecord(arrived_, stream), "cudaEventRecord");
  check(cudaStreamWaitEvent(copy_stream_, arrived_, 0), "cudaStreamWaitEvent");
  for (std::int64_t r = 0; r < rows.n_row; r += per) {
    const auto b = static_cast<std::size_t>(next_);
    next_ = (next_ + 1) % kBuffers;
    check(cudaEventSynchronize(emptied_[b]), "cudaEventSynchronize");
    const std::int64_t n = std::min(per, rows.n_row - r);
    gather(buffer_[b], rows, r, r + n);
    check(cudaMemcpy2DAsync(device + r * device_pitch, static_cast<std::size_t>(device_pitch),
                            buffer_[b], static_cast<std::size_t>(rows.row_bytes),
                            static_cast<std::size_t>(rows.row_bytes), static_cast<std::size_t>(n),
                            cudaMemcpyHostToDevice, copy_stream_),
          "cudaMemcpy2DAsync");
    check(cudaEventRecord(emptied_[b], copy_stream_), "cudaEventRecord");
    if (on_piece) on_piece();
  }
  check(cudaEventRecord(arrived_, copy_stream_), "cudaEventRecord");
  check(cudaStreamWaitEvent(stream, arrived_, 0), "cudaStreamWaitEvent");
}

}  // namespace k3::cuda
