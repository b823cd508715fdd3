#include "rank/bench_math.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "rank/state.h"

namespace k3 {
namespace {

bool is_routed_expert(Role role) {
  return role == Role::kExpertGate || role == Role::kExpertUp || role == Role::kExpertDown;
}

// The next of a sequence of well-mixed 64-bit numbers (splitmix64).
std::uint64_t next_random(std::uint64_t& state) {
  state += 0x9e3779b97f4a7c15u;
  std::uint64_t z = state;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

void add_runs(std::vector<FileExtent>& out, const TensorInfo& t, const ByteRuns& r) {
  if (r.bytes == 0) return;
  for (std::uint64_t m = 0; m < r.n_matrix; ++m) {
    for (std::uint64_t i = 0; i < r.n_run; ++i) {
      out.push_back({t.part, t.offset + r.begin + m * r.matrix_stride + i * r.stride, r.bytes});
    }
  }
}

const TensorInfo& stored(const ModelFile& file, const std::string& name) {
  const TensorInfo* t = file.find(name);
  if (!t) throw std::logic_error(name + ": planned, but not in the file");
  return *t;
}

}  // namespace

double percentile(std::span<const double> sorted, double q) {
  if (sorted.empty()) throw std::invalid_argument("percentile: no values");
  if (!(q >= 0 && q <= 1)) throw std::invalid_argument("percentile: the share is not in 0 to 1");
  const double at = q * static_cast<double>(sorted.size() - 1);
  const auto low = static_cast<std::size_t>(at);
  const std::size_t high = std::min(low + 1, sorted.size() - 1);
  return sorted[low] + (at - static_cast<double>(low)) * (sorted[high] - sorted[low]);
}

Spread spread_of(std::span<const double> values) {
  std::vector<double> sorted(values.begin(), values.end());
  for (const double v : sorted) {
    if (!std::isfinite(v)) throw std::invalid_argument("spread: a value is not finite");
  }
  std::sort(sorted.begin(), sorted.end());
  Spread s;
  s.n = sorted.size();
  s.median = percentile(sorted, 0.5);
  s.p10 = percentile(sorted, 0.1);
  s.p90 = percentile(sorted, 0.9);
  double sum = 0;
  for (const double v : sorted) sum += v;
  s.mean = sum / static_cast<double>(s.n);
  return s;
}

std::vector<std::int32_t> seeded_ids(std::int64_t n, std::int64_t n_vocab, std::uint64_t seed) {
  if (n < 0 || n_vocab < 1)
    throw std::invalid_argument("seeded ids: no vocabulary, or fewer than 0");
  std::vector<std::int32_t> ids;
  ids.reserve(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) {
    ids.push_back(
        static_cast<std::int32_t>(next_random(seed) % static_cast<std::uint64_t>(n_vocab)));
  }
  return ids;
}

TokenBytes token_bytes(const Plan& plan, int rank, double n_row, CacheType cache,
                       double expert_scale) {
  const ModelConfig& c = plan.config();
  TokenBytes out;
  for (const PlannedTensor& t : plan.tensors()) {
    auto bytes = static_cast<double>(plan.band_bytes(t, rank));
    if (bytes == 0) continue;
    if (is_routed_expert(t.role)) {
      bytes *=
          expert_scale * static_cast<double>(c.n_expert_used) / static_cast<double>(c.n_expert);
    } else if (t.role == Role::kTokenEmbd) {
      bytes /= static_cast<double>(plan.box(t, rank).axis[1].size());
    }
    out.weights += bytes;
  }
  const StateShape shape{1, 0, cache};
  out.kda_state = 2 * static_cast<double>(state_bytes(plan, rank, shape));
  out.mla_rows = (n_row + 1) * static_cast<double>(state_bytes_per_position(plan, rank, shape));
  return out;
}

double serial_bytes(const Plan& plan, double n_row, CacheType cache, double expert_scale) {
  double sum = 0;
  for (int stage = 0; stage < plan.layout().pp; ++stage) {
    double busiest = 0;
    for (int r = stage * plan.layout().tp; r < (stage + 1) * plan.layout().tp; ++r) {
      busiest = std::max(busiest, token_bytes(plan, r, n_row, cache, expert_scale).total());
    }
    sum += busiest;
  }
  return sum;
}

TokenFlops token_flops(const Plan& plan, int rank) {
  const ModelConfig& c = plan.config();
  TokenFlops out;
  for (const PlannedTensor& t : plan.tensors()) {
    if (t.dims[1] == 1 || is_conv(t.role) || t.role == Role::kTokenEmbd) continue;
    auto flops = 2 * static_cast<double>(plan.box(t, rank).elems());
    if (is_routed_expert(t.role))
      flops *= static_cast<double>(c.n_expert_used) / static_cast<double>(c.n_expert);
    (t.role == Role::kOutput ? out.head : out.layers) += flops;
  }
  for (std::int64_t il = plan.layers(rank).begin; il < plan.layers(rank).end; ++il) {
    if (!c.layers[static_cast<std::size_t>(il)].is_mla) continue;
    const auto heads = static_cast<double>(plan.heads(rank, static_cast<int>(il)).size());
    out.per_row += heads * 2 * static_cast<double>(c.key_len + c.value_len);
  }
  return out;
}

PrefillFloor prefill_floor(const Plan& plan, int rank, std::int64_t depth, std::int64_t n_tok,
                           std::int64_t chunk, CacheType cache, double gb_s, double tflops,
                           double expert_scale) {
  const ModelConfig& c = plan.config();
  const TokenFlops token = token_flops(plan, rank);
  double experts = 0, others = 0;
  for (const PlannedTensor& t : plan.tensors()) {
    if (t.role == Role::kTokenEmbd) continue;
    (is_routed_expert(t.role) ? experts : others) += static_cast<double>(plan.band_bytes(t, rank));
  }
  const TokenBytes state = token_bytes(plan, rank, 0, cache);
  const double row = state.mla_rows;  // one row: the token's own
  const double used = static_cast<double>(c.n_expert_used) / static_cast<double>(c.n_expert);
  PrefillFloor out;
  for (std::int64_t at = 0; at < n_tok; at += chunk) {
    const auto n = static_cast<double>(std::min(chunk, n_tok - at));
    const double before = static_cast<double>(depth + at);
    const double pairs =
        n * before + n * (n + 1) / 2;  // a token sees the rows before it and its own
    const bool last = at + chunk >= n_tok;
    const double flops = n * token.layers + pairs * token.per_row + (last ? token.head : 0);
    const double reached = 1 - std::pow(1 - used, n);
    const double bytes =
        experts * expert_scale * reached + others + state.kda_state + (before + 2 * n) * row;
    out.flops += flops;
    out.bytes += bytes;
    out.seconds += std::max(flops / (tflops * 1e12), bytes / (gb_s * 1e9));
  }
  return out;
}

std::vector<PhaseTotal> phase_totals(std::span<const TimeSpan> spans) {
  std::vector<PhaseTotal> out;
  for (const TimeSpan& s : spans) {
    auto at =
        std::find_if(out.begin(), out.end(), [&](const PhaseTotal& p) { return p.name == s.name; });
    if (at == out.end()) at = out.insert(out.end(), {s.name, 0, 0});
    ++at->calls;
    at->seconds += s.seconds;
  }
  std::stable_sort(out.begin(), out.end(),
                   [](const PhaseTotal& a, const PhaseTotal& b) { return a.seconds > b.seconds; });
  return out;
}

double floor_ms(double bytes, double ceiling_gb_s) { return bytes / (ceiling_gb_s * 1e6); }

std::vector<FileExtent> file_extents(const Plan& plan, const ModelFile& file, int rank,
                                     std::uint64_t max_gap) {
  std::vector<FileExtent> all;
  for (const PlannedTensor& t : plan.tensors()) {
    if (plan.box(t, rank).empty()) continue;
    add_runs(all, stored(file, t.name), plan.byte_runs(t, rank));
    if (!t.name2.empty()) add_runs(all, stored(file, t.name2), plan.byte_runs(t, rank, true));
  }
  std::sort(all.begin(), all.end(), [](const FileExtent& a, const FileExtent& b) {
    return a.part != b.part ? a.part < b.part : a.begin < b.begin;
  });
  std::vector<FileExtent> joined;
  for (const FileExtent& e : all) {
    FileExtent* last = joined.empty() ? nullptr : &joined.back();
    if (last && last->part == e.part && e.begin <= last->begin + last->bytes + max_gap) {
      last->bytes = std::max(last->bytes, e.begin + e.bytes - last->begin);
    } else {
      joined.push_back(e);
    }
  }
  return joined;
}

std::vector<FileExtent> cut_extents(std::span<const FileExtent> extents, std::uint64_t most) {
  std::vector<FileExtent> pieces;
  for (const FileExtent& e : extents) {
    for (std::uint64_t at = 0; at < e.bytes; at += most) {
      pieces.push_back({e.part, e.begin + at, std::min(most, e.bytes - at)});
    }
  }
  return pieces;
}

bool clocks_agree(double inside_s, double outside_s, double slack) {
  constexpr double kRate = 1e-3;
  return inside_s <= outside_s * (1 + kRate) && inside_s >= outside_s * (1 - slack);
}

}  // namespace k3
