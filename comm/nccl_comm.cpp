#include "comm/nccl_comm.h"

#include <cuda_runtime.h>
#include <nccl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <exception>
#include <mutex>
#include <numeric>
#include <thread>

#include "comm/call.h"

namespace k3 {
namespace {

constexpr auto kPollInterval = std::chrono::milliseconds(50);
constexpr std::size_t kMarks = 512;  // calls on the stream that are told apart

// What ended the work of this Comm and of all that were split from the same one.
struct Failure {
  std::mutex mutex;
  std::string line;  // guarded
  std::atomic<bool> happened{false};
};

class NcclComm final : public Comm {
 public:
  NcclComm(std::unique_ptr<Comm> control, std::shared_ptr<Failure> failure)
      : control_(std::move(control)), failure_(std::move(failure)) {
    time_limit_s_ = std::make_shared<double>(0);
    check(cudaGetDevice(&device_), "cudaGetDevice");
    ncclUniqueId id{};
    if (rank() == 0) check(ncclGetUniqueId(&id), "ncclGetUniqueId");
    control_->broadcast(Point::kAgree, std::as_writable_bytes(std::span(&id, 1)), 0);
    check(ncclCommInitRank(&comm_, size(), id, rank()), "ncclCommInitRank");
    for (Mark& m : marks_)
      check(cudaEventCreateWithFlags(&m.event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    watcher_ = std::thread([this] { watch(); });
    if (control_->board()) board_id_ = control_->board()->add([this] { return under_way(); });
  }

  ~NcclComm() override {
    if (board_id_ >= 0) control_->board()->remove(board_id_);
    {
      const std::scoped_lock lock(mutex_);
      ending_ = true;
    }
    wake_.notify_all();
    watcher_.join();
    if (scratch_ != nullptr) cudaFree(scratch_);
    for (const Mark& m : marks_) cudaEventDestroy(m.event);
    if (aborted_) return;
    // While an error unwinds this rank its peers still wait in a collective: destroy would hang, abort does not.
    std::uncaught_exceptions() > exceptions_ ? ncclCommAbort(comm_) : ncclCommDestroy(comm_);
  }

  int rank() const override { return control_->rank(); }
  int size() const override { return control_->size(); }
  bool capturable() const override { return true; }
  int world_rank(int r) const override { return control_->world_rank(r); }
  std::string who() const override { return control_->who(); }

  void sum(Point point, float* data, std::size_t count, StreamHandle stream) override {
    if (size() == 1) return;
    const Call call("sum", point, stats_of(point), count * sizeof(float), context_);
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
    const Call call("gather_rows", point, stats_of(point), n_row * widths[me] * sizeof(float),
                    context_);
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
    const Call call("send", point, stats_of(point), count * sizeof(float), context_);
    begin(call);
    check(ncclSend(data, count, ncclFloat32, to, comm_, to_cuda(stream)), "ncclSend");
    end(call, stream);
  }
  void recv(Point point, float* data, std::size_t count, int from, StreamHandle stream) override {
    const Call call("recv", point, stats_of(point), count * sizeof(float), context_);
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
    auto group = std::make_unique<NcclComm>(control_->split(colour, key), failure_);
    group->time_limit_s_ = time_limit_s_;
    return group;
  }
  void pulse(std::uint64_t done, std::uint64_t total) override {
    share_limit();
    control_->pulse(done, total);
  }
  void finish_pulses() override {
    share_limit();
    control_->finish_pulses();
  }
  void replayed(StreamHandle stream) override {
    throw_if_failed();
    mark({"graph", Point::kStep, ++n_replay_, {}}, stream);
  }

 private:
  static cudaStream_t to_cuda(StreamHandle stream) { return static_cast<cudaStream_t>(stream); }

  struct Name {
    const char* op = nullptr;
    Point point = Point::kCount;
    std::uint64_t number = 0;
    Place place;
  };
  // A call's end on the stream.
  struct Mark {
    cudaEvent_t event = nullptr;
    Name name;
    Call::Clock::time_point since;
  };

  void check(cudaError_t status, const char* what) const {
    if (status != cudaSuccess)
      throw CommError(who() + ": " + what + ": " + cudaGetErrorString(status));
  }
  void check(ncclResult_t status, const char* what) const {
    if (status == ncclSuccess || status == ncclInProgress) return;
    throw CommError(who() + ": " + what + ": " + ncclGetErrorString(status));
  }

  void share_limit() {
    if (control_->time_limit() != *time_limit_s_) control_->set_time_limit(*time_limit_s_);
  }
  // Every call first learns whether an earlier one was given up.
  void begin(const Call&) {
    share_limit();
    throw_if_failed();
  }
  void throw_if_failed() const {
    if (!failure_->happened.load()) return;
    const std::scoped_lock lock(failure_->mutex);
    throw CommError(failure_->line);
  }

  // Marks the call's place on the stream, for the watcher; not while a graph records, whose replays the host waits for.
  void end(const Call& call, StreamHandle stream) {
    cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(to_cuda(stream), &capturing), "cudaStreamIsCapturing");
    if (capturing != cudaStreamCaptureStatusNone) return;
    mark({call.op(), call.point(), call.number(), call.place()}, stream);
  }
  void mark(const Name& name, StreamHandle stream) {
    const std::scoped_lock lock(mutex_);
    if (n_marked_ - n_done_ == kMarks) next_mark();  // forgets the oldest
    Mark& m = marks_[n_marked_ % kMarks];
    check(cudaEventRecord(m.event, to_cuda(stream)), "cudaEventRecord");
    m.name = name;
    m.since = Call::Clock::now();
    ++n_marked_;
  }
  // The oldest call under way becomes the one after it, which waits since then at the earliest.
  void next_mark() {
    ++n_done_;
    if (n_done_ < n_marked_) {
      Mark& m = marks_[n_done_ % kMarks];
      m.since = std::max(m.since, Call::Clock::now());
    }
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
                       (n_done_ < n_marked_ ? oldest()->name : "no call"));
      }
      while (n_done_ < n_marked_ &&
             cudaEventQuery(marks_[n_done_ % kMarks].event) != cudaErrorNotReady) {
        next_mark();
      }
      const std::optional<OpenCall> call = oldest();
      if (call && *time_limit_s_ > 0 && call->seconds > *time_limit_s_) {
        std::array<char, 32> waited{};
        std::snprintf(waited.data(), waited.size(), "%.3g", call->seconds);
        return give_up(std::string("waited ") + waited.data() + " s in " + call->name);
      }
      // Another group has failed: its line tells what happened, and this one's waits are in vain.
      if (failure_->happened.load()) return abort();
    }
  }
  std::optional<OpenCall> oldest() const {
    if (n_done_ == n_marked_) return std::nullopt;
    const Mark& m = marks_[n_done_ % kMarks];
    return OpenCall{call_name(m.name.op, m.name.point, m.name.number, m.name.place),
                    std::chrono::duration<double>(Call::Clock::now() - m.since).count()};
  }
  // For the board: what the device has been in for longer than a step takes.
  std::optional<OpenCall> under_way() {
    constexpr double kLong_s = 0.15;
    const std::scoped_lock lock(mutex_);
    const std::optional<OpenCall> call = oldest();
    return call && call->seconds > kLong_s ? call : std::nullopt;
  }
  void give_up(const std::string& why) {
    {
      const std::scoped_lock lock(failure_->mutex);
      if (!failure_->happened.load()) failure_->line = who() + ": " + why;
      failure_->happened.store(true);
    }
    abort();
  }
  void abort() {
    aborted_ = true;
    ncclCommAbort(comm_);
  }

  std::unique_ptr<Comm> control_;
  int device_ = 0;
  ncclComm_t comm_ = nullptr;
  float* scratch_ = nullptr;
  std::size_t scratch_count_ = 0;
  int exceptions_ = std::uncaught_exceptions();

  std::thread watcher_;
  std::mutex mutex_;  // guards what follows, and comm_'s end
  std::condition_variable wake_;
  bool ending_ = false;
  bool aborted_ = false;
  std::array<Mark, kMarks> marks_;  // of the calls [n_done_, n_marked_)
  std::uint64_t n_marked_ = 0, n_done_ = 0;
  std::uint64_t n_replay_ = 0;
  std::shared_ptr<Failure> failure_;
  int board_id_ = -1;
};

}  // namespace

std::unique_ptr<Comm> make_nccl_comm(std::unique_ptr<Comm> control) {
  return std::make_unique<NcclComm>(std::move(control), std::make_shared<Failure>());
}

std::string nccl_library_version() {
  int v = 0;
  if (ncclGetVersion(&v) != ncclSuccess) return "NCCL of unknown version";
  return "NCCL " + std::to_string(v / 10000) + "." + std::to_string(v / 100 % 100) + "." +
         std::to_string(v % 100);
}

}  // namespace k3
