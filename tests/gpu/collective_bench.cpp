// No test: a table of what the collectives of a communicator cost, in and out of a graph.
//   mpirun -n 2 collective_bench [nccl] [peer] [--most BYTES]
// A row is the slowest rank's mean over calls that follow each other on one stream, the median of several rounds. Every round
// begins with a sum that waits for all. GB/s: bytes of the message over its time.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/mpi_comm.h"
#include "comm/nccl_comm.h"
#include "comm/peer_comm.h"
#include "tests/gpu/device_memory.h"

namespace k3::test {
namespace {

class Timer {
 public:
  Timer() {
    cuda(cudaEventCreate(&begin_));
    cuda(cudaEventCreate(&end_));
  }
  ~Timer() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;
  double us(cudaStream_t stream, const std::function<void()>& work) {
    cuda(cudaEventRecord(begin_, stream));
    work();
    cuda(cudaEventRecord(end_, stream));
    cuda(cudaEventSynchronize(end_));
    float ms = 0;
    cuda(cudaEventElapsedTime(&ms, begin_, end_));
    return 1e3 * ms;
  }

 private:
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

double slowest(Comm& comm, double mine) {
  double worst = 0;
  for (const auto& bytes :
       comm.all_gather_bytes(Point::kResidency, std::as_bytes(std::span(&mine, 1)))) {
    double theirs = 0;
    std::memcpy(&theirs, bytes.data(), sizeof theirs);
    worst = std::max(worst, theirs);
  }
  return worst;
}

struct Cost {
  double stream_us = 0, graph_us = 0;
};

// `call` once, many times over.
Cost cost(Comm& comm, cudaStream_t stream, float* first, const std::function<void()>& call, int n) {
  constexpr int kRounds = 7;
  const auto many = [&] {
    for (int i = 0; i < n; ++i) call();
  };
  const auto measure = [&](const std::function<void()>& work) {
    std::vector<double> rounds;
    Timer timer;
    for (int r = 0; r < kRounds; ++r) {
      comm.barrier(Point::kResidency);
      comm.sum(Point::kEmbed, first, 1, stream);
      const double us = slowest(comm, timer.us(stream, work)) / n;
      if (r > 0) rounds.push_back(us);
    }
    std::nth_element(rounds.begin(), rounds.begin() + rounds.size() / 2, rounds.end());
    return rounds[rounds.size() / 2];
  };
  Cost c;
  c.stream_us = measure(many);
  const Graph graph(stream, many);
  c.graph_us = measure([&] { graph.run(stream); });
  return c;
}

void table(const std::string& name, Comm& comm, std::size_t most) {
  const Stream stream;
  const auto size = static_cast<std::size_t>(comm.size());
  Floats data(std::max<std::size_t>(most / sizeof(float), 8192)), first(1),
      all(std::size_t{1} << 20);
  cuda(cudaMemset(data.data(), 0x11,
                  data.size() * sizeof(float)));  // small, so that doubling it stays finite
  cuda(cudaMemset(first.data(), 0, sizeof(float)));
  std::vector<std::size_t> sizes{4, 64, 1024, 3584, 14336, 28672, 43008};
  for (std::size_t b = std::size_t{64} << 10; b <= most; b *= b < (std::size_t{1} << 20) ? 2 : 4)
    sizes.push_back(b);
  const auto row = [&](const char* op, std::size_t bytes, const Cost& c) {
    if (comm.rank() == 0) {
      std::printf("| %s | %s | %zu | %.2f | %.2f | %.1f |\n", name.c_str(), op, bytes, c.stream_us,
                  c.graph_us, static_cast<double>(bytes) / c.graph_us / 1e3);
      std::fflush(stdout);
    }
  };
  for (const std::size_t bytes : sizes) {
    if (bytes > most) continue;
    const int n = bytes <= 65536 ? 100 : bytes <= (std::size_t{4} << 20) ? 20 : 4;
    row("sum", bytes,
        cost(
            comm, stream, first.data(),
            [&] { comm.sum(Point::kAttnOut, data.data(), bytes / sizeof(float), stream); }, n));
  }
  // Router logits and latent rows of a rank of 8 (560 floats), and of a rank of this many.
  for (const std::size_t width : {std::size_t{560}, 4480 / size}) {
    const std::vector<std::size_t> widths(size, width);
    row("gather", width * sizeof(float) * size,
        cost(
            comm, stream, first.data(),
            [&] {
              comm.gather_rows(Point::kRouterLatent, data.data(), all.data(), 1, widths, stream);
            },
            100));
  }
  // The routed latent of K3.
  const std::vector<std::size_t> bands(size, 3584 / size);
  row("sum_bands", 3584 / size * size * sizeof(float),
      cost(
          comm, stream, first.data(),
          [&] { comm.sum_bands(Point::kMoeLatent, data.data(), 1, bands, stream); }, 100));
}

int run(int argc, char** argv) {
  World world;
  try {
    std::vector<std::string> names;
    std::size_t most = std::size_t{64} << 20;
    for (int i = 1; i < argc; ++i) {
      if (std::string(argv[i]) == "--most" && i + 1 < argc) {
        most = std::stoull(argv[++i]);
      } else {
        names.emplace_back(argv[i]);
      }
    }
    if (names.empty()) names = {"nccl", "peer"};
    int n_device = 0;
    cuda(cudaGetDeviceCount(&n_device));
    cuda(cudaSetDevice(local_group(world).rank % n_device));
    if (world.rank() == 0)
      std::printf(
          "| comm, %d ranks | call | bytes | us in a stream | us in a graph | GB/s "
          "|\n|---|---|---|---|---|---|\n",
          world.size());
    for (const std::string& name : names) {
      const auto comm = name == "peer" ? make_peer_comm(make_mpi_comm(world))
                                       : make_nccl_comm(make_mpi_comm(world));
      table(name, *comm, most);
    }
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "rank %d: %s\n", world.rank(), e.what());
    abort_world(1);
  }
}

}  // namespace
}  // namespace k3::test

int main(int argc, char** argv) { return k3::test::run(argc, argv); }
