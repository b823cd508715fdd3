// Each op of the backend against the formula written out in double.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "kernels/cpu/dequant.h"
#include "support/backends.h"
#include "support/random_blocks.h"

namespace k3 {
namespace {

using test::random_blocks;
using test::random_values;

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

void check_close(const std::vector<float>& got, const std::vector<double>& want, double tolerance) {
  REQUIRE(got.size() == want.size());
  double worst = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double d = std::abs(got[i] - want[i]);
    if (!(d <= worst)) worst = d;
  }
  CHECK(worst <= tolerance);
}

// Tokens of one step in device memory: (slot, first position, count) for each segment.
struct Batch {
  struct Segment {
    std::int32_t slot, pos, n;
  };
  Batch(Backend& b, const std::vector<Segment>& segments, std::vector<std::int32_t> ids = {})
      : ids_(b, 1, std::max<std::int64_t>(1, total(segments))),
        pos_(b, 1, std::max<std::int64_t>(1, total(segments))),
        slot_(b, 1, std::max<std::int64_t>(1, total(segments))),
        begin_(b, 1, static_cast<std::int64_t>(segments.size()) + 1) {
    std::vector<std::int32_t> pos, slot, begin{0};
    for (const Segment& s : segments) {
      for (std::int32_t i = 0; i < s.n; ++i) {
        pos.push_back(s.pos + i);
        slot.push_back(s.slot);
      }
      begin.push_back(static_cast<std::int32_t>(pos.size()));
    }
    ids.resize(pos.size());
    ids_.set(ids);
    pos_.set(pos);
    slot_.set(slot);
    begin_.set(begin);
    view = {static_cast<std::int64_t>(pos.size()),
            static_cast<std::int64_t>(segments.size()),
            ids_.data(),
            pos_.data(),
            slot_.data(),
            begin_.data()};
  }
  static std::int64_t total(const std::vector<Segment>& segments) {
    std::int64_t n = 0;
    for (const Segment& s : segments) n += s.n;
    return n;
  }
  BatchView view;

 private:
  Matrix<std::int32_t> ids_, pos_, slot_, begin_;
};

HostBox whole(BlockType type, std::array<std::int64_t, 3> dims, const std::byte* base) {
  return {type, dims, {0, 0, 0}, dims, base};
}

constexpr BlockType kAllTypes[] = {
    BlockType::kF32,     BlockType::kF16,     BlockType::kBF16,   BlockType::kQ4_0,
    BlockType::kQ4_1,    BlockType::kQ5_0,    BlockType::kQ5_1,   BlockType::kQ8_0,
    BlockType::kQ2_K,    BlockType::kQ3_K,    BlockType::kQ4_K,   BlockType::kQ5_K,
    BlockType::kQ6_K,    BlockType::kIQ2_XXS, BlockType::kIQ2_XS, BlockType::kIQ2_S,
    BlockType::kIQ3_XXS, BlockType::kIQ3_S,   BlockType::kIQ1_S,  BlockType::kIQ1_M,
    BlockType::kIQ4_NL,  BlockType::kIQ4_XS,  BlockType::kMXFP4,  BlockType::kTQ1_0,
    BlockType::kTQ2_0};

}  // namespace

TEST_CASE(
    "matmul multiplies by the decoded weight of every type, whole and for any band of rows and "
    "columns") {
  for_each_backend([](Backend& b) {
    for (const BlockType type : kAllTypes) {
      CAPTURE(traits(type).name);
      const std::int64_t n_in = 512, n_out = 7, n_tok = 3;
      const std::vector<std::byte> stored = random_blocks(type, n_in * n_out, 11);
      std::vector<float> w(static_cast<std::size_t>(n_in * n_out));
      dequantize(type, stored.data(), w.data(), n_in * n_out);
      for (const auto& [c0, c1, r0, r1] : {std::array<std::int64_t, 4>{0, 512, 0, 7},
                                           {0, 512, 2, 5},
                                           {32, 448, 0, 7},
                                           {256, 512, 1, 2},
                                           {16, 48, 6, 7}}) {
        HostBox box = whole(type, {n_in, n_out, 1}, stored.data());
        box.begin = {c0, r0, 0};
        box.end = {c1, r1, 1};
        std::vector<std::unique_ptr<DeviceBuffer>> storage;
        const Weight weight = b.load(box, storage);
        const std::vector<float> x = random_values(static_cast<std::size_t>(n_tok * (c1 - c0)), 5);
        Matrix<float> dx(b, n_tok, c1 - c0, x), dy(b, n_tok, r1 - r0);
        const MatmulJob job{dy, dx, &weight};
        b.matmul({&job, 1});
        std::vector<double> want;
        double scale = 0;
        for (std::int64_t t = 0; t < n_tok; ++t) {
          for (std::int64_t r = r0; r < r1; ++r) {
            double sum = 0;
            for (std::int64_t i = c0; i < c1; ++i) {
              const double p =
                  static_cast<double>(x[static_cast<std::size_t>(t * (c1 - c0) + i - c0)]) *
                  w[static_cast<std::size_t>(r * n_in + i)];
              sum += p;
              scale = std::max(scale, std::abs(p));
            }
            want.push_back(sum);
          }
        }
        check_close(dy.get(), want, 1e-5 * scale * std::sqrt(512.0));
      }
    }
  });
}

TEST_CASE("matmul refuses shapes that do not fit, naming both") {
  for_each_backend([](Backend& b) {
    const std::vector<float> stored(32, 1.0f);
    std::vector<std::unique_ptr<DeviceBuffer>> storage;
    const Weight w =
        b.load(whole(BlockType::kF32, {8, 4, 1}, reinterpret_cast<const std::byte*>(stored.data())),
               storage);
    Matrix<float> x(b, 2, 7), y(b, 2, 4);
    const MatmulJob job{y, x, &w};
    CHECK_THROWS_WITH_AS(b.matmul({&job, 1}), doctest::Contains("[2, 7]"), std::invalid_argument);
  });
}

TEST_CASE("an empty column band leaves zeros to be summed, an empty row band nothing") {
  for_each_backend([](Backend& b) {
    Weight none;
    none.n_out = 4;
    Matrix<float> x(b, 2, 0), y(b, 2, 4, std::vector<float>(8, 5.0f));
    const MatmulJob job{y, x, &none};
    b.matmul({&job, 1});
    CHECK(y.get() == std::vector<float>(8, 0.0f));
  });
}

TEST_CASE("embed gives rows of its vocabulary band and zeros elsewhere") {
  for_each_backend([](Backend& b) {
    const std::vector<float> stored = random_values(4 * 8, 1);
    HostBox box =
        whole(BlockType::kF32, {8, 4, 1}, reinterpret_cast<const std::byte*>(stored.data()));
    box.begin[1] = 1;
    box.end[1] = 3;  // ids 1 and 2 of 4
    std::vector<std::unique_ptr<DeviceBuffer>> storage;
    const Weight table = b.load(box, storage);
    const Batch batch(b, {{0, 0, 4}}, {2, 0, 1, 3});
    Matrix<float> y(b, 4, 8, std::vector<float>(32, 9.0f));
    b.embed(y, batch.view, table, 1);
    std::vector<float> want(32, 0.0f);
    std::copy_n(stored.begin() + 16, 8, want.begin());
    std::copy_n(stored.begin() + 8, 8, want.begin() + 16);
    CHECK(y.get() == want);
  });
}

TEST_CASE("mix_norm scores normalised sources, sums raw ones, then norms") {
  for_each_backend([](Backend& b) {
    const std::int64_t n_tok = 3, d = 40, n_bank = 4;
    const float eps = 1e-5f;
    const auto x = random_values(static_cast<std::size_t>(n_tok * d), 1, -2, 2);
    const auto bank = random_values(static_cast<std::size_t>(n_bank * n_tok * d), 2, -3, 3);
    const auto score = random_values(static_cast<std::size_t>(d), 3),
               norm = random_values(static_cast<std::size_t>(d), 4);
    Matrix<float> dx(b, n_tok, d, x), dbank(b, n_bank * n_tok, d, bank), ds(b, 1, d, score),
        dn(b, 1, d, norm), y(b, n_tok, d), probs(b, n_tok, n_bank + 1);
    for (const std::int64_t n : {std::int64_t{0}, std::int64_t{1}, n_bank}) {
      b.mix_norm(y, dx, dbank.data(), n, n_tok * d, ds.data(), dn.data(), eps, nullptr);
      std::vector<double> want;
      for (std::int64_t t = 0; t < n_tok; ++t) {
        std::vector<const float*> sources;
        for (std::int64_t s = 0; s < n; ++s)
          sources.push_back(&bank[static_cast<std::size_t>((s * n_tok + t) * d)]);
        sources.push_back(&x[static_cast<std::size_t>(t * d)]);
        std::vector<double> p;
        for (const float* s : sources) {
          double dot = 0, square = 0;
          for (std::int64_t i = 0; i < d; ++i) {
            dot += static_cast<double>(score[static_cast<std::size_t>(i)]) * s[i];
            square += static_cast<double>(s[i]) * s[i];
          }
          p.push_back(std::exp(dot / std::sqrt(square / d + eps)));
        }
        double sum = 0;
        for (const double v : p) sum += v;
        std::vector<double> h(static_cast<std::size_t>(d));
        double square = 0;
        for (std::int64_t i = 0; i < d; ++i) {
          for (std::size_t s = 0; s < sources.size(); ++s)
            h[static_cast<std::size_t>(i)] += p[s] / sum * sources[s][i];
          square += h[static_cast<std::size_t>(i)] * h[static_cast<std::size_t>(i)];
        }
        for (std::int64_t i = 0; i < d; ++i) {
          want.push_back(h[static_cast<std::size_t>(i)] / std::sqrt(square / d + eps) *
                         norm[static_cast<std::size_t>(i)]);
        }
      }
      check_close(y.get(), want, 2e-6);
    }
  });
}

namespace {

// KDA of one sequence over one op chain, in pieces of the given sizes; returns [n_tok, d] outputs.
std::vector<float> kda_in_pieces(Backend& b, const std::vector<std::int32_t>& pieces,
                                 std::int64_t heads, std::int64_t n, std::int64_t taps,
                                 std::int32_t slot, unsigned seed, bool dirty) {
  const std::int64_t d = heads * n, n_tok = Batch::total({{0, 0, 40}});
  const auto u = random_values(static_cast<std::size_t>(n_tok * 3 * d), seed, -2, 2);
  const auto g = random_values(static_cast<std::size_t>(n_tok * d), seed + 1, -5, 0);
  const auto beta = random_values(static_cast<std::size_t>(n_tok * heads), seed + 2, 0, 1);
  Matrix<float> conv(b, 3 * d, taps,
                     random_values(static_cast<std::size_t>(3 * d * taps), seed + 3));
  const std::size_t s_elems = static_cast<std::size_t>(2 * heads * n * n),
                    w_elems = static_cast<std::size_t>(2 * (taps - 1) * 3 * d);
  Matrix<float> s(b, 1, static_cast<std::int64_t>(s_elems),
                  dirty ? random_values(s_elems, 77) : std::vector<float>(s_elems));
  Matrix<float> window(b, 1, static_cast<std::int64_t>(w_elems),
                       dirty ? random_values(w_elems, 78) : std::vector<float>(w_elems));
  const KdaState state{s.data(), window.data(), heads, n, taps};
  std::vector<float> out;
  std::int32_t at = 0;
  for (const std::int32_t piece : pieces) {
    auto rows = [&](const std::vector<float>& v, std::int64_t width) {
      return std::vector<float>(v.begin() + at * width, v.begin() + (at + piece) * width);
    };
    const Batch batch(b, {{slot, at, piece}});
    Matrix<float> du(b, piece, 3 * d, rows(u, 3 * d)), qkv(b, piece, 3 * d),
        dg(b, piece, d, rows(g, d)), dbeta(b, piece, heads, rows(beta, heads)), o(b, piece, d);
    b.kda_conv(qkv, du, conv.data(), state, batch.view);
    const View<float> q = qkv.view().columns(0, d), k = qkv.view().columns(d, d),
                      v = qkv.view().columns(2 * d, d);
    b.l2_norm_heads(q, n, 1e-5f);
    b.l2_norm_heads(k, n, 1e-5f);
    b.kda_scan(o, q, k, v, dg, dbeta, state, batch.view);
    const std::vector<float> part = o.get();
    out.insert(out.end(), part.begin(), part.end());
    at += piece;
  }
  return out;
}

// The same in double, straight from the formulas.
std::vector<double> kda_in_double(std::int64_t heads, std::int64_t n, std::int64_t taps,
                                  unsigned seed, std::int64_t n_tok) {
  const std::int64_t d = heads * n;
  const auto u = random_values(static_cast<std::size_t>(40 * 3 * d), seed, -2, 2);
  const auto g = random_values(static_cast<std::size_t>(40 * d), seed + 1, -5, 0);
  const auto beta = random_values(static_cast<std::size_t>(40 * heads), seed + 2, 0, 1);
  const auto conv = random_values(static_cast<std::size_t>(3 * d * taps), seed + 3);
  std::vector<double> s(static_cast<std::size_t>(heads * n * n)), out;
  for (std::int64_t t = 0; t < n_tok; ++t) {
    std::vector<double> z(static_cast<std::size_t>(3 * d));
    for (std::int64_t c = 0; c < 3 * d; ++c) {
      double sum = 0;
      for (std::int64_t j = 0; j < taps; ++j) {
        const std::int64_t from = t - taps + 1 + j;
        if (from >= 0)
          sum += static_cast<double>(conv[static_cast<std::size_t>(c * taps + j)]) *
                 u[static_cast<std::size_t>(from * 3 * d + c)];
      }
      z[static_cast<std::size_t>(c)] = sum * sigmoid(sum);
    }
    for (std::int64_t h = 0; h < heads; ++h) {
      auto unit = [&](std::int64_t at) {
        std::vector<double> v(z.begin() + at, z.begin() + at + n);
        double square = 0;
        for (const double x : v) square += x * x;
        for (double& x : v) x /= std::max(std::sqrt(square), 1e-5);
        return v;
      };
      const std::vector<double> q = unit(h * n), k = unit(d + h * n);
      double* sh = s.data() + h * n * n;
      for (std::int64_t i = 0; i < n; ++i) {
        for (std::int64_t j = 0; j < n; ++j)
          sh[i * n + j] *=
              std::exp(static_cast<double>(g[static_cast<std::size_t>(t * d + h * n + i)]));
      }
      for (std::int64_t j = 0; j < n; ++j) {
        double pred = 0;
        for (std::int64_t i = 0; i < n; ++i) pred += sh[i * n + j] * k[static_cast<std::size_t>(i)];
        const double e = beta[static_cast<std::size_t>(t * heads + h)] *
                         (z[static_cast<std::size_t>(2 * d + h * n + j)] - pred);
        double o = 0;
        for (std::int64_t i = 0; i < n; ++i) {
          sh[i * n + j] += k[static_cast<std::size_t>(i)] * e;
          o += sh[i * n + j] * q[static_cast<std::size_t>(i)] / std::sqrt(static_cast<double>(n));
        }
        out.push_back(o);
      }
    }
  }
  return out;
}

}  // namespace

TEST_CASE(
    "KDA follows the delta rule, whatever lay in its slot, and pieces of any size give the same "
    "bits") {
  for_each_backend([](Backend& b) {
    for (const std::int64_t taps : {3, 4}) {
      const std::int64_t heads = 3, n = 16;
      const std::vector<float> once = kda_in_pieces(b, {40}, heads, n, taps, 1, 9, true);
      check_close(once, kda_in_double(heads, n, taps, 9, 40), 2e-5);
      CHECK(kda_in_pieces(b, {1, 1, 2, 1, 7, 28}, heads, n, taps, 1, 9, true) == once);
      CHECK(kda_in_pieces(b, std::vector<std::int32_t>(40, 1), heads, n, taps, 0, 9, false) ==
            once);
    }
  });
}

TEST_CASE("two sequences in one step do not see each other") {
  for_each_backend([](Backend& b) {
    const std::int64_t heads = 2, n = 8, d = heads * n, taps = 4;
    const auto u = random_values(static_cast<std::size_t>(5 * 3 * d), 21);
    Matrix<float> conv(b, 3 * d, taps, random_values(static_cast<std::size_t>(3 * d * taps), 22));
    auto run = [&](const std::vector<Batch::Segment>& segments, std::int64_t from,
                   std::int64_t count) {
      Matrix<float> window(b, 4, (taps - 1) * 3 * d), s(b, 4, heads * n * n);
      const KdaState state{s.data(), window.data(), heads, n, taps};
      Matrix<float> du(b, count, 3 * d,
                       {u.begin() + from * 3 * d, u.begin() + (from + count) * 3 * d}),
          qkv(b, count, 3 * d);
      const Batch batch(b, segments);
      b.kda_conv(qkv, du, conv.data(), state, batch.view);
      return qkv.get();
    };
    std::vector<float> apart = run({{3, 0, 2}}, 0, 2);
    const std::vector<float> second = run({{1, 0, 3}}, 2, 3);
    apart.insert(apart.end(), second.begin(), second.end());
    CHECK(run({{3, 0, 2}, {1, 0, 3}}, 0, 5) == apart);
  });
}

TEST_CASE("kda_gates: the bounded sigmoid, and softplus where the bound is absent") {
  for_each_backend([](Backend& b) {
    const auto f = random_values(2 * 8, 1, -30, 30), dt = random_values(8, 2),
               be = random_values(2 * 2, 3, -4, 4);
    const std::vector<float> a{-0.5f, -2.0f};
    Matrix<float> ddt(b, 1, 8, dt), da(b, 1, 2, a);
    for (const bool safe : {true, false}) {
      Matrix<float> g(b, 2, 8, f), beta(b, 2, 2, be);
      b.kda_gates(g, beta, ddt.data(), da.data(), 4, safe, -5.0f);
      std::vector<double> want, want_beta;
      for (std::size_t i = 0; i < 16; ++i) {
        const double x = static_cast<double>(f[i]) + dt[i % 8], rate = -a[i % 8 / 4];
        want.push_back(safe ? -5.0 * sigmoid(rate * x)
                            : -rate *
                                  (x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x))));
      }
      for (const float v : be) want_beta.push_back(sigmoid(v));
      check_close(g.get(), want, 2e-5);
      check_close(beta.get(), want_beta, 1e-6);
    }
  });
}

TEST_CASE("MLA attends to its own slot's rows up to its position, at every cache type") {
  for_each_backend([](Backend& b) {
    const std::int64_t heads = 3, latent = 16, rope = 4, width = latent + rope, n_ctx = 12;
    for (const auto& [type, tolerance] :
         {std::pair{CacheType::kF32, 1e-5}, {CacheType::kF16, 3e-3}, {CacheType::kBF16, 3e-2}}) {
      Matrix<float> rows(b, 2 * n_ctx, width);  // room for the widest type
      const MlaCache cache{reinterpret_cast<std::byte*>(rows.data()), type, n_ctx, latent, rope};
      const auto c = random_values(static_cast<std::size_t>(9 * width), 4, -2, 2),
                 w = random_values(static_cast<std::size_t>(latent), 5);
      const auto q = random_values(static_cast<std::size_t>(9 * heads * width), 6);
      Matrix<float> dw(b, 1, latent, w), dq(b, 9, heads * width, q), ctx(b, 9, heads * latent),
          dc(b, 9, width, c);
      const std::vector<Batch::Segment> segments{{1, 0, 6}, {0, 0, 3}};
      const Batch batch(b, segments);
      b.mla_append(dc, dw.data(), 1e-5f, cache, batch.view);
      b.mla_attend(ctx, dq, heads, 0.3f, cache, batch.view);
      std::vector<double> want;
      std::int64_t first = 0;
      for (const Batch::Segment& seg : segments) {
        for (std::int64_t t = first; t < first + seg.n; ++t) {
          for (std::int64_t h = 0; h < heads; ++h) {
            std::vector<std::vector<double>> keys;
            std::vector<double> p;
            double sum = 0;
            for (std::int64_t s = first; s <= t; ++s) {
              std::vector<double> key(c.begin() + s * width, c.begin() + (s + 1) * width);
              double square = 0;
              for (std::int64_t i = 0; i < latent; ++i)
                square += key[static_cast<std::size_t>(i)] * key[static_cast<std::size_t>(i)];
              for (std::int64_t i = 0; i < latent; ++i)
                key[static_cast<std::size_t>(i)] *=
                    w[static_cast<std::size_t>(i)] / std::sqrt(square / latent + 1e-5);
              double score = 0;
              for (std::int64_t i = 0; i < width; ++i)
                score += key[static_cast<std::size_t>(i)] *
                         q[static_cast<std::size_t>((t * heads + h) * width + i)];
              p.push_back(std::exp(score * 0.3));
              sum += p.back();
              keys.push_back(key);
            }
            for (std::int64_t i = 0; i < latent; ++i) {
              double v = 0;
              for (std::size_t s = 0; s < p.size(); ++s)
                v += p[s] / sum * keys[s][static_cast<std::size_t>(i)];
              want.push_back(v);
            }
          }
        }
        first += seg.n;
      }
      check_close(ctx.get(), want, tolerance);
    }
  });
}

TEST_CASE("mla_absorb maps nope through k_b per head and passes the rope part on") {
  for_each_backend([](Backend& b) {
    const std::int64_t heads = 2, nope = 4, rope = 2, latent = 6;
    const auto stored = random_values(static_cast<std::size_t>(nope * latent * heads), 8),
               q = random_values(static_cast<std::size_t>(3 * heads * (nope + rope)), 9);
    std::vector<std::unique_ptr<DeviceBuffer>> storage;
    const Weight k_b = b.load(whole(BlockType::kF32, {nope, latent, heads},
                                    reinterpret_cast<const std::byte*>(stored.data())),
                              storage);
    Matrix<float> dq(b, 3, heads * (nope + rope), q), out(b, 3, heads * (latent + rope));
    b.mla_absorb(out, dq, k_b, rope);
    std::vector<double> want;
    for (std::int64_t t = 0; t < 3; ++t) {
      for (std::int64_t h = 0; h < heads; ++h) {
        const float* qh = &q[static_cast<std::size_t>((t * heads + h) * (nope + rope))];
        for (std::int64_t l = 0; l < latent; ++l) {
          double sum = 0;
          for (std::int64_t i = 0; i < nope; ++i)
            sum +=
                static_cast<double>(stored[static_cast<std::size_t>((h * latent + l) * nope + i)]) *
                qh[i];
          want.push_back(sum);
        }
        for (std::int64_t i = 0; i < rope; ++i) want.push_back(qh[nope + i]);
      }
    }
    check_close(out.get(), want, 1e-6);
  });
}

TEST_CASE(
    "route: the bias chooses and only chooses, ties go to the lower index, weights are normalised "
    "with a floor") {
  for_each_backend([](Backend& b) {
    const std::vector<float> logits{0, 2, 1, 1, -3, 0, 0, 0, 0, 0, -40, -40, -40, -40, -40};
    Matrix<float> dl(b, 3, 5, logits), bias(b, 1, 5, {0, -0.5f, 0, 0, 0.6f}), w(b, 3, 3);
    Matrix<std::int32_t> ids(b, 3, 3);
    b.route(ids, w, dl, bias.data(), 0, true, 2.0f);
    // Row 0: biased 0.5, 0.381, 0.731, 0.731, 0.647: 2 before 3 (tie), then 4.
    CHECK(ids.get() == std::vector<std::int32_t>{2, 3, 4, 4, 0, 2, 4, 0, 2});
    const double p1 = sigmoid(1), p3 = sigmoid(-3), sum = 2 * p1 + p3,
                 tiny = sigmoid(-40) / 6.103515625e-5;
    check_close(w.get(),
                {2 * p1 / sum, 2 * p1 / sum, 2 * p3 / sum, 2. / 3, 2. / 3, 2. / 3, 2 * tiny,
                 2 * tiny, 2 * tiny},
                1e-6);
    b.route(ids, w, dl, bias.data(), 0, false, 0.0f);  // a scale of 0 means none
    check_close(w.get(), {p1, p1, p3, .5, .5, .5, 0, 0, 0}, 1e-6);
    // A bias of each token's own: held to 0, 1, 2; to 4, 3, 0; and left to itself.
    Matrix<float> rows(b, 3, 5, {6, 4, 2, -4, -4, 2, -4, -4, 4, 6, 0, 0, 0, 0, 0});
    b.route(ids, w, dl, rows.data(), 5, false, 0.0f);
    CHECK(ids.get() == std::vector<std::int32_t>{0, 1, 2, 4, 3, 0, 0, 1, 2});
    check_close(w.get(), {sigmoid(0), sigmoid(2), p1, .5, .5, .5, 0, 0, 0}, 1e-6);
  });
}

TEST_CASE(
    "experts: the weighted sum of chosen experts; bands of experts and of ffn add up to the "
    "whole") {
  for_each_backend([](Backend& b) {
    const std::int64_t latent = 8, ffn = 12, n_expert = 6, n_tok = 70, k = 2;
    const auto gate = random_values(static_cast<std::size_t>(latent * ffn * n_expert), 1),
               up = random_values(gate.size(), 2), down = random_values(gate.size(), 3);
    const auto z = random_values(static_cast<std::size_t>(n_tok * latent), 4),
               weights = random_values(static_cast<std::size_t>(n_tok * k), 5);
    std::vector<std::int32_t> ids;
    for (std::int64_t t = 0; t < n_tok; ++t) {
      ids.push_back(static_cast<std::int32_t>(t * 5 % n_expert));
      ids.push_back(static_cast<std::int32_t>((t * 5 + 1 + t % 4) % n_expert));
    }
    const Situ situ{4, 25};
    Matrix<float> dz(b, n_tok, latent, z), dw(b, n_tok, k, weights), m(b, n_tok, latent);
    Matrix<std::int32_t> dids(b, n_tok, k, ids);
    std::vector<double> want(static_cast<std::size_t>(n_tok * latent));
    auto at = [](const std::vector<float>& w, std::int64_t rows, std::int64_t cols, std::int64_t e,
                 std::int64_t r, std::int64_t c) {
      return static_cast<double>(w[static_cast<std::size_t>((e * rows + r) * cols + c)]);
    };
    for (std::int64_t i = 0; i < n_tok * k; ++i) {
      const std::int64_t t = i / k, e = ids[static_cast<std::size_t>(i)];
      for (std::int64_t f = 0; f < ffn; ++f) {
        double g = 0, u = 0;
        for (std::int64_t c = 0; c < latent; ++c) {
          g += at(gate, ffn, latent, e, f, c) * z[static_cast<std::size_t>(t * latent + c)];
          u += at(up, ffn, latent, e, f, c) * z[static_cast<std::size_t>(t * latent + c)];
        }
        const double h = 4 * std::tanh(g / 4) * sigmoid(g) * 25 * std::tanh(u / 25) *
                         weights[static_cast<std::size_t>(i)];
        for (std::int64_t c = 0; c < latent; ++c)
          want[static_cast<std::size_t>(t * latent + c)] += at(down, latent, ffn, e, c, f) * h;
      }
    }
    auto partial = [&](std::int64_t e0, std::int64_t e1, std::int64_t f0, std::int64_t f1) {
      std::vector<std::unique_ptr<DeviceBuffer>> storage;
      auto load = [&](const std::vector<float>& w, bool is_down) {
        HostBox box =
            whole(BlockType::kF32,
                  is_down ? std::array{ffn, latent, n_expert} : std::array{latent, ffn, n_expert},
                  reinterpret_cast<const std::byte*>(w.data()));
        box.begin[2] = e0;
        box.end[2] = e1;
        box.begin[is_down ? 0 : 1] = f0;
        box.end[is_down ? 0 : 1] = f1;
        return b.load(box, storage);
      };
      const Weight wg = load(gate, false), wu = load(up, false), wd = load(down, true);
      b.experts(m, dz, dids, dw, {&wg, &wu, &wd, e0}, situ);
      return m.get();
    };
    check_close(partial(0, n_expert, 0, ffn), want, 1e-5);
    std::vector<float> sum(want.size());
    for (const auto& [e0, e1, f0, f1] :
         {std::array<std::int64_t, 4>{0, 2, 0, ffn}, {2, 6, 0, 5}, {2, 6, 5, ffn}}) {
      const std::vector<float> part = partial(e0, e1, f0, f1);
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
    }
    check_close(sum, want, 1e-5);
    CHECK(partial(3, 3, 0, ffn) == std::vector<float>(want.size(), 0.0f));
  });
}

TEST_CASE("situ with lambda at or below zero takes the up value as it is") {
  for_each_backend([](Backend& b) {
    const std::vector<float> g{1, -2, 90}, u{30, 2, -100};
    for (const float lambda : {25.0f, 0.0f}) {
      Matrix<float> dg(b, 1, 3, g), du(b, 1, 3, u);
      b.situ(dg, du, {4, lambda});
      std::vector<double> want;
      for (std::size_t i = 0; i < 3; ++i) {
        want.push_back(4 * std::tanh(g[i] / 4.0) * sigmoid(g[i]) *
                       (lambda > 0 ? 25 * std::tanh(u[i] / 25.0) : u[i]));
      }
      check_close(dg.get(), want, 4e-5);
    }
  });
}

TEST_CASE("unpack_bands puts gathered bands of unequal and empty widths together") {
  for_each_backend([](Backend& b) {
    // Rank 0: a0 a1 b0, rank 1: b1 b2, rank 2: a2.
    Matrix<float> all(b, 2, 6, {0, 1, 10, 11, 12, 2, 100, 101, 110, 111, 112, 102}), x(b, 2, 3),
        y(b, 2, 3);
    const std::int64_t a_widths[] = {2, 0, 1}, b_widths[] = {1, 2, 0};
    b.unpack_bands(x, y, all, a_widths, b_widths);
    CHECK(x.get() == std::vector<float>{0, 1, 2, 100, 101, 102});
    CHECK(y.get() == std::vector<float>{10, 11, 12, 110, 111, 112});
  });
}

TEST_CASE("note_nonfinite keeps, for each row, the lowest layer that had a NaN or an infinity") {
  for_each_backend([](Backend& b) {
    Matrix<std::int32_t> first(b, 1, 2, {1000, 1000});
    using Layers = std::vector<std::int32_t>;
    Matrix<float> x(b, 2, 3, {0, 1, 2, 3, 4, 5});
    b.note_nonfinite(x, 3, first.data());
    CHECK(first.get() == Layers{1000, 1000});
    x.set({0, 1, 2, 3, std::numeric_limits<float>::infinity(), 5});
    b.note_nonfinite(x, 7, first.data());
    CHECK(first.get() == Layers{1000, 7});
    x.set({std::numeric_limits<float>::quiet_NaN(), 1, 2, 3,
           -std::numeric_limits<float>::infinity(), 5});
    b.note_nonfinite(x, 8, first.data());
    CHECK(first.get() == Layers{8, 7});
  });
}

TEST_CASE("a replayed step reads the values that device memory holds now") {
  for_each_backend([](Backend& b) {
    const std::vector<float> stored = random_values(4 * 8, 1);
    std::vector<std::unique_ptr<DeviceBuffer>> storage;
    const Weight table =
        b.load(whole(BlockType::kF32, {8, 4, 1}, reinterpret_cast<const std::byte*>(stored.data())),
               storage);
    Matrix<std::int32_t> ids(b, 1, 2, {0, 1});
    BatchView batch;
    batch.n_tok = 2;
    batch.ids = ids.data();
    Matrix<float> y(b, 2, 8);
    const auto replay = b.capture([&] { b.embed(y, batch, table, 0); });
    ids.set({3, 2});
    replay->run();
    std::vector<float> want(stored.begin() + 24, stored.end());
    want.insert(want.end(), stored.begin() + 16, stored.begin() + 24);
    CHECK(y.get() == want);
  });
}

}  // namespace k3
