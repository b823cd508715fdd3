// The ops of many tokens on tensor cores (Precision::kFast) against the CPU's definition. Errors are relative: |got - want| over
// |want|, both Euclidean. f16 operands round by 2^-12 each at most, so products of many terms come out near 2e-4.
#include <doctest/doctest.h>

#include <cmath>
#include <random>

#include "kernels/cuda_devices.h"
#include "support/backends.h"

namespace k3 {
namespace {

constexpr double kHalfError = 1e-3;  // f16 operands, f32 sums
constexpr double kF32Error = 1e-5;   // split operands, f32 throughout

std::vector<float> random_values(std::int64_t n, unsigned seed, float scale = 1) {
  std::mt19937 rng(seed);
  std::uniform_real_distribution<float> u(-scale, scale);
  std::vector<float> v(static_cast<std::size_t>(n));
  for (float& x : v) x = u(rng);
  return v;
}

double relative_error(const std::vector<float>& got, const std::vector<float>& want) {
  REQUIRE(got.size() == want.size());
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double d = static_cast<double>(got[i]) - want[i];
    difference += d * d;
    size += static_cast<double>(want[i]) * want[i];
  }
  return std::sqrt(difference / size);
}

// The same case on the CPU and, twice, on the fast CUDA backend: close to the first, the same bits again.
void compare(const std::function<std::vector<float>(Backend&)>& run, double tolerance) {
  const std::vector<float> want = run(*make_cpu_backend(2));
  const auto fast = make_cuda_backend(0, Precision::kFast);
  const std::vector<float> got = run(*fast);
  CHECK(relative_error(got, want) <= tolerance);
  CHECK(run(*fast) == got);
}

// A band of a synthetic matrix: the same values on every backend.
Weight synthetic(Backend& b, BlockType type, std::array<std::int64_t, 3> dims,
                 std::array<std::int64_t, 3> begin, std::array<std::int64_t, 3> end,
                 std::uint64_t key, std::vector<std::unique_ptr<DeviceBuffer>>& storage) {
  HostBox box;
  box.type = type;
  box.dims = dims;
  box.begin = begin;
  box.end = end;
  const float sigma = 1.0f / std::sqrt(static_cast<float>(dims[0]));
  return b.synthesize(box, {SynthKind::kMatrix, type, key, sigma}, storage);
}

// Segments of (slot, first position, tokens).
struct Tokens {
  struct Segment {
    std::int32_t slot, pos, n;
  };
  Tokens(Backend& b, const std::vector<Segment>& segments)
      : pos(b, 1, total(segments)),
        slot(b, 1, total(segments)),
        begin(b, 1, static_cast<std::int64_t>(segments.size()) + 1) {
    std::vector<std::int32_t> p, s, at{0};
    for (const Segment& segment : segments) {
      for (std::int32_t i = 0; i < segment.n; ++i) {
        p.push_back(segment.pos + i);
        s.push_back(segment.slot);
      }
      at.push_back(static_cast<std::int32_t>(p.size()));
    }
    pos.set(p);
    slot.set(s);
    begin.set(at);
    view = {static_cast<std::int64_t>(p.size()),
            static_cast<std::int64_t>(segments.size()),
            slot.data(),
            pos.data(),
            slot.data(),
            begin.data()};
  }
  static std::int64_t total(const std::vector<Segment>& segments) {
    std::int64_t n = 0;
    for (const Segment& s : segments) n += s.n;
    return n;
  }
  Matrix<std::int32_t> pos, slot, begin;
  BatchView view;
};

constexpr BlockType kTypes[] = {
    BlockType::kF32,     BlockType::kF16,     BlockType::kBF16,   BlockType::kQ4_0,
    BlockType::kQ4_1,    BlockType::kQ5_0,    BlockType::kQ5_1,   BlockType::kQ8_0,
    BlockType::kQ2_K,    BlockType::kQ3_K,    BlockType::kQ4_K,   BlockType::kQ5_K,
    BlockType::kQ6_K,    BlockType::kIQ2_XXS, BlockType::kIQ2_XS, BlockType::kIQ2_S,
    BlockType::kIQ3_XXS, BlockType::kIQ3_S,   BlockType::kIQ1_S,  BlockType::kIQ1_M,
    BlockType::kIQ4_NL,  BlockType::kIQ4_XS,  BlockType::kMXFP4,  BlockType::kTQ1_0,
    BlockType::kTQ2_0};

}  // namespace

TEST_CASE("a product of many tokens is close for every type, band and number of tokens") {
  std::int64_t n_tok = 33;
  for (const BlockType type : kTypes) {
    CAPTURE(traits(type).name);
    for (const auto& [c0, c1, r0, r1] :
         {std::array<std::int64_t, 4>{0, 768, 0, 300}, {32, 704, 3, 260}, {256, 512, 1, 2}}) {
      const std::int64_t n_in = c1 - c0, n_out = r1 - r0, cols0 = c0, cols1 = c1, rows0 = r0,
                         rows1 = r1;
      compare(
          [&](Backend& b) {
            std::vector<std::unique_ptr<DeviceBuffer>> storage;
            const Weight w =
                synthetic(b, type, {768, 300, 1}, {cols0, rows0, 0}, {cols1, rows1, 1}, 5, storage);
            // Rows of very different size: each has its own scale.
            std::vector<float> values = random_values(n_tok * n_in, 7);
            for (std::int64_t i = 0; i < n_tok * n_in; ++i)
              values[static_cast<std::size_t>(i)] *= std::exp2(static_cast<float>(i / n_in % 5));
            Matrix<float> x(b, n_tok, n_in, values), y(b, n_tok, n_out);
            const MatmulJob job{y, x, &w};
            b.matmul({&job, 1});
            return y.get();
          },
          type == BlockType::kF32 ? kF32Error : kHalfError);
      n_tok = n_tok == 33 ? 100 : n_tok == 100 ? 257 : 33;
    }
  }
}

TEST_CASE("huge and tiny activations neither overflow nor vanish") {
  for (const float scale : {1e-20f, 1e6f, 1e20f}) {
    CAPTURE(scale);
    compare(
        [&](Backend& b) {
          std::vector<std::unique_ptr<DeviceBuffer>> storage;
          const Weight w =
              synthetic(b, BlockType::kQ8_0, {256, 40, 1}, {0, 0, 0}, {256, 40, 1}, 1, storage);
          Matrix<float> x(b, 64, 256, random_values(64 * 256, 2, scale)), y(b, 64, 40);
          const MatmulJob job{y, x, &w};
          b.matmul({&job, 1});
          std::vector<float> got = y.get();
          for (float& v : got) v /= scale;
          return got;
        },
        kHalfError);
  }
}

TEST_CASE("jobs that share x are done together, strided outputs and odd columns included") {
  compare(
      [](Backend& b) {
        std::vector<std::unique_ptr<DeviceBuffer>> storage;
        const Weight w = synthetic(b, BlockType::kQ8_0, {256, 65, 1}, {0, 0, 0}, {256, 65, 1}, 1,
                                   storage),
                     v = synthetic(b, BlockType::kF32, {256, 34, 1}, {0, 0, 0}, {256, 34, 1}, 2,
                                   storage);
        Matrix<float> x(b, 130, 256, random_values(130 * 256, 2)), y(b, 130, 165);
        const View<float> all = y;
        const MatmulJob jobs[] = {{all.columns(0, 65), x, &w},
                                  {all.columns(65, 34), x, &v},
                                  {all.columns(100, 65), x, &w}};
        b.matmul(jobs);
        return y.get();
      },
      kHalfError);
}

TEST_CASE(
    "grouped experts: any spread of tokens, a rank's experts and ffn band, cuts inside blocks") {
  const std::int64_t latent = 768, ffn = 512, n_expert = 9, n_tok = 300, k = 3;
  for (const auto& [e0, e1, f0, f1] :
       {std::array<std::int64_t, 4>{0, 9, 0, 512}, {2, 8, 0, 160}, {0, 9, 160, 512}}) {
    const std::int64_t experts0 = e0, experts1 = e1, ffn0 = f0, ffn1 = f1;
    compare(
        [&](Backend& b) {
          std::vector<std::unique_ptr<DeviceBuffer>> storage;
          const BlockType type = BlockType::kIQ1_S;
          const Weight gate = synthetic(b, type, {latent, ffn, n_expert}, {0, ffn0, experts0},
                                        {latent, ffn1, experts1}, 1, storage),
                       up = synthetic(b, type, {latent, ffn, n_expert}, {0, ffn0, experts0},
                                      {latent, ffn1, experts1}, 2, storage),
                       down = synthetic(b, type, {ffn, latent, n_expert}, {ffn0, 0, experts0},
                                        {ffn1, latent, experts1}, 3, storage);
          std::vector<std::int32_t> ids;
          for (std::int64_t t = 0; t < n_tok; ++t) {
            // Expert 0 has every token, expert 8 a single one, the others their share.
            ids.push_back(0);
            ids.push_back(t == 17 ? 8 : static_cast<std::int32_t>(1 + t % 3));
            ids.push_back(static_cast<std::int32_t>(4 + t % 4));
          }
          Matrix<std::int32_t> chosen(b, n_tok, k, ids);
          Matrix<float> z(b, n_tok, latent, random_values(n_tok * latent, 4)),
              weights(b, n_tok, k, random_values(n_tok * k, 5)),
              m(b, n_tok, latent, std::vector<float>(static_cast<std::size_t>(n_tok * latent), 9));
          b.experts(m, z, chosen, weights, {&gate, &up, &down, experts0}, {4, 25});
          return m.get();
        },
        kHalfError);
  }
}

TEST_CASE("experts of every type, gate and up of one and down of another") {
  const std::int64_t latent = 256, ffn = 256, n_expert = 4, n_tok = 40, k = 2;
  for (const BlockType type : kTypes) {
    CAPTURE(traits(type).name);
    compare(
        [&](Backend& b) {
          std::vector<std::unique_ptr<DeviceBuffer>> storage;
          const auto whole = [&](BlockType t, std::uint64_t key) {
            return synthetic(b, t, {latent, ffn, n_expert}, {0, 0, 0}, {latent, ffn, n_expert}, key,
                             storage);
          };
          const Weight gate = whole(type, 1), up = whole(type, 2),
                       down = whole(BlockType::kQ8_0, 3);
          std::vector<std::int32_t> ids;
          for (std::int64_t t = 0; t < n_tok; ++t) {
            ids.push_back(static_cast<std::int32_t>(t % 4));
            ids.push_back(static_cast<std::int32_t>((t + 1) % 4));
          }
          Matrix<std::int32_t> chosen(b, n_tok, k, ids);
          Matrix<float> z(b, n_tok, latent, random_values(n_tok * latent, 4)),
              weights(b, n_tok, k, random_values(n_tok * k, 5)), m(b, n_tok, latent);
          b.experts(m, z, chosen, weights, {&gate, &up, &down, 0}, {4, 25});
          return m.get();
        },
        kHalfError);
  }
}

TEST_CASE("expanded attention: cached rows and new ones, two sequences, every cache type") {
  const std::int64_t heads = 3, n_ctx = 500;
  for (const CacheType type : {CacheType::kF32, CacheType::kF16, CacheType::kBF16}) {
    CAPTURE(static_cast<int>(type));
    compare(
        [&](Backend& b) {
          std::vector<std::unique_ptr<DeviceBuffer>> storage;
          const Weight k_b = synthetic(b, BlockType::kQ8_0, {128, 512, heads}, {0, 0, 0},
                                       {128, 512, heads}, 1, storage),
                       v_b = synthetic(b, BlockType::kQ8_0, {512, 128, heads}, {0, 0, 0},
                                       {512, 128, heads}, 2, storage);
          MlaCache cache;
          storage.push_back(b.allocate(static_cast<std::size_t>(2 * n_ctx * 576 * 4)));
          cache.rows = storage.back()->data();
          cache.type = type;
          cache.n_ctx = n_ctx;
          cache.kv_latent = 512;
          cache.rope = 64;
          const Tokens before(b, {{0, 0, 137}, {1, 0, 300}}), now(b, {{1, 300, 129}, {0, 137, 40}});
          Matrix<float> norm(b, 1, 512, random_values(512, 3));
          Matrix<float> old_rows(b, 437, 576, random_values(437 * 576, 4)),
              rows(b, 169, 576, random_values(169 * 576, 5));
          b.mla_append(old_rows, norm.data(), 1e-5f, cache, before.view);
          b.mla_append(rows, norm.data(), 1e-5f, cache, now.view);
          Matrix<float> q(b, 169, heads * 192, random_values(169 * heads * 192, 6, 4)),
              o(b, 169, heads * 128), q_abs(b, 169, heads * 576), ctx(b, 169, heads * 512);
          b.mla_heads(o, q, k_b, v_b, 64, 0.0722f, cache, now.view, q_abs, ctx);
          return o.get();
        },
        2 * kHalfError);
  }
}

TEST_CASE("no output depends on later tokens") {
  const std::int64_t heads = 2, n_tok = 200, cut = 77;
  const auto b = make_cuda_backend(0, Precision::kFast);
  std::vector<std::unique_ptr<DeviceBuffer>> storage;
  const Weight k_b = synthetic(*b, BlockType::kQ8_0, {128, 512, heads}, {0, 0, 0},
                               {128, 512, heads}, 1, storage),
               v_b = synthetic(*b, BlockType::kQ8_0, {512, 128, heads}, {0, 0, 0},
                               {512, 128, heads}, 2, storage);
  const Tokens tokens(*b, {{0, 0, static_cast<std::int32_t>(n_tok)}});
  const Matrix<float> norm(*b, 1, 512, random_values(512, 3));
  auto first_rows = [&](unsigned later) {
    MlaCache cache;
    storage.push_back(b->allocate(static_cast<std::size_t>(n_tok * 576 * 2)));
    cache.rows = storage.back()->data();
    cache.type = CacheType::kF16;
    cache.n_ctx = n_tok;
    cache.kv_latent = 512;
    cache.rope = 64;
    std::vector<float> rows = random_values(n_tok * 576, 4),
                       qs = random_values(n_tok * heads * 192, 5);
    const std::vector<float> other = random_values(n_tok * 576, later);
    std::copy(other.begin() + cut * 576, other.end(), rows.begin() + cut * 576);
    std::copy_n(other.begin(), (n_tok - cut) * heads * 192, qs.begin() + cut * heads * 192);
    Matrix<float> c(*b, n_tok, 576, rows), q(*b, n_tok, heads * 192, qs), o(*b, n_tok, heads * 128),
        q_abs(*b, n_tok, heads * 576), ctx(*b, n_tok, heads * 512);
    b->mla_append(c, norm.data(), 1e-5f, cache, tokens.view);
    b->mla_heads(o, q, k_b, v_b, 64, 0.0722f, cache, tokens.view, q_abs, ctx);
    std::vector<float> got = o.get();
    got.resize(static_cast<std::size_t>(cut * heads * 128));
    return got;
  };
  CHECK(first_rows(10) == first_rows(11));
}

TEST_CASE("the delta rule in chunks: f32's accuracy, at the gate's bound and with keys all alike") {
  const std::int64_t heads = 2, d = heads * 128, n_tok = 129 + 64;
  for (const int variant : {0, 1, 2}) {
    CAPTURE(variant);
    compare(
        [&](Backend& b) {
          std::vector<std::unique_ptr<DeviceBuffer>> storage;
          KdaState state;
          state.n_head = heads;
          state.head_dim = 128;
          state.conv_kernel = 4;
          const std::int64_t n_state = 2 * heads * 128 * 128;
          Matrix<float> s(b, 1, n_state, random_values(n_state, 1, 0.1f)),
              window(b, 1, 2 * 3 * 3 * d);
          state.s = s.data();
          state.window = window.data();
          std::vector<float> keys = random_values(n_tok * d, 2),
                             gates = random_values(n_tok * d, 3);
          for (float& g : gates) g = variant == 1 ? -5.0f : -2.5f + 2.49f * g;
          if (variant == 2)
            for (std::int64_t i = d; i < n_tok * d; ++i)
              keys[static_cast<std::size_t>(i)] = keys[static_cast<std::size_t>(i % d)];
          if (variant == 2)
            for (float& g : gates) g *= 0.01f;
          std::vector<float> betas = random_values(n_tok * heads, 4);
          for (float& x : betas) x = 0.5f + 0.5f * x;
          Matrix<float> q(b, n_tok, d, random_values(n_tok * d, 5)), k(b, n_tok, d, keys),
              v(b, n_tok, d, random_values(n_tok * d, 6)), g(b, n_tok, d, gates),
              beta(b, n_tok, heads, betas), o(b, n_tok, d);
          b.l2_norm_heads(q, 128, 1e-5f);
          b.l2_norm_heads(k, 128, 1e-5f);
          const Tokens tokens(b, {{1, 40, 129}, {0, 0, 64}});
          b.kda_scan(o, q, k, v, g, beta, state, tokens.view);
          std::vector<float> all = o.get();
          const std::vector<float> after = s.get();
          all.insert(all.end(), after.begin(), after.end());
          return all;
        },
        2 * kF32Error);
  }
}

TEST_CASE("a convolution with tokens in parallel has the bits of one token after another") {
  const std::int64_t d = 3 * 2 * 128;
  std::vector<std::vector<float>> results;
  for (const Precision precision : {Precision::kExact, Precision::kFast}) {
    const auto b = make_cuda_backend(0, precision);
    KdaState state;
    state.n_head = 2;
    state.head_dim = 128;
    state.conv_kernel = 4;
    Matrix<float> window(*b, 1, 2 * 3 * d, random_values(2 * 3 * d, 1)), u(*b, 140, d),
        qkv(*b, 140, d), conv(*b, d, 4, random_values(d * 4, 2));
    u.set(random_values(140 * d, 3));
    state.window = window.data();
    const Tokens tokens(*b, {{1, 9, 137}, {0, 0, 3}});
    b->kda_conv(qkv, u, conv.data(), state, tokens.view);
    std::vector<float> all = qkv.get();
    const std::vector<float> after = window.get();
    all.insert(all.end(), after.begin(), after.end());
    results.push_back(all);
  }
  CHECK(results[0] == results[1]);
}

}  // namespace k3
