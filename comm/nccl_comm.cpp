#include "comm/nccl_comm.h"

#include <cuda_runtime.h>
#include <nccl.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <numeric>
#include <thread>

#include "comm/call.h"

namespace k3 {
namespace {

constexpr auto kPollInterval = std::chrono::milliseconds(50);

class NcclComm final : public Comm {
 public:
  explicit NcclComm(std::unique_ptr<Comm> control) : control_(std::move(control)) {
    time_limit_s_ = std::make_shared<double>(0);
    check(cudaGetDevice(&device_), "cudaGetDevice");
    ncclUniqueId id{};
    if (rank() == 0) check(ncclGetUniqueId(&id), "ncclGetUniqueId");
    control_->broadcast(Point::kAgree, std::as_writable_bytes(std::span(&id, 1)), 0);
    check(ncclCommInitRank(&comm_, size(), id, rank()), "ncclCommInitRank");
    check(cudaEventCreateWithFlags(&last_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    watcher_ = std::thread([this] { watch(); });
  }

  ~NcclComm() override {
    {
      const std::scoped_lock lock(mutex_);
      ending_ = true;
    }
    wake_.notify_all();
    watcher_.join();
    if (scratch_ != nullptr) cudaFree(scratch_);
    cudaEventDestroy(last_);
    if (failed_.load()) return;  // the watcher has aborted it
    // While an error unwinds this rank its peers still wait in a collective: destroy would hang, abort does not.
    std::uncaught_exceptions() > exceptions_ ? ncclCommAbort(comm_) : ncclCommDestroy(comm_);
  }

  int rank() const override { return control_->rank(); }
  int size() const override { return control_->size(); }

  void sum(Point point, float* data, std::size_t count, StreamHandle stream) override {
    if (size() == 1) return;
    const Call call("sum", point, stats_of(point), count * sizeof(float));
    begin(call);
    if (count > 0)
      check(ncclAllReduce(data, data, count, ncclFloat32, ncclSum, comm_, to_cuda(stream)),
            "ncclAllReduce");
    end(call, stream);
  }

  void gather_rows(Point point, const float* mine, float* all, std::size_t n_row,
                   std::span<const std::size_t> widths, StreamHandle stream) override {
    const auto me = static_cast<std::size_t>(rank());
    const std::size_t total = std::accumulate(widths.begin(), widths.end(), std::size_t{0});
    const Call call("gather_rows", point, stats_of(point), n_row * widths[me] * sizeof(float));
    begin(call);
    // Rank after rank, then rows are put together; a single row is together already.
    float* blocks = n_row == 1 ? all : scratch(n_row * total);
    check(ncclGroupStart(), "ncclGroupStart");
    std::size_t at = 0;
    for (std::size_t r = 0; r < widths.size(); ++r) {
      const std::size_t count = n_row * widths[r];
      if (count > 0) {
        check(ncclBroadcast(r == me ? mine : blocks + at, blocks + at, count, ncclFloat32,
                            static_cast<int>(r), comm_, to_cuda(stream)),
              "ncclBroadcast");
      }
      at += count;
    }
    check(ncclGroupEnd(), "ncclGroupEnd");
    if (n_row > 1) interleave(blocks, all, n_row, widths, total, to_cuda(stream));
    end(call, stream);
  }

  void send(Point point, const float* data, std::size_t count, int to,
            StreamHandle stream) override {
    const Call call("send", point, stats_of(point), count * sizeof(float));
    begin(call);
    check(ncclSend(data, count, ncclFloat32, to, comm_, to_cuda(stream)), "ncclSend");
    end(call, stream);
  }
  void recv(Point point, float* data, std::size_t count, int from, StreamHandle stream) override {
    const Call call("recv", point, stats_of(point), count * sizeof(float));
    begin(call);
    check(ncclRecv(data, count, ncclFloat32, from, comm_, to_cuda(stream)), "ncclRecv");
    end(call, stream);
  }

  void broadcast(Point point, std::span<std::byte> data, int root) override {
    const Call call("broadcast", point, stats_of(point), data.size());
    begin(call);
    control_->broadcast(point, data, root);
  }
  std::vector<std::vector<std::byte>> gather_bytes(Point point, std::span<const std::byte> mine,
                                                   int root) override {
    const Call call("gather_bytes", point, stats_of(point), mine.size());
    begin(call);
    return control_->gather_bytes(point, mine, root);
  }
  std::vector<std::vector<std::byte>> all_gather_bytes(Point point,
                                                       std::span<const std::byte> mine) override {
    const Call call("all_gather_bytes", point, stats_of(point), mine.size());
    begin(call);
    return control_->all_gather_bytes(point, mine);
  }
  void agree(const std::optional<Fault>& fault) override {
    const Call call("agree", Point::kAgree, stats_of(Point::kAgree), 0);
    begin(call);
    control_->agree(fault);
  }
  void barrier(Point point) override {
    const Call call("barrier", point, stats_of(point), 0);
    begin(call);
    control_->barrier(point);
  }
  std::unique_ptr<Comm> split(int colour, int key) override {
    auto group = std::make_unique<NcclComm>(control_->split(colour, key));
    group->time_limit_s_ = time_limit_s_;
    return group;
  }

 private:
  static cudaStream_t to_cuda(StreamHandle stream) { return static_cast<cudaStream_t>(stream); }

  std::string who() const {
    return "rank " + std::to_string(rank()) + "/" + std::to_string(size()) + ": ";
  }
  void check(cudaError_t status, const char* what) const {
    if (status != cudaSuccess) throw CommError(who() + what + ": " + cudaGetErrorString(status));
  }
  void check(ncclResult_t status, const char* what) const {
    if (status == ncclSuccess || status == ncclInProgress) return;
    throw CommError(who() + what + ": " + ncclGetErrorString(status));
  }

  // Every call first learns whether an earlier one was given up.
  void begin(const Call&) {
    if (*time_limit_s_ > 0 && control_->time_limit() != *time_limit_s_)
      control_->set_time_limit(*time_limit_s_);
    if (!failed_.load()) return;
    const std::scoped_lock lock(mutex_);
    throw CommError(failure_);
  }

  // Marks the call's place on the stream, for the watcher; not while a graph records, whose replays the host waits for.
  void end(const Call& call, StreamHandle stream) {
    cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(to_cuda(stream), &capturing), "cudaStreamIsCapturing");
    if (capturing != cudaStreamCaptureStatusNone) return;
    const std::scoped_lock lock(mutex_);
    check(cudaEventRecord(last_, to_cuda(stream)), "cudaEventRecord");
    last_name_ = call.name();
    last_time_ = Call::Clock::now();
    pending_ = true;
  }

  float* scratch(std::size_t count) {
    if (count > scratch_count_) {
      if (scratch_ != nullptr) check(cudaFree(scratch_), "cudaFree");
      scratch_ = nullptr;
      check(cudaMalloc(reinterpret_cast<void**>(&scratch_), count * sizeof(float)), "cudaMalloc");
      scratch_count_ = count;
    }
    return scratch_;
  }

  void interleave(const float* blocks, float* all, std::size_t n_row,
                  std::span<const std::size_t> widths, std::size_t total,
                  cudaStream_t stream) const {
    std::size_t from = 0, column = 0;
    for (const std::size_t w : widths) {
      if (w > 0) {
        check(
            cudaMemcpy2DAsync(all + column, total * sizeof(float), blocks + from, w * sizeof(float),
                              w * sizeof(float), n_row, cudaMemcpyDeviceToDevice, stream),
            "cudaMemcpy2DAsync");
      }
      from += n_row * w;
      column += w;
    }
  }

  // Runs beside the ranks' work: ends a wait that has no end.
  void watch() {
    cudaSetDevice(device_);
    std::unique_lock lock(mutex_);
    while (!wake_.wait_for(lock, kPollInterval, [this] { return ending_; })) {
      ncclResult_t async = ncclSuccess;
      ncclCommGetAsyncError(comm_, &async);
      if (async != ncclSuccess && async != ncclInProgress) {
        return give_up("NCCL reports " + std::string(ncclGetErrorString(async)) + " in " +
                       last_name_);
      }
      if (!pending_) continue;
      if (cudaEventQuery(last_) != cudaErrorNotReady) {
        pending_ = false;
        continue;
      }
      const double waited = std::chrono::duration<double>(Call::Clock::now() - last_time_).count();
      if (*time_limit_s_ > 0 && waited > *time_limit_s_) {
        return give_up("waited " + std::to_string(static_cast<int>(waited)) + " s in " +
                       last_name_);
      }
    }
  }
  void give_up(const std::string& why) {
    failure_ = who() + why + ", GPU " + std::to_string(device_);
    failed_.store(true);
    ncclCommAbort(comm_);
  }

  std::unique_ptr<Comm> control_;
  int device_ = 0;
  ncclComm_t comm_ = nullptr;
  cudaEvent_t last_ = nullptr;
  float* scratch_ = nullptr;
  std::size_t scratch_count_ = 0;
  int exceptions_ = std::uncaught_exceptions();

  std::thread watcher_;
  std::mutex mutex_;  // guards what follows, and comm_'s end
  std::condition_variable wake_;
  bool ending_ = false;
  bool pending_ = false;
  std::string last_name_ = "no call yet";
  Call::Clock::time_point last_time_{};
  std::string failure_;
  std::atomic<bool> failed_{false};
};

}  // namespace

std::unique_ptr<Comm> make_nccl_comm(std::unique_ptr<Comm> control) {
  return std::make_unique<NcclComm>(std::move(control));
}

std::string nccl_library_version() {
  int v = 0;
  if (ncclGetVersion(&v) != ncclSuccess) return "NCCL of unknown version";
  return "NCCL " + std::to_string(v / 10000) + "." + std::to_string(v / 100 % 100) + "." +
         std::to_string(v % 100);
}

}  // namespace k3
