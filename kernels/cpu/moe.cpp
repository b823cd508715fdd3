#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "kernels/cpu/ops.h"

namespace k3::cpu {
namespace {

// Floor under the sum of the chosen probabilities: 2^-14, as the reference has it.
constexpr float kWeightFloor = 6.103515625e-5f;
// Floats of expert inputs and outputs held at once.
constexpr std::int64_t kMostFloats = 1 << 22;

// Tokens of [t0, t1) that chose an expert of this rank: (expert, output row = token * k + choice).
struct Choice {
  std::int64_t expert;
  std::int64_t tok;
  std::int64_t row;
};

std::vector<Choice> choices_here(View<const std::int32_t> ids, std::int64_t t0, std::int64_t t1,
                                 std::int64_t begin, std::int64_t count) {
  std::vector<Choice> found;
  for (std::int64_t t = t0; t < t1; ++t) {
    for (std::int64_t j = 0; j < ids.cols; ++j) {
      const std::int64_t e = ids.row(t)[j] - begin;
      if (e >= 0 && e < count) found.push_back({e, t, (t - t0) * ids.cols + j});
    }
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const Choice& a, const Choice& b) { return a.expert < b.expert; });
  return found;
}

// Runs of equal expert in `found`, as [begin, end).
std::vector<std::pair<std::size_t, std::size_t>> groups_of(const std::vector<Choice>& found) {
  std::vector<std::pair<std::size_t, std::size_t>> groups;
  for (std::size_t i = 0, j; i < found.size(); i = j) {
    for (j = i; j < found.size() && found[j].expert == found[i].expert;) ++j;
    groups.emplace_back(i, j);
  }
  return groups;
}

// What the chosen experts read and write, a row for each choice, in the order of `found`.
struct Rows {
  View<float> z, g, u, y;
  Rows(float* at, std::int64_t n, std::int64_t latent, std::int64_t ffn)
      : z(at, n, latent),
        g(z.data + n * latent, n, ffn),
        u(g.data + n * ffn, n, ffn),
        y(u.data + n * ffn, n, latent) {}
};

// down . situ(gate . z, up . z) for every choice, experts side by side.
void run_experts(Ops& ops, const Rows& r, const std::vector<Choice>& found, const ExpertWeights& w,
                 Situ p) {
  const auto groups = groups_of(found);
  const auto each = [&](auto&& f) {
    for (const auto& [begin, end] : groups) {
      const auto at = static_cast<std::int64_t>(begin), n = static_cast<std::int64_t>(end - begin);
      f(found[begin].expert, at, n);
    }
  };
  ops.jobs.clear();
  each([&](std::int64_t e, std::int64_t at, std::int64_t n) {
    ops.jobs.push_back(rows_job(r.g.slice(at, n), r.z.slice(at, n), *w.gate, e));
    ops.jobs.push_back(rows_job(r.u.slice(at, n), r.z.slice(at, n), *w.up, e));
  });
  multiply(ops);
  situ(ops, r.g, r.u, p);
  ops.jobs.clear();
  each([&](std::int64_t e, std::int64_t at, std::int64_t n) {
    ops.jobs.push_back(rows_job(r.y.slice(at, n), r.g.slice(at, n), *w.down, e));
  });
  multiply(ops);
}

}  // namespace

void route(Ops& ops, View<std::int32_t> ids, View<float> weights, View<const float> logits,
           const float* bias, std::int64_t bias_stride, bool normalise, float scale) {
  const std::int64_t n = logits.cols, k = ids.cols;
  std::vector<float> p(static_cast<std::size_t>(n));
  std::vector<std::int32_t> order(static_cast<std::size_t>(n));
  for (std::int64_t t = 0; t < logits.rows; ++t) {
    std::fill(p.begin(), p.end(), 1.0f);
    ops.table.sigmoid_gate(p.data(), logits.row(t), n);
    std::iota(order.begin(), order.end(), 0);
    const float* b = bias + t * bias_stride;
    auto key = [&](std::int32_t e) { return p[static_cast<std::size_t>(e)] + b[e]; };
    std::partial_sort(
        order.begin(), order.begin() + k, order.end(), [&](std::int32_t a, std::int32_t b) {
          const float ka = key(a), kb = key(b);
          if (std::isnan(ka) != std::isnan(kb))
            return std::isnan(kb);  // a strict order also when the logits are not finite
          return ka > kb || (!(kb > ka) && a < b);
        });
    float sum = 0;
    for (std::int64_t j = 0; j < k; ++j) {
      ids.row(t)[j] = order[static_cast<std::size_t>(j)];
      weights.row(t)[j] = p[static_cast<std::size_t>(order[static_cast<std::size_t>(j)])];
      sum += weights.row(t)[j];
    }
    const float denom = normalise ? std::max(sum, kWeightFloor) : 1.0f;
    const float factor = scale != 0.0f ? scale : 1.0f;
    for (std::int64_t j = 0; j < k; ++j) weights.row(t)[j] = weights.row(t)[j] / denom * factor;
  }
}

void experts(Ops& ops, View<float> m, View<const float> z, View<const std::int32_t> ids,
             View<const float> weights, const ExpertWeights& w, Situ p) {
  const std::int64_t k = ids.cols, latent = m.cols, ffn = w.gate->n_out;
  for (std::int64_t t = 0; t < m.rows; ++t) std::fill_n(m.row(t), latent, 0.0f);
  if (w.gate->empty()) return;
  const std::int64_t per_choice = 2 * (latent + ffn);
  const std::int64_t block = std::max<std::int64_t>(1, kMostFloats / (per_choice * k));
  std::vector<const float*> result;  // by token and choice; null where the expert is another rank's
  for (std::int64_t t0 = 0; t0 < m.rows; t0 += block) {
    const std::int64_t t1 = std::min(t0 + block, m.rows);
    const auto found = choices_here(ids, t0, t1, w.expert_begin, w.gate->n_mat);
    const auto n = static_cast<std::int64_t>(found.size());
    const Rows r(ops.room(n * per_choice), n, latent, ffn);
    result.assign(static_cast<std::size_t>((t1 - t0) * k), nullptr);
    for (std::int64_t i = 0; i < n; ++i) {
      const Choice& c = found[static_cast<std::size_t>(i)];
      std::copy_n(z.row(c.tok), latent, r.z.row(i));
      result[static_cast<std::size_t>(c.row)] = r.y.row(i);
    }
    run_experts(ops, r, found, w, p);
    // Added in the order of choice, whatever order the experts ran in: grouping must not change the sum.
    ops.pool.split(t1 - t0, k * latent, [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t i = begin; i < end; ++i) {
        for (std::int64_t j = 0; j < k; ++j) {
          const float* y = result[static_cast<std::size_t>(i * k + j)];
          if (y != nullptr) ops.table.add_scaled(m.row(t0 + i), weights.row(t0 + i)[j], y, latent);
        }
      }
    });
  }
}

void situ(Ops& ops, View<float> g, View<const float> u, Situ p) {
  // Tokens can be few and wide or many and narrow: pieces of both.
  constexpr std::int64_t kColumns = 256, kCost = 16;
  const std::int64_t across = (g.cols + kColumns - 1) / kColumns;
  ops.pool.split(g.rows * across, kCost * std::min(kColumns, g.cols),
                 [&](std::int64_t begin, std::int64_t end, int) {
                   for (std::int64_t i = begin; i < end; ++i) {
                     const std::int64_t t = i / across, c = i % across * kColumns;
                     ops.table.situ(g.row(t) + c, u.row(t) + c, std::min(kColumns, g.cols - c), p);
                   }
                 });
}

}  // namespace k3::cpu
