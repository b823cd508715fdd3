// The decode step's fused kernels against the ops they stand for, on the exact path of the same device.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "support/backends.h"

namespace k3 {
namespace {

std::vector<float> random_values(std::int64_t n, unsigned seed, float low = -1, float high = 1) {
  std::mt19937 rng(seed);
  std::uniform_real_distribution<float> u(low, high);
  std::vector<float> v(static_cast<std::size_t>(n));
  for (float& x : v) x = u(rng);
  return v;
}

// Valid blocks of random content: Q8_0 and IQ1_S with scales of 2^-7 to 2^-6, F32 in -0.1 to 0.1.
std::vector<std::byte> random_weights(BlockType type, std::int64_t n, unsigned seed) {
  std::mt19937 rng(seed);
  std::vector<std::byte> bytes(block_bytes(type, static_cast<std::uint64_t>(n)));
  if (type == BlockType::kF32) {
    const auto v = random_values(n, seed, -0.1f, 0.1f);
    std::memcpy(bytes.data(), v.data(), bytes.size());
    return bytes;
  }
  for (std::byte& b : bytes) b = static_cast<std::byte>(rng());
  const auto step = static_cast<std::size_t>(traits(type).bytes);
  for (std::size_t at = 0; at < bytes.size(); at += step) {
    const auto d = static_cast<std::uint16_t>(0x2000 | (rng() & 0x3ff));
    std::memcpy(&bytes[at], &d, 2);
  }
  return bytes;
}

// A weight on both backends.
struct TwinWeight {
  TwinWeight(Backend& exact, Backend& fast, BlockType type, std::int64_t n_in, std::int64_t n_out,
             unsigned seed, std::int64_t n_mat = 1, std::int64_t first = 0)
      : bytes(random_weights(type, (first + n_in) * n_out * n_mat, seed)) {
    const std::array<std::int64_t, 3> dims{first + n_in, n_out, n_mat};
    const HostBox box{type, dims, {first, 0, 0}, dims, bytes.data()};
    on_exact = exact.load(box, storage);
    on_fast = fast.load(box, storage);
  }
  std::vector<std::byte> bytes;
  std::vector<std::unique_ptr<DeviceBuffer>> storage;
  Weight on_exact, on_fast;
};

struct Backends {
  std::unique_ptr<Backend> exact = make_cuda_backend(0, Precision::kExact);
  std::unique_ptr<Backend> fast = make_cuda_backend(0, Precision::kFast);
};

// Largest difference over the largest value.
double difference(const std::vector<float>& got, const std::vector<float>& want) {
  REQUIRE(got.size() == want.size());
  double worst = 0, largest = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double d = std::abs(static_cast<double>(got[i]) - want[i]);
    if (!(d <= worst)) worst = d;
    largest = std::max(largest, std::abs(static_cast<double>(want[i])));
  }
  return worst / largest;
}

// Activations are rounded to 15 bits, which leaves about 2^-15 / sqrt(n) of a sum; f32 sums add as much.
constexpr double kTolerance = 1e-4;
// situ multiplies two saturating functions: where sums are many times beta, it magnifies what they differ by.
constexpr double kSituTolerance = 1e-3;

TEST_CASE(
    "products of one vector with rows of several types, joined or not, are those of the ops") {
  Backends b;
  for (const auto& [n_in, n_out] : {std::pair<std::int64_t, std::int64_t>{32, 5},
                                    {384, 77},
                                    {7168, 700},
                                    {1536, 3000},
                                    {12288, 260}}) {
    CAPTURE(n_in);
    const TwinWeight q8(*b.exact, *b.fast, BlockType::kQ8_0, n_in, n_out, 1);
    const TwinWeight f32(*b.exact, *b.fast, BlockType::kF32, n_in, n_out / 2, 2);
    const TwinWeight up(*b.exact, *b.fast, BlockType::kQ8_0, n_in, n_out, 3);
    const auto x = random_values(n_in, 4, -2, 3);
    std::vector<std::vector<float>> got, want;
    const Situ situ{4, 25};
    for (Backend* backend : {b.exact.get(), b.fast.get()}) {
      const bool fast = backend == b.fast.get();
      auto at = [&](const TwinWeight& w) { return fast ? &w.on_fast : &w.on_exact; };
      Matrix<float> dx(*backend, 1, n_in, x), plain(*backend, 1, n_out),
          router(*backend, 1, n_out / 2), g(*backend, 1, n_out), u(*backend, 1, n_out);
      if (fast) {
        Operand o;
        o.x = dx;
        o.situ = situ;
        const FusedProduct products[] = {{plain, FusedProduct::Join::kOne, {at(q8), 0}, {}},
                                         {router, FusedProduct::Join::kOne, {at(f32), 0}, {}},
                                         {g, FusedProduct::Join::kSitu, {at(q8), 0}, {at(up), 0}}};
        REQUIRE(backend->fused_products({&o, 1}, products));
      } else {
        const MatmulJob jobs[] = {
            {plain, dx, at(q8)}, {router, dx, at(f32)}, {g, dx, at(q8)}, {u, dx, at(up)}};
        backend->matmul(jobs);
        backend->situ(g, u, situ);
      }
      (fast ? got : want) = {plain.get(), router.get(), g.get()};
    }
    for (std::size_t i = 0; i < got.size(); ++i) {
      CAPTURE(i);
      CHECK(difference(got[i], want[i]) < (i == 2 ? kSituTolerance : kTolerance));
    }
  }
}

TEST_CASE(
    "a product may read a normed vector, a gated one, and add two products of different widths") {
  Backends b;
  const std::int64_t n_a = 3584, n_b = 768, n_out = 1000, begin = 448, n = 896;
  const TwinWeight wa(*b.exact, *b.fast, BlockType::kQ8_0, n, n_out, 1);
  const TwinWeight wb(*b.exact, *b.fast, BlockType::kQ8_0, n_b, n_out, 2);
  const auto x = random_values(n_a, 3), norm = random_values(n_a, 4), y = random_values(n_b, 5),
             gate = random_values(n_b, 6);
  std::vector<float> got, want;
  for (Backend* backend : {b.exact.get(), b.fast.get()}) {
    const bool fast = backend == b.fast.get();
    Matrix<float> dx(*backend, 1, n_a, x), dn(*backend, 1, n_a, norm), dy(*backend, 1, n_b, y),
        dg(*backend, 1, n_b, gate), out(*backend, 1, n_out), other(*backend, 1, n_out);
    if (fast) {
      Operand o[2];
      o[0].op = Operand::Op::kRms;
      o[0].x = dx;
      o[0].norm_w = dn.data();
      o[0].eps = 1e-5f;
      o[0].begin = begin;
      o[0].n = n;
      o[1].op = Operand::Op::kSigmoidGate;
      o[1].x = dy;
      o[1].other = dg;
      const FusedProduct p{out, FusedProduct::Join::kAdd, {&wa.on_fast, 0}, {&wb.on_fast, 1}};
      REQUIRE(backend->fused_products(o, {&p, 1}));
    } else {
      backend->rms_norm(dx, dx, dn.data(), 1e-5f);
      backend->sigmoid_gate(dy, dg);
      const MatmulJob jobs[] = {{out, dx.view().columns(begin, n), &wa.on_exact},
                                {other, dy, &wb.on_exact}};
      backend->matmul(jobs);
      backend->residual(out, other, false);
    }
    (fast ? got : want) = out.get();
  }
  CHECK(difference(got, want) < kTolerance);
}

TEST_CASE("a NaN or an infinity among the activations is not rounded away") {
  Backends b;
  const TwinWeight w(*b.exact, *b.fast, BlockType::kQ8_0, 256, 40, 1);
  for (const float bad : {NAN, INFINITY}) {
    auto x = random_values(256, 2);
    x[77] = bad;
    Matrix<float> dx(*b.fast, 1, 256, x), y(*b.fast, 1, 40);
    const MatmulJob job{y, dx, &w.on_fast};
    b.fast->matmul({&job, 1});
    for (const float v : y.get()) CHECK(!std::isfinite(v));
  }
}

struct ExpertCase {
  std::int64_t n_expert, n_used, latent, ffn, first, held;
};

TEST_CASE("routing and experts in two launches choose and weigh as route and experts do") {
  Backends b;
  for (const ExpertCase& c : {ExpertCase{896, 16, 3584, 3072, 0, 24},
                              {64, 16, 512, 384, 0, 64},
                              {64, 4, 512, 384, 16, 32},
                              {8, 2, 256, 256, 0, 8}}) {
    CAPTURE(c.n_expert);
    CAPTURE(c.first);
    const TwinWeight gate(*b.exact, *b.fast, BlockType::kIQ1_S, c.latent, c.ffn, 1, c.held),
        up(*b.exact, *b.fast, BlockType::kIQ1_S, c.latent, c.ffn, 2, c.held),
        down(*b.exact, *b.fast, BlockType::kIQ1_S, c.ffn, c.latent, 3, c.held, c.ffn % 256);
    for (unsigned seed = 10; seed < 15; ++seed) {
      auto logits = random_values(c.n_expert, seed, -4, 4);
      const auto bias = random_values(c.n_expert, seed + 100, 0, 0.2f),
                 z = random_values(c.latent, seed + 200);
      if (seed == 11) std::fill(logits.begin(), logits.end(), 0.5f);  // ties by the bias alone
      if (seed == 12) {  // every choice among the held ones
        for (std::int64_t e = c.first; e < c.first + c.held; ++e)
          logits[static_cast<std::size_t>(e)] += 9;
      }
      std::vector<std::int32_t> got_ids, want_ids;
      std::vector<float> got_w, want_w, got, want;
      for (Backend* backend : {b.exact.get(), b.fast.get()}) {
        const bool fast = backend == b.fast.get();
        Matrix<float> dl(*backend, 1, c.n_expert, logits), db(*backend, 1, c.n_expert, bias),
            dz(*backend, 1, c.latent, z), w(*backend, 1, c.n_used), m(*backend, 1, c.latent);
        Matrix<std::int32_t> ids(*backend, 1, c.n_used);
        ExpertStep s;
        s.m = m;
        s.z = dz;
        s.logits = dl;
        s.ids = ids;
        s.weights = w;
        s.bias = db.data();
        s.normalise = true;
        s.scale = 1;
        s.w = fast ? ExpertWeights{&gate.on_fast, &up.on_fast, &down.on_fast, c.first}
                   : ExpertWeights{&gate.on_exact, &up.on_exact, &down.on_exact, c.first};
        s.situ = {4, 25};
        if (fast) {
          REQUIRE(backend->fused_experts(s));
        } else {
          backend->route(s.ids, s.weights, s.logits, s.bias, s.bias_stride, s.normalise, s.scale);
          backend->experts(s.m, s.z, s.ids, s.weights, s.w, s.situ);
        }
        (fast ? got_ids : want_ids) = ids.get();
        (fast ? got_w : want_w) = w.get();
        (fast ? got : want) = m.get();
      }
      CHECK(got_ids == want_ids);
      CHECK(got_w == want_w);
      double largest = 0;
      for (const float v : want) largest = std::max(largest, std::abs(static_cast<double>(v)));
      if (largest > 0) {
        CHECK(difference(got, want) < kSituTolerance);
      } else {
        CHECK(got == want);
      }
    }
  }
}

TEST_CASE("the KDA step of one token is conv, norms, gates, scan and output gate") {
  Backends b;
  for (const std::int64_t heads : {1, 12, 96}) {
    for (const std::int32_t pos : {0, 9}) {
      for (const bool safe : {true, false}) {
        const std::int64_t N = 128, d = heads * N, taps = 4;
        const TwinWeight f_b(*b.exact, *b.fast, BlockType::kQ8_0, N, d, 1);
        std::vector<std::vector<float>> got, want;
        for (Backend* backend : {b.exact.get(), b.fast.get()}) {
          const bool fast = backend == b.fast.get();
          Matrix<float> u(*backend, 1, 3 * d, random_values(3 * d, 2)),
              f(*backend, 1, N, random_values(N, 3)), gate(*backend, 1, d, random_values(d, 4)),
              beta(*backend, 1, heads, random_values(heads, 5)), o(*backend, 1, d),
              g(*backend, 1, d), qkv(*backend, 1, 3 * d);
          Matrix<float> conv(*backend, 3 * d, taps, random_values(3 * d * taps, 6)),
              dt(*backend, 1, d, random_values(d, 7)),
              a(*backend, 1, heads, random_values(heads, 8, -3, -0.5f)),
              norm(*backend, 1, N, random_values(N, 9));
          Matrix<float> s(*backend, 2 * heads * N, N, random_values(2 * heads * N * N, 10)),
              window(*backend, 2 * (taps - 1), 3 * d, random_values(2 * (taps - 1) * 3 * d, 11));
          Matrix<std::int32_t> batch(*backend, 1, 5, {0, pos, 1, 0, 1});
          const BatchView view{
              1, 1, batch.data(), batch.data() + 1, batch.data() + 2, batch.data() + 3};
          const KdaState state{s.data(), window.data(), heads, N, taps};
          if (fast) {
            KdaStep k;
            k.o = o;
            k.u = u;
            k.f = f;
            k.gate = gate;
            k.beta = beta;
            k.f_b = &f_b.on_fast;
            k.conv = conv.data();
            k.dt = dt.data();
            k.a = a.data();
            k.norm_w = norm.data();
            k.eps = 1e-5f;
            k.safe_gate = safe;
            k.lower_bound = -5;
            REQUIRE(backend->fused_kda(k, state, view));
          } else {
            const MatmulJob job{g, f, &f_b.on_exact};
            backend->matmul({&job, 1});
            backend->kda_conv(qkv, u, conv.data(), state, view);
            const View<float> q = qkv.view().columns(0, d), k = qkv.view().columns(d, d);
            backend->l2_norm_heads(q, N, 1e-5f);
            backend->l2_norm_heads(k, N, 1e-5f);
            backend->kda_gates(g, beta, dt.data(), a.data(), N, safe, -5);
            backend->kda_scan(o, q, k, qkv.view().columns(2 * d, d), g, beta, state, view);
            backend->kda_output_gate(o, gate, norm.data(), N, 1e-5f);
          }
          (fast ? got : want) = {o.get(), s.get(), window.get()};
        }
        for (std::size_t i = 0; i < got.size(); ++i) {
          CAPTURE(i);
          CHECK(difference(got[i], want[i]) < 1e-5);
        }
      }
    }
  }
}

TEST_CASE("residual, mix, norm and bank in one launch are those of the ops") {
  Backends b;
  for (const std::int64_t d : {64, 7168}) {
    for (std::int64_t n_bank = 0; n_bank <= 8; ++n_bank) {
      for (const int add : {0, 1, 2}) {  // none, added, restart
        std::vector<std::vector<float>> got, want;
        for (Backend* backend : {b.exact.get(), b.fast.get()}) {
          const bool fast = backend == b.fast.get();
          auto values = random_values(d, 2);
          if (n_bank == 3) values[5] = INFINITY;
          Matrix<float> x(*backend, 1, d, random_values(d, 1)), a(*backend, 1, d, values),
              y(*backend, 1, d), bank(*backend, 9, d, random_values(9 * d, 3)),
              score(*backend, 1, d, random_values(d, 4)), norm(*backend, 1, d, random_values(d, 5));
          Matrix<std::int32_t> first(*backend, 1, 1, {77});
          MixStep m;
          m.y = y;
          m.x = x;
          if (add > 0) m.add = a;
          m.restart = add == 2;
          m.layer = 5;
          m.first_nonfinite = first.data();
          m.bank = bank.data();
          m.n_bank = n_bank;
          m.bank_stride = d;
          m.push = bank.data() + 8 * d;
          m.score_w = score.data();
          m.norm_w = norm.data();
          m.eps = 1e-5f;
          if (fast) {
            REQUIRE(backend->fused_mix(m));
          } else {
            if (add > 0) {
              backend->residual(m.x, m.add, m.restart);
              backend->note_nonfinite(m.x, m.layer, m.first_nonfinite);
            }
            backend->mix_norm(m.y, m.x, m.bank, n_bank, d, m.score_w, m.norm_w, m.eps, nullptr);
            backend->copy_rows(View<float>(m.push, 1, d), m.x);
          }
          const std::int32_t noted = first.get()[0];
          CHECK(noted == (add > 0 && n_bank == 3 ? 5 : 77));
          (fast ? got : want) = {x.get(), bank.get()};
          if (n_bank != 3 || add == 0) (fast ? got : want).push_back(y.get());
        }
        for (std::size_t i = 0; i < got.size(); ++i) {
          CAPTURE(i);
          if (i < 2) {
            CHECK(got[i] == want[i]);
          } else {
            CHECK(difference(got[i], want[i]) < 1e-5);
          }
        }
      }
    }
  }
}

TEST_CASE("candidates found on the device are those that the host finds") {
  Backends b;
  const auto cpu = make_cpu_backend(1);
  for (const std::int64_t n : {1, 3, 700, 20480, 163840}) {
    auto logits = random_values(n, static_cast<unsigned>(n), -20, 20);
    if (n > 600) logits[500] = logits[3] = 21;  // a tie at the top
    for (const CandidateQuery& q : {CandidateQuery{2, 0, 0, 0, false},
                                    {2, 1.25f, 7, 3, false},
                                    {64, 0.8f, 7, 3, true},
                                    {40, 1.0f, 9, 1, true}}) {
      Matrix<float> on_cpu(*cpu, 1, n, logits), on_cuda(*b.fast, 1, n, logits);
      const CandidateResult want = cpu->candidates(on_cpu, 1000, q),
                            got = b.fast->candidates(on_cuda, 1000, q);
      REQUIRE(got.best.size() == want.best.size());
      for (std::size_t i = 0; i < got.best.size(); ++i) {
        CHECK(got.best[i].id == want.best[i].id);
        CHECK(got.best[i].logit == want.best[i].logit);
        CHECK(got.best[i].key == doctest::Approx(want.best[i].key).epsilon(1e-6));
      }
      CHECK(got.max_logit == want.max_logit);
      CHECK(got.sum_exp == doctest::Approx(want.sum_exp).epsilon(1e-12));
      CHECK(got.sum_exp_scaled == doctest::Approx(want.sum_exp_scaled).epsilon(1e-12));
    }
    logits[static_cast<std::size_t>(n / 2)] = NAN;
    Matrix<float> bad(*b.fast, 1, n, logits);
    const CandidateResult r = b.fast->candidates(bad, 0, {});
    REQUIRE(r.best.size() == 1);
    CHECK(r.best[0].id == -1);
  }
}

}  // namespace
}  // namespace k3
