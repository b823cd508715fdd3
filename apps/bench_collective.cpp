#include <algorithm>
#include <numeric>

#include <fmt/core.h>

#include "apps/bench_session.h"
#include "apps/bench_timing.h"
#include "apps/launch_main.h"
#include "rank/fault.h"

namespace k3 {
namespace {

// Powers of four, and the sums of one decoded token of the real model: latent, hidden, both.
std::vector<std::int64_t> sizes_up_to(std::int64_t most) {
  std::vector<std::int64_t> out{14336, 28672, 43008};
  for (std::int64_t b = 4; b <= std::int64_t{1} << 40; b *= 4) out.push_back(b);
  std::sort(out.begin(), out.end());
  out.erase(std::upper_bound(out.begin(), out.end(), most), out.end());
  return out;
}

class Bench {
 public:
  Bench(BenchSession& s, Comm& control, Comm& data, Backend& backend, const BenchJob& job,
        bool in_graph)
      : s_(s),
        control_(control),
        data_(data),
        backend_(backend),
        repeat_(job.repeat),
        in_graph_(in_graph),
        buffer_(backend.allocate(static_cast<std::size_t>(job.most_bytes))),
        other_(backend.allocate(static_cast<std::size_t>(job.most_bytes))) {
    table_.name = "collective";
    header();
  }

  void sum(std::int64_t bytes) {
    const auto n = static_cast<std::size_t>(bytes) / sizeof(float);
    time("sum", bytes, true,
         [&, n] { data_.sum(Point::kFfnOut, floats(buffer_), n, backend_.stream()); });
  }
  // `bytes` of the result; each rank brings its share.
  void gather(std::int64_t bytes) {
    const auto share =
        static_cast<std::size_t>(bytes) / sizeof(float) / static_cast<std::size_t>(data_.size());
    if (share == 0) return;
    const std::vector<std::size_t> widths(static_cast<std::size_t>(data_.size()), share);
    time("gather_rows", bytes, true, [&, widths] {
      data_.gather_rows(Point::kRouterLatent, floats(other_), floats(buffer_), 1, widths,
                        backend_.stream());
    });
  }
  // Half of the way to rank 1 and back.
  void message(std::int64_t bytes) {
    const auto n = static_cast<std::size_t>(bytes) / sizeof(float);
    time("message", bytes, false, [&, n] {
      if (data_.rank() > 1) return;
      const int peer = 1 - data_.rank();
      for (int turn = 0; turn < 2; ++turn) {
        if (turn == data_.rank()) {
          data_.send(Point::kStageHandOff, floats(buffer_), n, peer, backend_.stream());
        } else {
          data_.recv(Point::kStageHandOff, floats(buffer_), n, peer, backend_.stream());
        }
      }
    });
  }
  void finish() {
    if (control_.rank() == 0) s_.record.tables.push_back(std::move(table_));
  }

 private:
  static float* floats(const std::unique_ptr<DeviceBuffer>& b) {
    return reinterpret_cast<float*>(b->data());
  }
  void header() {
    s_.say(fmt::format("{:<12} {:>10} {:<7} {:>11} {:>11} {:>11} {:>9}", "call", "bytes", "how",
                       "median us", "p10", "p90", "GB/s"));
  }
  void time(const char* op, std::int64_t bytes, bool may_capture,
            const std::function<void()>& call) {
    const std::int64_t n_call = bytes <= 65536 ? 50 : bytes <= (1 << 20) ? 20 : 4;
    const auto batch = [&] {
      for (std::int64_t i = 0; i < n_call; ++i) call();
    };
    const auto ready = [&] { control_.barrier(Point::kResidency); };
    const double ways = may_capture ? 1 : 2;
    note(op, bytes, "stream", ways, time_calls(backend_, n_call, repeat_, ready, batch));
    if (!may_capture || !in_graph_) return;
    const std::unique_ptr<Replay> graph = backend_.capture(batch);
    note(op, bytes, "graph", ways,
         time_calls(backend_, n_call, repeat_, ready, [&] { graph->run(); }));
  }
  void note(const char* op, std::int64_t bytes, const char* how, double ways, const Spread& t) {
    if (control_.rank() != 0) return;
    const double us = 1e6 / ways;
    table_.text("call", op);
    table_.text("how", how);
    table_.number("bytes", static_cast<double>(bytes));
    table_.number("median_us", us * t.median);
    table_.number("p10_us", us * t.p10);
    table_.number("p90_us", us * t.p90);
    table_.number("gb_s", static_cast<double>(bytes) * ways / t.median / 1e9);
    s_.say(fmt::format("{:<12} {:>10} {:<7} {:>11.2f} {:>11.2f} {:>11.2f} {:>9.3f}", op, bytes, how,
                       us * t.median, us * t.p10, us * t.p90,
                       static_cast<double>(bytes) * ways / t.median / 1e9));
    if (s_.request.expected && std::string(op) == "sum" && bytes == 14336 &&
        std::string(how) == (in_graph_ ? "graph" : "stream")) {
      record_prediction(s_, us * t.median, "us, sum of 14336 bytes");
    }
  }

  BenchSession& s_;
  Comm& control_;
  Comm& data_;
  Backend& backend_;
  std::int64_t repeat_;
  bool in_graph_;
  std::unique_ptr<DeviceBuffer> buffer_, other_;
  BenchTable table_;
};

}  // namespace

void bench_collective(BenchSession& s, World& world, Comm& comm, const BenchJob& job,
                      const RunConfig& config) {
  together(comm, [&] {
    if (comm.size() < 2) {
      throw std::invalid_argument("collective: needs two ranks at least (mpirun -n P ...)");
    }
  });
  const RankDevice device = make_rank_device(config, world, comm);
  Comm& data = device.comm(comm);
  // What waits for the host cannot be in a graph; on CPU ranks a graph is the calls again.
  const bool through_host = device.stage != nullptr;
  const bool cuda = config.backend == "cuda";
  const std::string via = cuda && !through_host ? config.comm : std::string("mpi");
  s.record.text("devices", device.backend->describe());
  s.record.text("communicator", via);
  s.record.number("world", comm.size());
  s.say(fmt::format("k3bench collective: {} ranks over {}, rank 0: {}", comm.size(), via,
                    device.backend->describe()));
  Bench bench(s, comm, data, *device.backend, job,
              !cuda || (device.backend->has_graphs() && data.capturable()));
  for (const std::int64_t bytes : sizes_up_to(job.most_bytes)) bench.sum(bytes);
  for (const std::int64_t bytes : sizes_up_to(job.most_bytes)) bench.gather(bytes);
  for (const std::int64_t bytes : sizes_up_to(job.most_bytes)) bench.message(bytes);
  device.backend->synchronize();
  bench.finish();
}

}  // namespace k3
