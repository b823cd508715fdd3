#include "rank/prepare.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <stdexcept>

#include "rank/fault.h"
#include "rank/synth.h"

namespace k3 {
namespace {

constexpr std::int64_t kLogitRows = 32;

void resolve_layout(RunConfig& c, int world) {
  if (c.layout.tp == 0) {
    if (world % c.layout.pp != 0) {
      throw std::invalid_argument("--pp " + std::to_string(c.layout.pp) +
                                  ": does not divide the world of " + std::to_string(world) +
                                  " ranks");
    }
    c.layout.tp = world / c.layout.pp;
  }
  if (c.layout.world() == world) return;
  throw std::invalid_argument(
      "--tp " + std::to_string(c.layout.tp) + " --pp " + std::to_string(c.layout.pp) + ": needs " +
      std::to_string(c.layout.world()) + " ranks, this job has " + std::to_string(world));
}

// Between two ranks there is one way to add.
void check_sums(const RunConfig& c) {
  if (!c.reproducible || c.backend != "cuda" || c.comm != "nccl" || c.share_gpu || c.layout.tp <= 2)
    return;
  throw std::invalid_argument("--reproducible: the order of NCCL's sums over " +
                              std::to_string(c.layout.tp) +
                              " ranks depends on their size; give --comm peer or --comm mpi");
}

void resolve_sequence(RunConfig& c, const ModelConfig& m) {
  if (c.n_ctx == 0) c.n_ctx = std::min(m.n_ctx, kDefaultContext);
  if (c.n_ctx > m.n_ctx) {
    throw std::invalid_argument("--ctx " + std::to_string(c.n_ctx) + ": the model's limit is " +
                                std::to_string(m.n_ctx) + " tokens");
  }
  c.chunk_tok = std::min(c.chunk_tok, c.n_ctx * c.n_slot);  // several sequences may share a step
}

void open_weights(Prepared& p) {
  const RunConfig& c = p.config;
  if (!c.synthetic.empty()) {
    p.file = std::make_unique<ModelFile>(synthetic_outline(c.synthetic, c.synthetic_seed));
    p.source = std::make_unique<SyntheticWeights>(c.synthetic_seed);
    return;
  }
  OpenOptions options;
  options.ignore_split_count = c.ignore_split_count;
  p.file = std::make_unique<ModelFile>(ModelFile::open(c.model, options));
  p.source = std::make_unique<FileWeights>(*p.file);
}

void open_and_plan(Prepared& p, int world) {
  resolve_layout(p.config, world);
  check_sums(p.config);
  open_weights(p);
  p.warnings = p.file->warnings();
  const std::string& name = p.file->parts().front().path;
  const ModelConfig model =
      read_model_config(p.file->metadata(), p.file->tensors(), name, p.warnings);
  p.plan = std::make_unique<Plan>(Plan::make(model, p.file->tensors(), p.config.layout, name));
  p.warnings.insert(p.warnings.end(), p.plan->dialects().begin(), p.plan->dialects().end());
  resolve_sequence(p.config, model);
  p.fingerprint = p.file->fingerprint();
}

void check_same_model(const Prepared& p, Comm& world) {
  const auto all =
      world.all_gather_bytes(Point::kModelCheck, std::as_bytes(std::span(p.fingerprint)));
  together(world, [&] {
    const auto& first = all.front();
    if (std::equal(first.begin(), first.end(),
                   reinterpret_cast<const std::byte*>(p.fingerprint.data())))
      return;
    throw std::invalid_argument(
        p.file->parts().front().path + ": content fingerprint " + p.fingerprint +
        ", rank 0 opened " +
        std::string(reinterpret_cast<const char*>(first.data()), first.size()) +
        ": the ranks see different files");
  });
}

// What a rank asks of its memory, in a shape that travels.
struct Price {
  std::uint64_t domain = 0;  // hash of Backend::memory_domain()
  std::uint64_t need = 0;
  std::uint64_t per_position = 0;
  std::uint64_t free = 0;
};

std::string gib(std::uint64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.2f GiB",
                static_cast<double>(bytes) / (1024.0 * 1024.0 * 1024.0));
  return text;
}

// Ranks that share a memory are priced together; no rank allocates before all are known to fit.
void check_fits(Prepared& p, Comm& world, const Backend& backend) {
  Price mine;
  const ShardCost& cost = p.cost;
  together(world, [&] {
    p.cost = shard_cost(*p.plan, *p.source, backend, world.rank(), shard_options(p.config));
    p.free_bytes = backend.free_bytes();
    mine.domain = std::hash<std::string>{}(backend.memory_domain());
    mine.need = cost.total();
    mine.per_position = cost.per_position;
    mine.free = p.free_bytes;
  });
  const auto all = world.all_gather_bytes(Point::kModelCheck, std::as_bytes(std::span(&mine, 1)));
  together(world, [&] {
    std::uint64_t need = 0, per_position = 0, free = mine.free;
    for (const auto& bytes : all) {
      Price other;
      std::memcpy(&other, bytes.data(), sizeof(other));
      if (other.domain != mine.domain) continue;
      need += other.need;
      per_position += other.per_position;
      free = std::min(free, other.free);
    }
    if (need <= free) return;
    const std::uint64_t fixed = need - per_position * static_cast<std::uint64_t>(p.config.n_ctx);
    const std::string advice = fixed < free && per_position > 0
                                   ? "the largest context that fits is --ctx " +
                                         std::to_string((free - fixed) / per_position)
                                   : "no context fits: use more ranks or a smaller quant";
    throw std::invalid_argument(
        "--ctx " + std::to_string(p.config.n_ctx) + ": " + backend.memory_domain() + " needs " +
        gib(need) + " (this rank: weights " + gib(cost.weights) + ", state " + gib(cost.state) +
        ", activations " + gib(cost.work) + "), " + gib(free) + " are free; " + advice);
  });
}

}  // namespace

ShardOptions shard_options(const RunConfig& config) {
  ShardOptions o;
  o.state.n_slot = config.n_slot;
  o.state.n_ctx = config.n_ctx;
  o.state.cache = config.cache;
  o.chunk_tok = config.chunk_tok;
  // Every sequence of a step may want a token.
  o.logit_rows = std::min(std::max<std::int64_t>(kLogitRows, config.n_slot), config.chunk_tok);
  return o;
}

Prepared prepare(const RunConfig& asked, Comm& world, const Backend& backend) {
  Prepared p;
  p.config = asked;
  together(world, [&] {
    check(p.config);
    open_and_plan(p, world.size());
  });
  check_same_model(p, world);
  check_fits(p, world, backend);
  return p;
}

}  // namespace k3
