// Every fixture model under one layout: goldens, greedy continuation, chunk sizes. One launch covers all models, so that
// CI can afford many layouts:
//   mpirun -n 3 layouts --tp 3 --chunks 1,7,64,0 [--policy experts-only] [--kv-shard] [--pp M] [--every-chunk] [--models a,b] [--threads n]
// Without --every-chunk a model takes one of the chunk sizes, another one each model, so that over the layouts each meets all.
// Prints a line a run: model, sequence, layout, chunk, largest difference, tolerance. Exit 1 where one is out of bounds.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "comm/mpi_comm.h"
#include "comm/nccl_comm.h"
#include "comm/peer_comm.h"
#include "kernels/cuda_devices.h"
#include "rank/device_stage.h"
#include "rank/engine.h"
#include "rank/fault.h"
#include "support/golden.h"

namespace k3 {
namespace {

struct Options {
  Layout layout;
  std::vector<std::int64_t> chunks{1, 7, 64, 0};  // 0: the whole sequence at once
  bool every_chunk = false;
  int threads = 1;
  bool cuda = false;  // rank r of a node on device r, round and round
  bool nccl = false;  // data calls over NCCL (a device for each rank), else through the host
  bool peer = false;  // data calls through peer memory
  std::size_t rotate = 0;
  std::vector<std::string> models = golden::model_names();
};

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> items;
  std::stringstream in(list);
  for (std::string item; std::getline(in, item, ',');) items.push_back(item);
  return items;
}

Options parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; ++i) {
    const std::string key = argv[i];
    if (key == "--every-chunk") {
      o.every_chunk = true;
      continue;
    }
    if (key == "--kv-shard") {
      o.layout.kv_shard = true;
      continue;
    }
    if (key == "--cuda") {
      o.cuda = true;
      continue;
    }
    if (key == "--nccl") {
      o.nccl = true;
      continue;
    }
    if (key == "--peer") {
      o.peer = true;
      continue;
    }
    if (++i == argc) throw std::invalid_argument(key + ": needs a value");
    const std::string value = argv[i];
    if (key == "--tp") {
      o.layout.tp = std::stoi(value);
    } else if (key == "--pp") {
      o.layout.pp = std::stoi(value);
    } else if (key == "--expert-groups") {
      o.layout.expert_groups = std::stoi(value);
    } else if (key == "--threads") {
      o.threads = std::stoi(value);
    } else if (key == "--rotate") {
      o.rotate = static_cast<std::size_t>(std::stoi(value));
    } else if (key == "--policy") {
      o.layout.policy = value == "full" ? ShardPolicy::kFull : ShardPolicy::kExpertsOnly;
    } else if (key == "--models") {
      o.models = split(value);
    } else if (key == "--chunks") {
      o.chunks.clear();
      for (const std::string& c : split(value)) o.chunks.push_back(std::stoll(c));
    } else {
      throw std::invalid_argument(key + ": unknown option");
    }
  }
  return o;
}

class Runner {
 public:
  Runner(const Options& options, Comm& world, Backend& backend)
      : o_(options), world_(world), backend_(backend) {}

  int failures() const { return failures_; }

  void model(const golden::Model& m, std::int64_t chunk) {
    for (const golden::Sequence& s : m.sequences) {
      with_engine(m, chunk, s.ids.size(), [&](Engine& e) { sequence(e, m, s, chunk); });
    }
    with_engine(m, chunk, m.greedy.prompt.size() + m.greedy.ids.size(),
                [&](Engine& e) { greedy(e, m); });
  }

 private:
  // A pipeline needs a layer for every stage, and all ranks must come to the same answer.
  template <class Body>
  void with_engine(const golden::Model& m, std::int64_t chunk, std::size_t n_tok,
                   const Body& body) {
    RunConfig c;
    c.model = m.path;
    c.layout = o_.layout;
    c.n_ctx = static_cast<std::int64_t>(n_tok);
    c.chunk_tok = chunk == 0 ? c.n_ctx : chunk;
    Engine engine(c, world_, backend_);
    if (world_.rank() == 0) {
      body(engine);
      engine.stop();
    } else {
      engine.serve();
    }
  }

  void sequence(Engine& e, const golden::Model& m, const golden::Sequence& s, std::int64_t chunk) {
    std::vector<float> all;
    e.logits(0, s.ids, false, [&](std::span<const float> rows, std::int64_t) {
      all.insert(all.end(), rows.begin(), rows.end());
    });
    std::vector<float> run;
    for (const std::int64_t p : s.positions) {
      run.insert(run.end(), all.begin() + p * s.n_vocab, all.begin() + (p + 1) * s.n_vocab);
    }
    const double worst = golden::max_abs(run, s.exact);
    const double kld = s.ggml.empty() ? 0.0 : golden::mean_kld(s.ggml, run, s.n_vocab);
    const bool ok = worst <= s.exact_max_abs && (s.ggml.empty() || kld <= s.ggml_mean_kld);
    std::printf(
        "%-22s %-5s tp %d pp %d %-12s chunk %4lld  max abs %.2e of %.2e  ggml kld %.2e of %.2e  "
        "%s\n",
        m.name.c_str(), s.name.c_str(), o_.layout.tp, o_.layout.pp,
        o_.layout.kv_shard                       ? "kv-shard"
        : o_.layout.policy == ShardPolicy::kFull ? "full"
                                                 : "experts-only",
        static_cast<long long>(chunk), worst, s.exact_max_abs, kld, s.ggml_mean_kld,
        ok ? "ok" : "FAILED");
    std::fflush(stdout);
    if (!ok) ++failures_;
  }

  // Equal until a margin is within what two float32 runtimes may differ by.
  void greedy(Engine& e, const golden::Model& m) {
    SamplerOptions sampler;
    sampler.temp = 0;
    std::vector<std::int32_t> next = m.greedy.prompt;
    std::size_t step = 0;
    for (; step < m.greedy.ids.size() && m.greedy.margins[step] > 2 * m.tolerance; ++step) {
      const Decision d = e.extend(0, next, sampler, step, step > 0);
      if (d.id != m.greedy.ids[step]) {
        std::printf("%s greedy step %zu: %d, expected %d (margin there %g) FAILED\n",
                    m.name.c_str(), step, d.id, m.greedy.ids[step], m.greedy.margins[step]);
        ++failures_;
        return;
      }
      next = {d.id};
    }
    std::printf("%-22s greedy %zu of %zu steps equal\n", m.name.c_str(), step, m.greedy.ids.size());
  }

  const Options& o_;
  Comm& world_;
  Backend& backend_;
  int failures_ = 0;
};

std::unique_ptr<Backend> make_backend(const Options& o, World& world) {
  if (!o.cuda) return make_cpu_backend(o.threads);
  const auto n_device = static_cast<int>(cuda_devices().size());
  if (n_device == 0) throw std::invalid_argument("--cuda: no device");
  return make_cuda_backend(local_group(world).rank % n_device);
}

int run(int argc, char** argv) {
  World world;
  int code = 1;
  try {
    const Options o = parse(argc, argv);
    const auto backend = make_backend(o, world);
    DeviceStage stage(*backend);
    auto comm = make_mpi_comm(world, o.cuda ? &stage : nullptr);
    if (o.nccl) comm = make_nccl_comm(std::move(comm));
    if (o.peer) comm = make_peer_comm(std::move(comm));
    if (comm->rank() == 0) std::printf("%s\n", backend->describe().c_str());
    Runner runner(o, *comm, *backend);
    for (std::size_t i = 0; i < o.models.size(); ++i) {
      const golden::Model m = golden::load_model(o.models[i]);
      for (std::size_t c = 0; c < o.chunks.size(); ++c) {
        if (o.every_chunk || c == (i + o.rotate) % o.chunks.size()) runner.model(m, o.chunks[c]);
      }
    }
    code = runner.failures() == 0 ? 0 : 1;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "rank %d: %s\n", world.rank(),
                 fault_of(std::current_exception()).line.c_str());
    abort_world(1);
  }
  return code;
}

}  // namespace
}  // namespace k3

int main(int argc, char** argv) { return k3::run(argc, argv); }
