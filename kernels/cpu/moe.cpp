#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "kernels/cpu/ops.h"

namespace k3::cpu {
namespace {

// Floor under the sum of the chosen probabilities: 2^-14, as the reference has it.
constexpr float kWeightFloor = 6.103515625e-5f;
// Tokens whose expert outputs are held at once.
constexpr std::int64_t kTokenBlock = 32;

float situ_value(float g, float u, Situ p) {
  const float gate = p.beta * std::tanh(g / p.beta) * sigmoid(g);
  return gate * (p.lambda > 0 ? p.lambda * std::tanh(u / p.lambda) : u);
}

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

// One expert for the tokens that chose it; out[row] = down . situ(gate . z, up . z).
void run_expert(float* out, std::int64_t latent, View<const float> z, std::span<const Choice> group,
                const ExpertWeights& w, Situ p, int threads) {
  const auto n = static_cast<std::int64_t>(group.size());
  const std::int64_t ffn = w.gate->n_out;
  std::vector<float> in(static_cast<std::size_t>(n * latent)), g(static_cast<std::size_t>(n * ffn)),
      u(g.size()), y(in.size());
  for (std::int64_t i = 0; i < n; ++i) {
    std::copy_n(z.row(group[static_cast<std::size_t>(i)].tok), latent, in.data() + i * latent);
  }
  const View<float> vin(in.data(), n, latent), vg(g.data(), n, ffn), vu(u.data(), n, ffn),
      vy(y.data(), n, latent);
  const std::int64_t e = group.front().expert;
  matmul(vg, vin, *w.gate, e, threads);
  matmul(vu, vin, *w.up, e, threads);
  situ(vg, vu, p, threads);
  matmul(vy, vg, *w.down, e, threads);
  for (std::int64_t i = 0; i < n; ++i) {
    std::copy_n(vy.row(i), latent, out + group[static_cast<std::size_t>(i)].row * latent);
  }
}

}  // namespace

void route(View<std::int32_t> ids, View<float> weights, View<const float> logits, const float* bias,
           bool normalise, float scale) {
  const std::int64_t n = logits.cols, k = ids.cols;
  std::vector<float> p(static_cast<std::size_t>(n));
  std::vector<std::int32_t> order(static_cast<std::size_t>(n));
  for (std::int64_t t = 0; t < logits.rows; ++t) {
    for (std::int64_t e = 0; e < n; ++e) p[static_cast<std::size_t>(e)] = sigmoid(logits.row(t)[e]);
    std::iota(order.begin(), order.end(), 0);
    auto key = [&](std::int32_t e) { return p[static_cast<std::size_t>(e)] + bias[e]; };
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

void experts(View<float> m, View<const float> z, View<const std::int32_t> ids,
             View<const float> weights, const ExpertWeights& w, Situ p, int threads) {
  const std::int64_t k = ids.cols, latent = m.cols;
  for (std::int64_t t = 0; t < m.rows; ++t) std::fill_n(m.row(t), latent, 0.0f);
  if (w.gate->empty()) return;
  std::vector<float> out;
  for (std::int64_t t0 = 0; t0 < m.rows; t0 += kTokenBlock) {
    const std::int64_t t1 = std::min(t0 + kTokenBlock, m.rows);
    const auto found = choices_here(ids, t0, t1, w.expert_begin, w.gate->n_mat);
    out.assign(static_cast<std::size_t>((t1 - t0) * k * latent), 0.0f);
    for (std::size_t i = 0; i < found.size();) {
      std::size_t j = i;
      while (j < found.size() && found[j].expert == found[i].expert) ++j;
      run_expert(out.data(), latent, z, std::span(found).subspan(i, j - i), w, p, threads);
      i = j;
    }
    // Added in the order of choice, whatever order the experts ran in: grouping must not change the sum.
    for (std::int64_t t = t0; t < t1; ++t) {
      for (std::int64_t j = 0; j < k; ++j) {
        const std::int64_t e = ids.row(t)[j] - w.expert_begin;
        if (e < 0 || e >= w.gate->n_mat) continue;
        const float* y = out.data() + ((t - t0) * k + j) * latent;
        for (std::int64_t i = 0; i < latent; ++i) m.row(t)[i] += weights.row(t)[j] * y[i];
      }
    }
  }
}

void situ(View<float> g, View<const float> u, Situ p, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (std::int64_t t = 0; t < g.rows; ++t) {
    for (std::int64_t i = 0; i < g.cols; ++i) g.row(t)[i] = situ_value(g.row(t)[i], u.row(t)[i], p);
  }
}

}  // namespace k3::cpu
