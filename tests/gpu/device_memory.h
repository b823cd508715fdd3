// Device memory and graphs for tests of communicators, which have no Backend.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace k3::test {

inline void cuda(cudaError_t status) {
  if (status != cudaSuccess)
    throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(status));
}

class Stream {
 public:
  Stream() { cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }
  void wait() const { cuda(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

class Floats {
 public:
  explicit Floats(std::size_t count) : count_(count) {
    cuda(cudaMalloc(reinterpret_cast<void**>(&data_),
                    std::max<std::size_t>(count, 1) * sizeof(float)));
  }
  ~Floats() { cudaFree(data_); }
  Floats(const Floats&) = delete;
  Floats& operator=(const Floats&) = delete;
  float* data() const { return data_; }
  std::size_t size() const { return count_; }
  // The first values; waits.
  void set(const std::vector<float>& values) {
    cuda(cudaMemcpy(data_, values.data(), values.size() * sizeof(float), cudaMemcpyHostToDevice));
    cuda(cudaDeviceSynchronize());
  }
  std::vector<float> get(std::size_t n, cudaStream_t stream) const {
    std::vector<float> out(n);
    cuda(cudaMemcpyAsync(out.data(), data_, n * sizeof(float), cudaMemcpyDeviceToHost, stream));
    cuda(cudaStreamSynchronize(stream));
    return out;
  }

 private:
  float* data_ = nullptr;
  std::size_t count_;
};

class Graph {
 public:
  Graph(cudaStream_t stream, const std::function<void()>& body) {
    cudaGraph_t graph = nullptr;
    cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    body();
    cuda(cudaStreamEndCapture(stream, &graph));
    cuda(cudaGraphInstantiate(&exec_, graph, 0));
    cuda(cudaGraphDestroy(graph));
  }
  ~Graph() { cudaGraphExecDestroy(exec_); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void run(cudaStream_t stream) const { cuda(cudaGraphLaunch(exec_, stream)); }

 private:
  cudaGraphExec_t exec_ = nullptr;
};

}  // namespace k3::test
