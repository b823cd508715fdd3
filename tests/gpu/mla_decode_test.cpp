// Attention over the latent cache on tensor cores against its definition (kernels/cpu/mla.cpp), at K3's widths.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>

#include "kernels/half.h"
#include "support/backends.h"

namespace k3 {
namespace {

constexpr std::int64_t kLatent = 512, kRope = 64, kWidth = kLatent + kRope;
constexpr float kScale = 0.07216878f;  // 1 / sqrt(192)
const std::vector<std::int64_t> kDepths{1, 2, 63, 64, 65, 1000, 5000};

std::uint16_t bits(CacheType type, float v) {
  return type == CacheType::kF16 ? float_to_half(v) : float_to_bf16(v);
}

// Tokens of different slots, each at the end of its own rows; what lies beyond a slot's rows is NaN.
struct Case {
  CacheType type = CacheType::kF16;
  std::int64_t heads = 0, n_ctx = 0;
  std::vector<std::int64_t> depths;
  RowShard shard{};
  float q_size = 3;  // scores then spread by about 5
  float growth = 0;  // how much later rows resemble the queries
  std::vector<std::uint16_t> rows;
  std::vector<float> q;

  void fill(unsigned seed) {
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal;
    const auto n_slot = static_cast<std::int64_t>(depths.size());
    std::vector<float> along(kWidth);
    for (float& v : along) v = normal(rng);
    rows.assign(static_cast<std::size_t>(n_slot * n_ctx * kWidth),
                bits(type, std::numeric_limits<float>::quiet_NaN()));
    for (std::int64_t s = 0; s < n_slot; ++s) {
      for (std::int64_t r = 0; r < shard.rows(depths[static_cast<std::size_t>(s)]); ++r) {
        for (std::int64_t i = 0; i < kWidth; ++i) {
          const float v =
              normal(rng) + growth * static_cast<float>(r) * along[static_cast<std::size_t>(i)];
          rows[static_cast<std::size_t>((s * n_ctx + r) * kWidth + i)] = bits(type, v);
        }
      }
    }
    q.resize(static_cast<std::size_t>(n_slot * heads * kWidth));
    for (std::size_t i = 0; i < q.size(); ++i)
      q[i] = q_size * (growth > 0 ? along[i % kWidth] : normal(rng));
  }
};

// The case on one backend's memory. Token i attends in slot slots[i].
struct OnDevice {
  OnDevice(Backend& backend, const Case& c)
      : b(backend),
        n_tok(static_cast<std::int64_t>(c.depths.size())),
        heads(c.heads),
        rows(b, static_cast<std::int64_t>(c.rows.size()), 1, c.rows),
        q(b, n_tok, heads * kWidth, c.q),
        ctx(b, n_tok, heads * kLatent),
        part(b, n_tok, heads * (kLatent + 2)),
        pos(b, 1, n_tok),
        slot(b, 1, n_tok),
        cache{reinterpret_cast<std::byte*>(rows.data()), c.type, c.n_ctx, kLatent, kRope, c.shard} {
    std::vector<std::int32_t> p, s;
    for (std::int64_t i = 0; i < n_tok; ++i) {
      p.push_back(static_cast<std::int32_t>(c.depths[static_cast<std::size_t>(i)] - 1));
      s.push_back(static_cast<std::int32_t>(i));
    }
    pos.set(p);
    slot.set(s);
    batch.n_tok = n_tok;
    batch.pos = pos.data();
    batch.slot = slot.data();
  }
  void poison() {
    ctx.set(std::vector<float>(static_cast<std::size_t>(n_tok * heads * kLatent),
                               std::numeric_limits<float>::quiet_NaN()));
    part.set(std::vector<float>(static_cast<std::size_t>(n_tok * heads * (kLatent + 2)),
                                std::numeric_limits<float>::quiet_NaN()));
  }
  std::vector<float> attend() {
    poison();
    b.mla_attend(ctx, q, heads, kScale, cache, batch);
    return ctx.get();
  }
  // Token `i` alone.
  std::vector<float> attend_one(std::int64_t i) {
    poison();
    BatchView one;
    one.n_tok = 1;
    one.pos = pos.data() + i;
    one.slot = slot.data() + i;
    b.mla_attend(ctx.view().slice(i, 1), q.view().slice(i, 1), heads, kScale, cache, one);
    const std::vector<float> all = ctx.get();
    const auto at = all.begin() + static_cast<std::ptrdiff_t>(i * heads * kLatent);
    return {at, at + static_cast<std::ptrdiff_t>(heads * kLatent)};
  }
  std::vector<float> attend_part() {
    poison();
    b.mla_attend_part(part, q, heads, kScale, cache, batch);
    return part.get();
  }

  Backend& b;
  std::int64_t n_tok, heads;
  Matrix<std::uint16_t> rows;
  Matrix<float> q, ctx, part;
  Matrix<std::int32_t> pos, slot;
  MlaCache cache;
  BatchView batch;
};

double worst(const std::vector<float>& x, const std::vector<float>& y) {
  REQUIRE(x.size() == y.size());
  double w = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double d = std::abs(static_cast<double>(x[i]) - y[i]);
    if (!(d <= w)) w = d;  // NaN too
  }
  return w;
}

// Values are about 1 in size and 4 at most. f16: queries are rounded to 11 bits, which moves a score of spread 5 by 1e-3,
// and weights to 11 bits; bf16: weights to 8 bits, one value in 2^9, queries to 16. Both average out over rows, not over one.
double tolerance(CacheType type) { return type == CacheType::kF16 ? 8e-3 : 1.6e-2; }

}  // namespace

TEST_CASE(
    "attention on tensor cores is the definition's for any number of heads, depth and tokens") {
  const auto cpu = make_cpu_backend(4), gpu = make_cuda_backend(0, Precision::kFast),
             exact = make_cuda_backend(0);
  for (const CacheType type : {CacheType::kF16, CacheType::kBF16}) {
    for (const std::int64_t heads : {1, 5, 12, 20, 48, 60, 96, 128}) {
      CAPTURE(heads);
      Case c;
      c.type = type;
      c.heads = heads;
      c.n_ctx = 5003;  // no multiple of a tile: the last slot's tile reaches beyond its memory
      c.depths = kDepths;
      c.fill(static_cast<unsigned>(heads));
      OnDevice on_cpu(*cpu, c), on_gpu(*gpu, c), on_exact(*exact, c);
      const std::vector<float> want = on_cpu.attend(), got = on_gpu.attend();
      const double error = worst(got, want);
      MESSAGE(std::string(type == CacheType::kF16 ? "f16, " : "bf16, ")
              << heads << " heads: error " << error);
      CHECK(error <= tolerance(type));
      CHECK(error > 0);  // the exact path was not what ran
      CHECK(worst(on_exact.attend(), want) < 1e-4);
      CHECK(on_gpu.attend() == got);
      for (std::int64_t t = 0; t < on_gpu.n_tok; ++t) {
        CAPTURE(c.depths[static_cast<std::size_t>(t)]);
        const auto at = want.begin() + static_cast<std::ptrdiff_t>(t * heads * kLatent);
        const std::vector<float> one(at, at + static_cast<std::ptrdiff_t>(heads * kLatent));
        CHECK(worst(on_gpu.attend_one(t), one) <= tolerance(type));
      }
    }
  }
}

TEST_CASE("a maximum that grows from tile to tile is followed") {
  const auto cpu = make_cpu_backend(4), gpu = make_cuda_backend(0, Precision::kFast);
  for (const std::int64_t heads : {12, 96}) {
    Case c;
    c.heads = heads;
    c.n_ctx = 12000;
    c.depths = {700, 12000};
    c.q_size = 1;
    c.growth = 4e-3f;  // 64 rows add 10 to a score: e^10 to a weight
    c.fill(7);
    OnDevice on_cpu(*cpu, c), on_gpu(*gpu, c);
    const std::vector<float> want = on_cpu.attend();
    double size = 0;
    for (const float v : want) size = std::max(size, std::abs(static_cast<double>(v)));
    // Values have grown to `size`, and scores with them: the rounding of queries counts by that much more.
    CHECK(worst(on_gpu.attend(), want) <= 2e-3 * size);
  }
}

TEST_CASE("a captured call serves whatever positions device memory holds when it is replayed") {
  const auto cpu = make_cpu_backend(4), gpu = make_cuda_backend(0, Precision::kFast);
  for (const std::int64_t heads : {12, 96}) {
    Case c;
    c.heads = heads;
    c.n_ctx = 9000;
    c.depths = {9000, 9000, 9000};
    c.fill(3);
    OnDevice on_cpu(*cpu, c), on_gpu(*gpu, c);
    Matrix<float> again(*gpu, on_gpu.n_tok, heads * kLatent);
    const auto replay = gpu->capture([&] {  // after what is no kernel, and after itself
      gpu->zero(on_gpu.ctx.data(), 16);
      gpu->mla_attend(on_gpu.ctx, on_gpu.q, heads, kScale, on_gpu.cache, on_gpu.batch);
      gpu->mla_attend(again, on_gpu.q, heads, kScale, on_gpu.cache, on_gpu.batch);
    });
    for (const std::vector<std::int32_t>& pos :
         {std::vector<std::int32_t>{0, 1, 2}, {8999, 0, 130}, {127, 4000, 8998}, {0, 0, 0}}) {
      on_cpu.pos.set(pos);
      on_gpu.pos.set(pos);
      on_gpu.poison();
      replay->run();
      const std::vector<float> got = on_gpu.ctx.get();
      CHECK(worst(got, on_cpu.attend()) <= tolerance(c.type));
      CHECK(again.get() == got);
    }
  }
}

TEST_CASE("many tokens of one step are served, also where most blocks have several of them") {
  const auto cpu = make_cpu_backend(4), gpu = make_cuda_backend(0, Precision::kFast);
  for (const std::int64_t heads : {12, 96}) {
    Case c;
    c.heads = heads;
    c.n_ctx = 300;
    for (std::int64_t i = 0; i < 64; ++i) c.depths.push_back(1 + i * 37 % 300);
    c.fill(5);
    OnDevice on_cpu(*cpu, c), on_gpu(*gpu, c);
    CHECK(worst(on_gpu.attend(), on_cpu.attend()) <= tolerance(c.type));
  }
}

TEST_CASE("the parts of ranks are the definition's and join to the attention over all rows") {
  const auto cpu = make_cpu_backend(4), gpu = make_cuda_backend(0, Precision::kFast);
  for (const CacheType type : {CacheType::kF16, CacheType::kBF16}) {
    for (const std::int64_t p : {0, 3}) {
      Case c;
      c.type = type;
      c.heads = 96;
      c.n_ctx = 2100;
      c.depths = {1, 64, 200, 300, 8000};
      c.shard = {p, 4, 64};
      c.fill(9);
      OnDevice on_cpu(*cpu, c), on_gpu(*gpu, c);
      // m may be any: parts are compared as what they add to a join.
      const auto as_sums = [&](std::vector<float> part) {
        for (std::size_t at = 0; at < part.size(); at += kLatent + 2) {
          const float sum = part[at + 1];
          part[at] = sum > 0 ? part[at] + std::log(sum) : -1e30f;
          part[at + 1] = sum > 0 ? 1.0f : 0.0f;
          for (std::size_t i = 2; i < kLatent + 2 && sum > 0; ++i) part[at + i] /= sum;
        }
        return part;
      };
      CHECK(worst(as_sums(on_gpu.attend_part()), as_sums(on_cpu.attend_part())) <= 2e-2);
      const std::vector<float> first = on_gpu.part.get();
      CHECK(on_gpu.attend_part() == first);
      Matrix<float> joined(*gpu, on_gpu.n_tok, c.heads * kLatent),
          alone(*cpu, on_cpu.n_tok, c.heads * kLatent);
      if (p == 0) {  // a single part joins to its own attention
        gpu->mla_combine(joined, on_gpu.part, 1, c.heads);
        cpu->mla_combine(alone, on_cpu.part, 1, c.heads);
        CHECK(worst(joined.get(), alone.get()) <= tolerance(type));
      }
    }
  }
}

TEST_CASE("the whole of a layer's attention reads the rope part of queries where it lies") {
  const auto cpu = make_cpu_backend(4), gpu = make_cuda_backend(0, Precision::kFast);
  const std::int64_t nope = 128, value = 128, heads = 12;
  Case c;
  c.heads = heads;
  c.n_ctx = 300;
  c.depths = {1, 77, 300};
  c.fill(11);
  std::mt19937 rng(12);
  std::normal_distribution<float> normal(0, 0.1f);
  std::vector<float> k_b(static_cast<std::size_t>(heads * kLatent * nope)),
      v_b(static_cast<std::size_t>(heads * value * kLatent)),
      q(static_cast<std::size_t>(3 * heads * (nope + kRope)));
  for (auto* v : {&k_b, &v_b}) {
    for (float& x : *v) x = normal(rng);
  }
  for (float& x : q) x = 20 * normal(rng);
  const auto run = [&](Backend& b) {
    OnDevice d(b, c);
    std::vector<std::unique_ptr<DeviceBuffer>> storage;
    const auto load = [&](const std::vector<float>& w, std::int64_t in, std::int64_t out) {
      return b.load({BlockType::kF32,
                     {in, out, heads},
                     {0, 0, 0},
                     {in, out, heads},
                     reinterpret_cast<const std::byte*>(w.data())},
                    storage);
    };
    const Weight k = load(k_b, nope, kLatent), v = load(v_b, kLatent, value);
    Matrix<float> dq(b, 3, heads * (nope + kRope), q), q_abs(b, 3, heads * kWidth),
        o(b, 3, heads * value);
    b.mla_heads(o, dq, k, v, kRope, kScale, d.cache, d.batch, q_abs, d.ctx);
    return o.get();
  };
  const std::vector<float> want = run(*cpu), got = run(*gpu);
  double size = 0;
  for (const float x : want) size = std::max(size, std::abs(static_cast<double>(x)));
  CHECK(worst(got, want) <= 4e-3 * size);
}

}  // namespace k3
