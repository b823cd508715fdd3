#include "comm/peer_comm.h"

#include <cuda_runtime.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <exception>
#include <numeric>

#include "comm/call.h"
#include "comm/peer_kernels.h"
#include "comm/peer_view.h"

namespace k3 {
namespace {

constexpr int kExitEnvironment = 3;

// A call in 64 bits, for kernels to carry: number, place, point, operation.
enum class Op : std::uint64_t { kSum, kGather, kSend, kRecv, kSumBands };
constexpr const char* kOpNames[] = {"sum", "gather_rows", "send", "recv", "sum_bands"};

std::uint64_t tag_of(Op op, Point point, std::uint64_t number, Place place) {
  const std::uint64_t at = place.what == nullptr ? 0 : static_cast<std::uint64_t>(place.number) + 1;
  return number << 32 | (at & 0xffff) << 16 | static_cast<std::uint64_t>(point) << 8 |
         static_cast<std::uint64_t>(op);
}

std::string name_of(std::uint64_t tag, const char* what) {
  const auto at = static_cast<int>(tag >> 16 & 0xffff);
  return call_name(kOpNames[tag & 0xff], static_cast<Point>(tag >> 8 & 0xff), tag >> 32,
                   at == 0 ? Place{} : Place{what, at - 1});
}

// What all Comms split from one have in common.
class Shared {
 public:
  Shared() {
    void* memory = nullptr;
    status_ =
        cudaHostAlloc(&memory, sizeof(PeerControl), cudaHostAllocMapped | cudaHostAllocPortable);
    if (status_ != cudaSuccess) return;
    control_ = new (memory) PeerControl{};
  }
  ~Shared() {
    if (control_ != nullptr) cudaFreeHost(control_);
  }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;

  cudaError_t status() const { return status_; }
  PeerControl* control() const { return control_; }
  template <class T>
  volatile T& at(T PeerControl::*member) const {
    return control_->*member;
  }

  std::atomic<const char*> what{nullptr};  // of the places seen; the board reads it from any thread

 private:
  cudaError_t status_ = cudaSuccess;
  PeerControl* control_ = nullptr;
};

struct Handle {
  std::array<char, 128> host{};
  cudaIpcMemHandle_t memory{};
};

class PeerComm final : public Comm {
 public:
  PeerComm(std::unique_ptr<Comm> control, std::shared_ptr<Shared> shared)
      : control_(std::move(control)), shared_(std::move(shared)) {
    time_limit_s_ = std::make_shared<double>(0);
    view_.rank = rank();
    view_.layout.size = size();
    std::optional<Fault> fault = allocate();
    control_->agree(fault);
    if (size() > 1) {
      fault = open_windows();
      control_->agree(fault);
    }
    if (control_->board()) board_id_ = control_->board()->add([this] { return under_way(); });
  }

  ~PeerComm() override {
    if (board_id_ >= 0) control_->board()->remove(board_id_);
    const bool failing = std::uncaught_exceptions() > exceptions_ || failed();
    if (failing) shared_->at(&PeerControl::abort) = 1;
    cudaDeviceSynchronize();
    constexpr double kParting_s = 60;  // a rank that ends is not waited for without end
    control_->set_time_limit(*time_limit_s_ > 0 ? *time_limit_s_ : kParting_s);
    bool together = !failing && size() > 1 && meet();
    for (int r = 0; r < size(); ++r) {
      if (r != rank() && view_.window[r] != nullptr) cudaIpcCloseMemHandle(view_.window[r]);
    }
    // Memory that another rank may still have mapped is left to the end of the process.
    together = together && meet();
    if (together || size() == 1) cudaFree(view_.window[rank()]);
    cudaFree(view_.epoch);
  }

  int rank() const override { return control_->rank(); }
  int size() const override { return control_->size(); }
  int world_rank(int r) const override { return control_->world_rank(r); }
  std::string who() const override { return control_->who(); }

  void sum(Point point, float* data, std::size_t count, StreamHandle stream) override {
    if (size() == 1) return;
    const Call call("sum", point, stats_of(point), count * sizeof(float), context_);
    begin();
    require_32_bits(count);
    if (count == 0) return;
    check(peer::sum(view_, tag(Op::kSum, call), data, count, to_cuda(stream)), "sum");
  }

  void gather_rows(Point point, const float* mine, float* all, std::size_t n_row,
                   std::span<const std::size_t> widths, StreamHandle stream) override {
    if (widths.size() != static_cast<std::size_t>(size())) {
      throw std::logic_error("gather_rows: " + std::to_string(widths.size()) +
                             " widths for a group of " + std::to_string(size()));
    }
    const std::size_t total = std::accumulate(widths.begin(), widths.end(), std::size_t{0});
    const Call call("gather_rows", point, stats_of(point), n_row * total * sizeof(float), context_);
    begin();
    require_32_bits(n_row * total);
    if (n_row * total == 0) return;
    if (size() == 1) {
      check(cudaMemcpyAsync(all, mine, n_row * total * sizeof(float), cudaMemcpyDeviceToDevice,
                            to_cuda(stream)),
            "cudaMemcpyAsync");
      return;
    }
    check(peer::gather(view_, tag(Op::kGather, call), mine, all, shape_of(n_row, widths),
                       to_cuda(stream)),
          "gather_rows");
  }

  void sum_bands(Point point, float* data, std::size_t n_row, std::span<const std::size_t> widths,
                 StreamHandle stream) override {
    const std::size_t total = std::accumulate(widths.begin(), widths.end(), std::size_t{0});
    if (widths.size() != static_cast<std::size_t>(size()) || size() == 1 || n_row * total == 0)
      return Comm::sum_bands(point, data, n_row, widths, stream);
    require_32_bits(n_row * total);
    const peer::GatherShape shape = shape_of(n_row, widths);
    if (!peer::fits_quick(shape, size())) return sum(point, data, n_row * total, stream);
    const std::size_t mine = n_row * widths[static_cast<std::size_t>(rank())];
    const Call call("sum_bands", point, stats_of(point), mine * sizeof(float), context_);
    begin();
    check(peer::sum_bands(view_, tag(Op::kSumBands, call), data, shape, to_cuda(stream)),
          "sum_bands");
  }

  void send(Point point, const float* data, std::size_t count, int to,
            StreamHandle stream) override {
    require_peer("send", to);
    const Call call("send", point, stats_of(point), count * sizeof(float), context_);
    begin();
    require_32_bits(count);
    if (count == 0) return;
    check(peer::send(view_, tag(Op::kSend, call), data, count, to, to_cuda(stream)), "send");
  }
  void recv(Point point, float* data, std::size_t count, int from, StreamHandle stream) override {
    require_peer("recv", from);
    const Call call("recv", point, stats_of(point), count * sizeof(float), context_);
    begin();
    require_32_bits(count);
    if (count == 0) return;
    check(peer::recv(view_, tag(Op::kRecv, call), data, count, from, to_cuda(stream)), "recv");
  }

  void broadcast(Point point, std::span<std::byte> data, int root) override {
    const Call call("broadcast", point, stats_of(point), data.size());
    begin();
    control_->broadcast(point, data, root);
  }
  std::vector<std::vector<std::byte>> gather_bytes(Point point, std::span<const std::byte> mine,
                                                   int root) override {
    const Call call("gather_bytes", point, stats_of(point), mine.size());
    begin();
    return control_->gather_bytes(point, mine, root);
  }
  std::vector<std::vector<std::byte>> all_gather_bytes(Point point,
                                                       std::span<const std::byte> mine) override {
    const Call call("all_gather_bytes", point, stats_of(point), mine.size());
    begin();
    return control_->all_gather_bytes(point, mine);
  }
  void agree(const std::optional<Fault>& fault) override {
    const Call call("agree", Point::kAgree, stats_of(Point::kAgree), 0);
    begin();
    control_->agree(fault);
  }
  void barrier(Point point) override {
    const Call call("barrier", point, stats_of(point), 0);
    begin();
    control_->barrier(point);
  }
  std::unique_ptr<Comm> split(int colour, int key) override {
    begin();
    auto group = std::make_unique<PeerComm>(control_->split(colour, key), shared_);
    group->time_limit_s_ = time_limit_s_;
    return group;
  }
  void pulse(std::uint64_t done, std::uint64_t total) override {
    begin();
    control_->pulse(done, total);
  }
  void finish_pulses() override {
    begin();
    control_->finish_pulses();
  }

  bool capturable() const override { return true; }
  void replayed(StreamHandle) override { begin(); }

  const PeerView* peer_view() const override { return &view_; }
  std::uint64_t count_fused(Point point, std::size_t bytes) override {
    const Call call("sum", point, stats_of(point), bytes, context_);
    begin();
    return tag(Op::kSum, call);
  }

 private:
  static cudaStream_t to_cuda(StreamHandle stream) { return static_cast<cudaStream_t>(stream); }

  void check(cudaError_t status, const char* what) const {
    if (status != cudaSuccess)
      throw CommError(who() + ": " + what + " through peer memory: " + cudaGetErrorString(status));
  }
  void require_32_bits(std::size_t count) const {
    if (count >> 31 != 0)
      throw std::logic_error("peer memory: a message of " + std::to_string(count) + " floats");
  }
  void require_peer(const char* what, int peer) const {
    if (peer >= 0 && peer < size() && peer != rank()) return;
    throw std::logic_error(std::string(what) + ": no other rank " + std::to_string(peer) +
                           " in a group of " + std::to_string(size()));
  }
  static peer::GatherShape shape_of(std::size_t n_row, std::span<const std::size_t> widths) {
    peer::GatherShape shape;
    shape.n_row = static_cast<std::uint32_t>(n_row);
    for (std::size_t r = 0; r < widths.size(); ++r) {
      shape.begin[r] = shape.total;
      shape.width[r] = static_cast<std::uint32_t>(widths[r]);
      shape.total += shape.width[r];
    }
    return shape;
  }
  std::uint64_t tag(Op op, const Call& call) {
    if (call.place().what != nullptr) shared_->what = call.place().what;
    return tag_of(op, call.point(), call.number(), call.place());
  }

  // This rank's window and counters. Returns what went wrong.
  std::optional<Fault> allocate() {
    if (size() > kPeerMax) {
      return Fault{kExitEnvironment, "peer memory: " + std::to_string(size()) + " ranks, at most " +
                                         std::to_string(kPeerMax) + "; use NCCL"};
    }
    cudaError_t status = shared_->status();
    view_.control = shared_->control();
    const auto mails = static_cast<std::size_t>(size()) * kPeerMailChannels;
    const std::size_t counters = kPeerChannels + 2 * mails + 1;
    void* window = nullptr;
    if (status == cudaSuccess) status = peer::load_kernels();
    if (status == cudaSuccess)
      status = cudaMalloc(reinterpret_cast<void**>(&view_.epoch), counters * sizeof(std::uint32_t));
    if (status == cudaSuccess)
      status = cudaMemset(view_.epoch, 0, counters * sizeof(std::uint32_t));
    const std::size_t bytes = size() > 1 ? view_.layout.bytes() : sizeof(float);
    if (status == cudaSuccess) status = cudaMalloc(&window, bytes);
    if (status == cudaSuccess) status = cudaMemset(window, 0, bytes);
    if (status == cudaSuccess) status = cudaDeviceSynchronize();
    if (status != cudaSuccess) {
      return Fault{kExitEnvironment, "peer memory: a window of " + std::to_string(bytes) +
                                         " bytes: " + cudaGetErrorString(status)};
    }
    view_.window[rank()] = static_cast<std::byte*>(window);
    view_.mail_sent = view_.epoch + kPeerChannels;
    view_.mail_got = view_.mail_sent + mails;
    view_.dead = view_.mail_got + mails;
    for (int r = 0; r < size(); ++r) view_.world_rank[r] = world_rank(r);
    return std::nullopt;
  }

  // Maps the others' windows. Returns what went wrong; speaks whether or not something does.
  std::optional<Fault> open_windows() {
    Handle mine;
    gethostname(mine.host.data(), mine.host.size() - 1);
    cudaError_t status = cudaIpcGetMemHandle(&mine.memory, view_.window[rank()]);
    const auto all = control_->all_gather_bytes(Point::kAgree, std::as_bytes(std::span(&mine, 1)));
    if (status != cudaSuccess) {
      return Fault{kExitEnvironment, std::string("peer memory: cudaIpcGetMemHandle: ") +
                                         cudaGetErrorString(status) + "; use NCCL"};
    }
    for (int r = 0; r < size(); ++r) {
      Handle theirs;
      std::memcpy(&theirs, all[static_cast<std::size_t>(r)].data(), sizeof theirs);
      if (r == rank()) continue;
      if (theirs.host != mine.host) {
        return Fault{kExitEnvironment, "peer memory reaches one node: rank " +
                                           std::to_string(world_rank(r)) + " is on " +
                                           theirs.host.data() + ", this one on " +
                                           mine.host.data() + "; use NCCL"};
      }
      void* window = nullptr;
      status = cudaIpcOpenMemHandle(&window, theirs.memory, cudaIpcMemLazyEnablePeerAccess);
      if (status != cudaSuccess) {
        cudaGetLastError();  // not the next launch's
        return Fault{kExitEnvironment,
                     "peer memory: no access to that of rank " + std::to_string(world_rank(r)) +
                         ": cudaIpcOpenMemHandle: " + cudaGetErrorString(status) + "; use NCCL"};
      }
      view_.window[r] = static_cast<std::byte*>(window);
    }
    return std::nullopt;
  }

  bool meet() noexcept {
    try {
      control_->barrier(Point::kAgree);
      return true;
    } catch (...) {
      return false;
    }
  }

  bool failed() const {
    return shared_->control() != nullptr && shared_->at(&PeerControl::gave_up) != 0;
  }
  // Every call first learns whether an earlier one was given up.
  void begin() {
    if (control_->time_limit() != *time_limit_s_) control_->set_time_limit(*time_limit_s_);
    shared_->at(&PeerControl::limit_ns) = static_cast<std::uint64_t>(*time_limit_s_ * 1e9);
    if (!failed()) return;
    std::array<char, 32> waited{};
    std::snprintf(waited.data(), waited.size(), "%.3g",
                  static_cast<double>(shared_->at(&PeerControl::waited_ns)) * 1e-9);
    throw CommError(who() + ": waited " + waited.data() + " s in " +
                    name_of(shared_->at(&PeerControl::call), shared_->what) + " for rank " +
                    std::to_string(shared_->at(&PeerControl::peer)));
  }

  // For the board, from any thread.
  std::optional<OpenCall> under_way() const {
    if (shared_->at(&PeerControl::n_waiting) % 2 == 0) return std::nullopt;
    const std::uint64_t since = shared_->at(&PeerControl::waiting_since_ns);
    const std::uint64_t now = shared_->at(&PeerControl::waiting_now_ns);
    return OpenCall{name_of(shared_->at(&PeerControl::waiting_call), shared_->what) + " for rank " +
                        std::to_string(shared_->at(&PeerControl::waiting_peer)),
                    static_cast<double>(now - since) * 1e-9};
  }

  std::unique_ptr<Comm> control_;
  std::shared_ptr<Shared> shared_;
  PeerView view_;
  int board_id_ = -1;
  int exceptions_ = std::uncaught_exceptions();
};

}  // namespace

std::unique_ptr<Comm> make_peer_comm(std::unique_ptr<Comm> control) {
  return std::make_unique<PeerComm>(std::move(control), std::make_shared<Shared>());
}

}  // namespace k3
