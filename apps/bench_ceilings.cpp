#include <algorithm>
#include <cstring>

#include <fmt/core.h>

#include "apps/bench_session.h"
#include "apps/bench_timing.h"
#include "apps/launch_main.h"
#include "kernels/probe.h"
#include "rank/fault.h"

namespace k3 {
namespace {

// What one rank measured; travels as it is.
struct Ceilings {
  Spread copy_gb_s, read_gb_s, multiply_tflops, matmul_tflops;
  Spread launch_us, graph_launch_us;
};

Spread rate_of(const Spread& seconds, double amount) {
  // The slow tail of times is the low one of rates.
  Spread out = seconds;
  out.median = amount / seconds.median;
  out.p10 = amount / seconds.p90;
  out.p90 = amount / seconds.p10;
  out.mean = amount / seconds.mean;
  return out;
}

Spread scaled(const Spread& s, double by) {
  return {s.n, by * s.median, by * s.p10, by * s.p90, by * s.mean};
}

// A product as layers ask for it, in the precision that was asked for.
Spread time_matmul(Backend& backend, bool large, std::int64_t repeat) {
  const std::int64_t n_tok = large ? 4096 : 16, n = large ? 8192 : 512;
  HostBox box;
  box.type = BlockType::kBF16;
  box.dims = box.end = {n, n, 1};
  std::vector<std::unique_ptr<DeviceBuffer>> storage;
  const Weight w =
      backend.synthesize(box, {SynthKind::kMatrix, BlockType::kBF16, 1, 0.0078125f}, storage);
  // Rows of the same random values: the device's arithmetic does not look at them.
  const auto x = backend.allocate(static_cast<std::size_t>(n_tok * n) * sizeof(float));
  const auto y = backend.allocate(static_cast<std::size_t>(n_tok * n) * sizeof(float));
  std::vector<float> row;
  for (std::int64_t i = 0; i < n; ++i)
    row.push_back(synth_normal(synth_mix(static_cast<std::uint64_t>(i)), 1));
  for (std::int64_t t = 0; t < n_tok; ++t)
    backend.upload(x->data() + t * n * 4, row.data(), row.size() * sizeof(float));
  const MatmulJob job{{reinterpret_cast<float*>(y->data()), n_tok, n},
                      {reinterpret_cast<const float*>(x->data()), n_tok, n},
                      &w};
  const double flops = 2.0 * static_cast<double>(n_tok) * static_cast<double>(n * n);
  return rate_of(time_calls(backend, 1, repeat, {},
                            [&] {
                              backend.matmul({&job, 1});
                            }),
                 flops / 1e12);
}

Ceilings measure(Backend& backend, DeviceProbe& probe, bool large, const BenchJob& job) {
  Ceilings c;
  const auto bytes = static_cast<std::size_t>(job.most_bytes) / 16 * 16;
  {
    const auto from = backend.allocate(bytes), to = backend.allocate(bytes);
    const double gb = static_cast<double>(bytes) / 1e9;
    c.copy_gb_s = rate_of(time_calls(backend, 1, job.repeat, {},
                                     [&] { backend.copy(to->data(), from->data(), bytes); }),
                          2 * gb);
    c.read_gb_s = rate_of(
        time_calls(backend, 1, job.repeat, {}, [&] { probe.read(from->data(), bytes); }), gb);
  }
  const double flops = probe.multiply();
  if (flops > 0) {
    const auto times = time_calls(backend, 4, job.repeat, {}, [&] {
      for (int i = 0; i < 4; ++i) probe.multiply();
    });
    c.multiply_tflops = rate_of(times, flops / 1e12);
  }
  c.matmul_tflops = time_matmul(backend, large, job.repeat);
  constexpr std::int64_t kLaunches = 500;
  const auto launches = [&] {
    for (std::int64_t i = 0; i < kLaunches; ++i) probe.nothing();
  };
  c.launch_us = scaled(time_calls(backend, kLaunches, job.repeat, {}, launches), 1e6);
  const std::unique_ptr<Replay> graph = backend.capture(launches);
  c.graph_launch_us =
      scaled(time_calls(backend, kLaunches, job.repeat, {}, [&] { graph->run(); }), 1e6);
  return c;
}

void record(BenchSession& s, const std::vector<std::vector<std::byte>>& all,
            const DeviceProbe& probe, const std::string& device) {
  struct Named {
    const char* name;
    std::string what;
    Spread Ceilings::*spread;
  };
  const Named names[] = {
      {"copy_gb_s", "copy within the device's memory, read and written", &Ceilings::copy_gb_s},
      {"read_gb_s", "read", &Ceilings::read_gb_s},
      {"multiply_tflops", probe.multiply_what(), &Ceilings::multiply_tflops},
      {"matmul_tflops", "the backend's matmul of BF16 weights, --precision as given",
       &Ceilings::matmul_tflops},
      {"launch_us", "empty kernel in a stream", &Ceilings::launch_us},
      {"graph_launch_us", "empty kernel in a graph", &Ceilings::graph_launch_us}};
  s.record.text("devices", device);
  s.record.text("multiply_what", probe.multiply_what());
  s.say(fmt::format("k3bench ceilings: {}, {} rank{}; slowest rank's median, p10, p90", device,
                    all.size(), all.size() == 1 ? "" : "s"));
  for (const Named& n : names) {
    std::vector<double> medians;
    Spread worst;
    for (const std::vector<std::byte>& bytes : all) {
      Ceilings c;
      std::memcpy(&c, bytes.data(), sizeof c);
      const Spread& spread = c.*n.spread;
      const bool rate = std::string(n.name).find("_us") == std::string::npos;
      if (medians.empty() || (rate ? spread.median < worst.median : spread.median > worst.median))
        worst = spread;
      medians.push_back(spread.median);
    }
    if (worst.n == 0) {
      s.say(fmt::format("{:<18} not measured: no code for this device ({})", n.name, n.what));
      continue;
    }
    s.record.number(n.name, worst.median);
    s.record.number(std::string("p10_") + n.name, worst.p10);
    s.record.number(std::string("p90_") + n.name, worst.p90);
    s.record.column(n.name, medians);
    s.say(fmt::format("{:<18} {:>12.3f} {:>12.3f} {:>12.3f}   {}", n.name, worst.median, worst.p10,
                      worst.p90, n.what));
  }
}

}  // namespace

void bench_ceilings(BenchSession& s, World& world, Comm& comm, const BenchJob& job,
                    const RunConfig& config) {
  const RankDevice device = make_rank_device(config, world, comm);
  Backend& backend = *device.backend;
  const bool cuda = config.backend == "cuda";
  std::unique_ptr<DeviceProbe> probe;
  Ceilings mine;
  together(comm, [&] {
    probe = cuda ? make_cuda_probe(backend.stream()) : make_cpu_probe(config.threads);
    mine = measure(backend, *probe, cuda, job);
  });
  const auto all = comm.gather_bytes(Point::kResidency, std::as_bytes(std::span(&mine, 1)), 0);
  if (comm.rank() != 0) return;
  record(s, all, *probe, backend.describe());
  record_prediction(s, mine.read_gb_s.median, "GB/s read");
}

}  // namespace k3
