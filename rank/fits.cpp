#include "rank/fits.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include <fmt/format.h>

#include "kernels/cuda/layout.h"
#include "rank/bench_math.h"
#include "rank/layer.h"
#include "rank/plan_report.h"

namespace k3 {
namespace {

constexpr double kGiB = 1024.0 * 1024 * 1024;
constexpr double kCudaWorkspace = kGiB;  // Prefill::kBytes of kernels/cuda/prefill.h
constexpr std::int64_t kLogitRows = 32;  // as prepare() asks for

// Names, sizes: the publishers' pages. Types: see QuantRecipe.
constexpr PublishedFile kFiles[] = {
    {"UD-IQ1_S", "k3", "UD-IQ1_S", 594.0e9, ""},
    {"UD-IQ2_XXS", "k3", "experts=IQ2_XXS,other=Q8_0", 711.1e9,
     "its experts are a mix of types that average 1.907 bits a weight, which mix is unknown: the "
     "published size is taken"},
    {"UD-Q2_K_XL", "k3", "UD-Q2_K_XL", 861.3e9,
     "a minority of its experts is larger than IQ2_XS, which is unknown: the published size is "
     "taken"},
    {"UD-Q4_K_XL", "k3", "UD-Q4_K_XL", 1508.7e9, ""},
    {"UD-Q8_K_XL", "k3", "UD-Q8_K_XL", 1561.2e9, ""},
    {"Neuron-IQ1_S", "k3-neuron", "Neuron-IQ1_S", 307.49 * kGiB, ""},
};

bool is_expert(const PlannedTensor& t) { return class_of(t.role) == TensorClass::kExperts; }

// Bytes of a band's rows as the CUDA backend lays them out (its shape_of()).
double cuda_bytes(const PlannedTensor& t, const Box& box) {
  const std::int64_t elems = traits(t.type).elems;
  const std::int64_t first = box.axis[0].begin % elems, n_in = box.axis[0].size();
  const std::int64_t n_block = (box.axis[0].end + elems - 1) / elems - box.axis[0].begin / elems;
  const std::int64_t row = cuda::has_planes(t.type, n_in, first)
                               ? cuda::plane_sizes(t.type, n_in, (first + n_in + 255) / 256).row()
                               : cuda::align16(n_block * traits(t.type).bytes);
  return static_cast<double>(row) * static_cast<double>(box.axis[1].size() * box.axis[2].size());
}

double weight_bytes(const Plan& plan, int rank, double expert_scale, Placement placement) {
  double sum = 0;
  for (const PlannedTensor& t : plan.tensors()) {
    const Box box = plan.box(t, rank);
    if (box.empty()) continue;
    const bool cuda = placement == Placement::kCuda && t.dims[1] > 1 && !is_conv(t.role);
    const double bytes = cuda ? cuda_bytes(t, box) : static_cast<double>(plan.band_bytes(t, rank));
    sum += bytes * (is_expert(t) ? expert_scale : 1);
  }
  return sum;
}

// `weights`: of the rank, which no context changes.
RankNeed need_of(const Plan& plan, int rank, double weights, const FitsRequest& q) {
  const auto work_tok = std::min(q.chunk_tok, q.state.n_ctx * q.state.n_slot);
  const auto rows = std::min(std::max<std::int64_t>(kLogitRows, q.state.n_slot), work_tok);
  RankNeed n;
  n.weights = weights;
  n.cache = static_cast<double>(state_bytes_per_position(plan, rank, q.state)) *
            static_cast<double>(q.state.n_ctx);
  n.kda_state = static_cast<double>(state_bytes(plan, rank, q.state)) - n.cache;
  n.work = static_cast<double>(Work::bytes(plan, rank, work_tok, rows)) + kCudaWorkspace;
  return n;
}

std::vector<double> weights_of_ranks(const Plan& plan, const SizedModel& model,
                                     Placement placement) {
  std::vector<double> out;
  for (int r = 0; r < plan.layout().world(); ++r)
    out.push_back(weight_bytes(plan, r, model.expert_scale, placement));
  return out;
}

int neediest_rank(const Plan& plan, std::span<const double> weights, const FitsRequest& q) {
  int worst = 0;
  double most = 0;
  for (int r = 0; r < plan.layout().world(); ++r) {
    const double n = need_of(plan, r, weights[static_cast<std::size_t>(r)], q).total();
    if (n > most) most = n, worst = r;
  }
  return worst;
}

RankNeed worst_need(const Plan& plan, std::span<const double> weights, const FitsRequest& q) {
  const int r = neediest_rank(plan, weights, q);
  return need_of(plan, r, weights[static_cast<std::size_t>(r)], q);
}

// By halving: what a rank needs never falls with the context (a step grows with it, too, until it is a whole chunk).
std::int64_t largest_context(const Plan& plan, std::span<const double> weights, FitsRequest q,
                             double budget) {
  std::int64_t low = 0, high = plan.config().n_ctx;
  while (low < high) {
    q.state.n_ctx = low + (high - low + 1) / 2;
    if (worst_need(plan, weights, q).total() <= budget) {
      low = q.state.n_ctx;
    } else {
      high = q.state.n_ctx - 1;
    }
  }
  return low;
}

// Of the rank and the stage that keep the others waiting.
double prefill_tok_s(const Plan& plan, const SizedModel& model, const NodeProfile& node,
                     const FitsRequest& q) {
  double seconds = 0;
  for (int r = 0; r < plan.layout().world(); ++r) {
    const PrefillFloor f =
        prefill_floor(plan, r, 0, q.prompt_tok, q.chunk_tok, q.state.cache, node.best_read_gb_s(),
                      node.best_tflops(), model.expert_scale);
    seconds = std::max(seconds, f.seconds);
  }
  return static_cast<double>(q.prompt_tok) / seconds;
}

double collectives_of(const Plan& plan) {
  double n = 0;
  for (int stage = 0; stage < plan.layout().pp; ++stage) {
    for (const std::uint32_t calls : plan.collectives(stage * plan.layout().tp)) n += calls;
  }
  return n;
}

// The same under one layout.
Fits fits_laid_out(const SizedModel& model, const NodeProfile& node, const FitsRequest& q) {
  const Plan plan = Plan::make(model.config, model.tensors, q.layout, model.name);
  Fits f;
  f.expert_groups = plan.expert_groups();
  f.budget = node.budget_gib() * kGiB;
  for (const PlannedTensor& t : plan.tensors())
    f.file_bytes +=
        static_cast<double>(plan.stored_bytes(t)) * (is_expert(t) ? model.expert_scale : 1);
  const std::vector<double> weights = weights_of_ranks(plan, model, q.placement);
  f.worst_rank = neediest_rank(plan, weights, q);
  f.worst = need_of(plan, f.worst_rank, weights[static_cast<std::size_t>(f.worst_rank)], q);
  f.resident = f.worst.total() <= f.budget;
  f.largest_ctx = largest_context(plan, weights, q, f.budget);
  const auto wall = [&](double n_row) {
    return floor_ms(serial_bytes(plan, n_row, q.state.cache, model.expert_scale),
                    node.best_read_gb_s());
  };
  f.decode_ms = wall(0);
  f.decode_ms_at_ctx = wall(static_cast<double>(q.state.n_ctx - 1));
  if (node.link_latency_us)
    f.collective_ms = collectives_of(plan) * node.link_latency_us->value * 1e-3;
  f.prefill_tok_s = prefill_tok_s(plan, model, node, q);
  return f;
}

std::string gib(double bytes) { return fmt::format("{:.1f}", bytes / kGiB); }

}  // namespace

std::span<const PublishedFile> published_files() { return kFiles; }

const PublishedFile& published_file(std::string_view name) {
  std::string names;
  for (const PublishedFile& f : kFiles) {
    if (name == f.name) return f;
    names += (names.empty() ? "" : ", ") + std::string(f.name);
  }
  throw std::invalid_argument(fmt::format("--quant {}: valid: {}", name, names));
}

SizedModel sized_model(const PublishedFile& file) {
  const ModelOutline outline = outline_of(named_shape(file.shape), QuantRecipe::parse(file.recipe));
  SizedModel m;
  m.name = file.name;
  m.caveat = file.caveat;
  m.tensors = tensors_of(outline);
  std::vector<std::string> dialects;
  m.config = read_model_config(metadata_of(outline), m.tensors, file.name, dialects);
  if (m.caveat.empty()) return m;
  double experts = 0, others = 0;
  for (std::size_t i = 0; i < m.tensors.size(); ++i) {
    const bool expert = class_of(outline.roles[i]) == TensorClass::kExperts;
    (expert ? experts : others) += static_cast<double>(m.tensors[i].bytes);
  }
  m.expert_scale = (file.bytes - others) / experts;
  return m;
}

Fits fits(const SizedModel& model, const NodeProfile& node, const FitsRequest& q) {
  if (q.layout.world() != node.devices) {
    throw std::invalid_argument(fmt::format("--tp {} --pp {}: needs {} devices, {} has {}",
                                            q.layout.tp, q.layout.pp, q.layout.world(), node.name,
                                            node.devices));
  }
  if (q.state.n_ctx < 1 || q.state.n_ctx > model.config.n_ctx) {
    throw std::invalid_argument(fmt::format("--ctx {}: valid: 1 to {}, the model's limit",
                                            q.state.n_ctx, model.config.n_ctx));
  }
  Fits best = fits_laid_out(model, node, q);
  // Fewer groups balance a token's experts better, more cut fewer blocks through: where the usual choice is too large, the
  // first that fits is taken, else the one that comes nearest.
  if (best.resident || q.layout.expert_groups != 0 || q.layout.policy != ShardPolicy::kFull)
    return best;
  FitsRequest other = q;
  for (int groups = best.expert_groups + 1; groups <= q.layout.tp && !best.resident; ++groups) {
    if (q.layout.tp % groups != 0) continue;
    other.layout.expert_groups = groups;
    const Fits f = fits_laid_out(model, node, other);
    if (f.worst.total() < best.worst.total()) best = f;
  }
  return best;
}

int devices_needed(const SizedModel& model, const NodeProfile& node, FitsRequest q, int most) {
  NodeProfile larger = node;
  q.layout.pp = 1;
  // All ranks share evenly, so the first number is never under the mean; then one by one, for shares are not quite even.
  const double budget = node.budget_gib() * kGiB;
  double bytes = 0;
  for (const TensorInfo& t : model.tensors) bytes += static_cast<double>(t.bytes);
  bytes *= std::min(1.0, model.expert_scale);
  for (int n = std::max(1, static_cast<int>(bytes / budget)); n <= most; ++n) {
    larger.devices = larger.hosts = q.layout.tp = n;
    const Plan plan = Plan::make(model.config, model.tensors, q.layout, model.name);
    const std::vector<double> weights = weights_of_ranks(plan, model, q.placement);
    const double worst = worst_need(plan, weights, q).total();
    if (worst <= budget) return n;
    q.layout.expert_groups = n;  // no block cut through: the least that n can hold
    const Plan whole = Plan::make(model.config, model.tensors, q.layout, model.name);
    if (worst_need(whole, weights_of_ranks(whole, model, q.placement), q).total() <= budget)
      return n;
    q.layout.expert_groups = 0;
  }
  return 0;
}

std::string refusal_line(const SizedModel& model, const NodeProfile& node, const FitsRequest& q,
                         const Fits& f) {
  constexpr int kMost = 64;
  std::string advice;
  if (f.largest_ctx > 0) {
    advice = fmt::format("the largest context that fits is --ctx {} (--expert-groups {})",
                         f.largest_ctx, f.expert_groups);
  } else if (const int n = devices_needed(model, node, q, kMost); n > 0) {
    advice = fmt::format("no context fits; {} such devices would hold it", n);
  } else {
    advice = fmt::format("no context fits, nor would {} such devices hold it", kMost);
  }
  return fmt::format(
      "{}: {} at --ctx {} would not be fully resident: rank {} needs {} GiB (weights {}, cache {}, "
      "KDA state {}, work {}), "
      "{} of {} GiB can be taken; {}",
      node.name, model.name, q.state.n_ctx, f.worst_rank, gib(f.worst.total()),
      gib(f.worst.weights), gib(f.worst.cache), gib(f.worst.kda_state), gib(f.worst.work),
      gib(f.budget), fmt::format("{:.1f}", node.memory_gib.value), advice);
}

}  // namespace k3
