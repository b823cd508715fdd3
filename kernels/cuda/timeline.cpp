// The device's clock: an event a mark, and an NVTX range a span where the toolkit has the header.
#include <memory>

#include "kernels/cuda/check.h"
#include "kernels/cuda/timeline.h"

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define K3_NVTX 1
#else
#define K3_NVTX 0
#endif

namespace k3::cuda {
namespace {

void begin_range([[maybe_unused]] const char* name) {
#if K3_NVTX
  nvtxRangePushA(name);
#endif
}
void end_range() {
#if K3_NVTX
  nvtxRangePop();
#endif
}

class CudaTimeline final : public Timeline {
 public:
  explicit CudaTimeline(cudaStream_t stream) : stream_(stream) {}
  ~CudaTimeline() override {
    if (open_) end_range();
    for (const cudaEvent_t e : events_) cudaEventDestroy(e);
  }
  CudaTimeline(const CudaTimeline&) = delete;
  CudaTimeline& operator=(const CudaTimeline&) = delete;

 protected:
  void stamp(std::size_t i, const char* name) override {
    if (i == events_.size()) {
      cudaEvent_t e = nullptr;
      check(cudaEventCreate(&e), "cudaEventCreate");
      events_.push_back(e);
    }
    if (open_) end_range();
    open_ = name != nullptr;
    if (open_) begin_range(name);
    check(cudaEventRecord(events_[i], stream_), "cudaEventRecord");
  }
  std::vector<double> seconds(std::size_t n) override {
    std::vector<double> out(n, 0.0);
    if (n > 0) check(cudaEventSynchronize(events_[n - 1]), "cudaEventSynchronize");
    // Between neighbours: a float holds microseconds exactly only while they are few.
    for (std::size_t i = 1; i < n; ++i) {
      float ms = 0;
      check(cudaEventElapsedTime(&ms, events_[i - 1], events_[i]), "cudaEventElapsedTime");
      out[i] = out[i - 1] + 1e-3 * static_cast<double>(ms);
    }
    return out;
  }

 private:
  cudaStream_t stream_;
  bool open_ = false;
  std::vector<cudaEvent_t> events_;  // kept for the next take()
};

}  // namespace

std::unique_ptr<Timeline> make_timeline(cudaStream_t stream) {
  return std::make_unique<CudaTimeline>(stream);
}

}  // namespace k3::cuda
