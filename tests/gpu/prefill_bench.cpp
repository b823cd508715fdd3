// Every kernel of prefill at K3's shapes, one line each: how far the fast path is from the exact one, and how fast it is.
// Weights are made on the device; no model is needed. prefill_bench [filter]
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda_devices.h"

namespace k3 {
namespace {

constexpr std::int64_t kTok = 4096;      // timed
constexpr std::int64_t kCheckTok = 257;  // compared with the exact path
constexpr std::int64_t kHidden = 7168, kHeads = 96, kD = 12288, kLatent = 3584, kFfn = 3072,
                       kExperts = 896, kUsed = 16;

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}
  std::uint32_t next() {
    state_ = state_ * 0x5851f42d4c957f2du + 0x14057b7ef767814fu;
    return static_cast<std::uint32_t>(state_ >> 33);
  }
  float value() { return static_cast<float>(next()) * (2.0f / 2147483648.0f) - 1.0f; }

 private:
  std::uint64_t state_;
};

// Both paths on one device, and the memory that cases use.
class Bench {
 public:
  explicit Bench(std::string filter)
      : exact(make_cuda_backend(0)),
        fast(make_cuda_backend(0, Precision::kFast)),
        filter_(std::move(filter)) {}

  bool wants(const std::string& name) const { return name.find(filter_) != std::string::npos; }

  View<float> floats(std::int64_t rows, std::int64_t cols, std::uint64_t seed, float scale) {
    std::vector<float> v(static_cast<std::size_t>(rows * cols));
    Random r(seed);
    if (scale != 0)
      for (float& x : v) x = r.value() * scale;
    storage_.push_back(exact->allocate(v.size() * sizeof(float)));
    exact->upload(storage_.back()->data(), v.data(), v.size() * sizeof(float));
    exact->synchronize();
    return {reinterpret_cast<float*>(storage_.back()->data()), rows, cols};
  }
  View<std::int32_t> ints(std::int64_t rows, std::int64_t cols,
                          const std::vector<std::int32_t>& v) {
    storage_.push_back(exact->allocate(v.size() * sizeof(std::int32_t)));
    exact->upload(storage_.back()->data(), v.data(), v.size() * sizeof(std::int32_t));
    exact->synchronize();
    return {reinterpret_cast<std::int32_t*>(storage_.back()->data()), rows, cols};
  }
  std::byte* bytes(std::size_t n) {
    storage_.push_back(exact->allocate(n));
    return storage_.back()->data();
  }
  Weight weight(BlockType type, std::int64_t n_in, std::int64_t n_out, std::int64_t n_mat,
                std::uint64_t key) {
    HostBox box;
    box.type = type;
    box.dims = box.end = {n_in, n_out, n_mat};
    const float sigma = 1.0f / std::sqrt(static_cast<float>(n_in));
    const Weight w = exact->synthesize(box, {SynthKind::kMatrix, type, key, sigma}, storage_);
    exact->synchronize();
    return w;
  }
  std::vector<float> values(View<const float> v) {
    std::vector<float> all(static_cast<std::size_t>(v.rows * v.stride));
    exact->download(all.data(), v.data, all.size() * sizeof(float));
    return all;
  }
  void clear() { storage_.clear(); }

  // run(backend, n_tok) leaves its result in y. Compares kCheckTok tokens, times kTok of the fast path.
  void measure(const std::string& name, View<float> y, double flop_per_tok,
               const std::function<void(Backend&, std::int64_t)>& run, bool same_rows = true) {
    const View<float> some = y.slice(0, kCheckTok);
    run(*exact, kCheckTok);
    exact->synchronize();
    const std::vector<float> want = values(some);
    poison(y);
    run(*fast, kCheckTok);
    fast->synchronize();
    const std::vector<float> got = values(some);
    double best = 1e30;
    std::vector<double> ms;
    for (int i = 0; i < 6; ++i) {
      const auto t0 = std::chrono::steady_clock::now();
      run(*fast, kTok);
      fast->synchronize();
      const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - t0;
      if (i > 0) ms.push_back(took.count());
      best = std::min(best, took.count());
    }
    std::sort(ms.begin(), ms.end());
    const double median = ms[ms.size() / 2];
    const char* rows = !same_rows ? "-" : values(some) == got ? "same" : "DIFFER";
    std::printf("%-28s error %.2e  %8.3f ms  best %8.3f  %7.1f TFLOP/s  rows of a longer run: %s\n",
                name.c_str(), distance(got, want), median, best,
                flop_per_tok * static_cast<double>(kTok) / median * 1e-9, rows);
    std::fflush(stdout);
  }

  std::unique_ptr<Backend> exact, fast;

 private:
  void poison(View<float> y) {
    const std::vector<float> bad(static_cast<std::size_t>(y.rows * y.stride), std::nanf(""));
    exact->upload(y.data, bad.data(), bad.size() * sizeof(float));
    exact->synchronize();
  }
  static double distance(const std::vector<float>& got, const std::vector<float>& want) {
    double difference = 0, size = 0;
    for (std::size_t i = 0; i < want.size(); ++i) {
      const double d = static_cast<double>(got[i]) - want[i];
      difference += d * d;
      size += static_cast<double>(want[i]) * want[i];
    }
    return std::sqrt(difference / size);
  }

  std::string filter_;
  std::vector<std::unique_ptr<DeviceBuffer>> storage_;
};

void dense(Bench& b, const std::string& name, BlockType type, std::int64_t n_in,
           std::int64_t n_out) {
  if (!b.wants("dense " + name)) return;
  const Weight w = b.weight(type, n_in, n_out, 1, 7);
  const View<float> x = b.floats(kTok, n_in, 1, 1), y = b.floats(kTok, n_out, 2, 0);
  b.measure("dense " + name, y, 2.0 * static_cast<double>(n_in * n_out),
            [&](Backend& to, std::int64_t n) {
              const MatmulJob job{y.slice(0, n), x.slice(0, n), &w};
              to.matmul({&job, 1});
            });
  b.clear();
}

std::vector<std::int32_t> random_choices(std::uint64_t seed) {
  Random r(seed);
  std::vector<std::int32_t> ids;
  for (std::int64_t t = 0; t < kTok; ++t) {
    const std::size_t first = ids.size();
    while (ids.size() < first + kUsed) {
      const auto e = static_cast<std::int32_t>(r.next() % kExperts);
      if (std::find(ids.begin() + static_cast<std::ptrdiff_t>(first), ids.end(), e) == ids.end())
        ids.push_back(e);
    }
  }
  return ids;
}

void experts(Bench& b) {
  if (!b.wants("experts")) return;
  const Weight gate = b.weight(BlockType::kIQ1_S, kLatent, kFfn, kExperts, 1),
               up = b.weight(BlockType::kIQ1_S, kLatent, kFfn, kExperts, 2),
               down = b.weight(BlockType::kIQ1_S, kFfn, kLatent, kExperts, 3);
  const View<float> z = b.floats(kTok, kLatent, 1, 1), m = b.floats(kTok, kLatent, 2, 0),
                    weights = b.floats(kTok, kUsed, 3, 0.1f);
  const View<std::int32_t> ids = b.ints(kTok, kUsed, random_choices(4));
  b.measure("experts", m, 2.0 * 3 * kUsed * kLatent * kFfn, [&](Backend& to, std::int64_t n) {
    to.experts(m.slice(0, n), z.slice(0, n), ids.slice(0, n), weights.slice(0, n),
               {&gate, &up, &down, 0}, {4, 25});
  });
  b.clear();
}

struct Tokens {
  Tokens(Bench& b, std::int64_t n, std::int64_t pos) {
    std::vector<std::int32_t> at;
    for (std::int64_t i = 0; i < n; ++i) at.push_back(static_cast<std::int32_t>(pos + i));
    view.n_tok = n;
    view.n_seg = 1;
    view.pos = b.ints(1, n, at).data;
    view.slot = b.ints(1, n, std::vector<std::int32_t>(at.size(), 0)).data;
    view.ids = view.slot;
    view.seg_begin = b.ints(1, 2, {0, static_cast<std::int32_t>(n)}).data;
  }
  BatchView view;
};

void mla(Bench& b, std::int64_t depth) {
  const std::string name = "mla at " + std::to_string(depth);
  if (!b.wants(name)) return;
  MlaCache cache;
  cache.type = CacheType::kF16;
  cache.n_ctx = depth + kTok;
  cache.kv_latent = 512;
  cache.rope = 64;
  cache.rows = b.bytes(static_cast<std::size_t>(cache.n_ctx) * 576 * 2);
  const View<float> c = b.floats(kTok, 576, 1, 1), norm = b.floats(1, 512, 2, 1);
  for (std::int64_t at = 0; at < cache.n_ctx; at += kTok) {
    const Tokens some(b, std::min(kTok, cache.n_ctx - at), at);
    b.exact->mla_append(c.slice(0, some.view.n_tok), norm.data, 1e-5f, cache, some.view);
    b.exact->synchronize();
  }
  const Weight k_b = b.weight(BlockType::kQ8_0, 128, 512, kHeads, 3),
               v_b = b.weight(BlockType::kQ8_0, 512, 128, kHeads, 4);
  const View<float> q = b.floats(kTok, kHeads * 192, 5, 3), o = b.floats(kTok, kHeads * 128, 6, 0),
                    q_abs = b.floats(kTok, kHeads * 576, 7, 0),
                    ctx = b.floats(kTok, kHeads * 512, 8, 0);
  const Tokens all(b, kTok, depth), few(b, kCheckTok, depth);
  const double rows = static_cast<double>(depth) + kTok / 2.0;
  b.measure(name, o, 2.0 * kHeads * (192 + 128) * rows, [&](Backend& to, std::int64_t n) {
    to.mla_heads(o.slice(0, n), q.slice(0, n), k_b, v_b, 64, 0.0722f, cache,
                 n == kTok ? all.view : few.view, q_abs.slice(0, n), ctx.slice(0, n));
  });
  b.clear();
}

void kda(Bench& b) {
  if (!b.wants("kda")) return;
  const View<float> u = b.floats(kTok, 3 * kD, 1, 1), qkv = b.floats(kTok, 3 * kD, 2, 0),
                    conv = b.floats(3 * kD, 4, 3, 1), f = b.floats(kTok, kD, 4, 6),
                    g = b.floats(kTok, kD, 5, 0), o = b.floats(kTok, kD, 6, 0),
                    beta = b.floats(kTok, kHeads, 7, 0.5f), dt = b.floats(1, kD, 8, 1),
                    norm = b.floats(1, 128, 9, 1);
  const View<float> a = b.floats(1, kHeads, 10, -1);
  const Tokens all(b, kTok, 0), few(b, kCheckTok, 0);
  KdaState state;
  state.n_head = kHeads;
  state.head_dim = 128;
  state.conv_kernel = 4;
  state.s = reinterpret_cast<float*>(b.bytes(kHeads * 128 * 128 * 4));
  state.window = reinterpret_cast<float*>(b.bytes(3 * 3 * kD * 4));
  auto batch = [&](std::int64_t n) { return n == kTok ? all.view : few.view; };
  b.measure("kda conv", qkv, 8 * 3 * kD, [&](Backend& to, std::int64_t n) {
    to.kda_conv(qkv.slice(0, n), u.slice(0, n), conv.data, state, batch(n));
  });
  const View<float> q = qkv.columns(0, kD), k = qkv.columns(kD, kD), v = qkv.columns(2 * kD, kD);
  b.exact->l2_norm_heads(q, 128, 1e-5f);
  b.exact->l2_norm_heads(k, 128, 1e-5f);
  b.exact->copy_rows(g, f);
  b.exact->kda_gates(g, beta, dt.data, a.data, 128, true, -5.0f);
  b.exact->synchronize();
  b.measure("kda scan", o, 2.0 * 3 * kHeads * 128 * 128, [&](Backend& to, std::int64_t n) {
    to.kda_scan(o.slice(0, n), q.slice(0, n), k.slice(0, n), v.slice(0, n), g.slice(0, n),
                beta.slice(0, n), state, batch(n));
  });
  // In place, so that only their time means anything.
  b.measure(
      "kda l2 norm", qkv, 0,
      [&](Backend& to, std::int64_t n) {
        to.l2_norm_heads(q.slice(0, n), 128, 1e-5f);
        to.l2_norm_heads(k.slice(0, n), 128, 1e-5f);
      },
      false);
  b.measure(
      "kda gates", g, 0,
      [&](Backend& to, std::int64_t n) {
        to.kda_gates(g.slice(0, n), beta.slice(0, n), dt.data, a.data, 128, true, -5.0f);
      },
      false);
  b.measure(
      "kda output gate", o, 0,
      [&](Backend& to, std::int64_t n) {
        to.kda_output_gate(o.slice(0, n), f.slice(0, n), norm.data, 128, 1e-5f);
      },
      false);
  b.clear();
}

void stream(Bench& b) {
  if (!b.wants("stream")) return;
  const View<float> bank = b.floats(kTok, kHidden, 1, 1), x = b.floats(kTok, kHidden, 2, 1),
                    y = b.floats(kTok, kHidden, 3, 0), w = b.floats(1, kHidden, 4, 1),
                    g = b.floats(kTok, 6144, 5, 1), u = b.floats(kTok, 6144, 6, 1),
                    logits = b.floats(kTok, kExperts, 7, 2), bias = b.floats(1, kExperts, 8, 0.1f),
                    weights = b.floats(kTok, kUsed, 9, 0);
  const View<std::int32_t> ids =
      b.ints(kTok, kUsed, std::vector<std::int32_t>(static_cast<std::size_t>(kTok * kUsed)));
  b.measure("stream mix_norm", y, 0, [&](Backend& to, std::int64_t n) {
    to.mix_norm(y.slice(0, n), x.slice(0, n), bank.data, 1, kTok * kHidden, w.data, w.data, 1e-5f,
                nullptr);
  });
  b.measure("stream residual", y, 0,
            [&](Backend& to, std::int64_t n) { to.residual(y.slice(0, n), x.slice(0, n), true); });
  b.measure("stream route", weights, 0, [&](Backend& to, std::int64_t n) {
    to.route(ids.slice(0, n), weights.slice(0, n), logits.slice(0, n), bias.data, 0, true, 1.0f);
  });
  b.measure(
      "stream situ", g, 0,
      [&](Backend& to, std::int64_t n) {
        to.situ(g.slice(0, n), u.slice(0, n), {4, 25});
      },
      false);
  b.clear();
}

int run(int argc, char** argv) {
  if (cuda_devices().empty()) {
    std::printf("no CUDA device\n");
    return 77;
  }
  Bench b(argc > 1 ? argv[1] : "");
  std::printf("%s, %lld tokens\n", b.fast->describe().c_str(), static_cast<long long>(kTok));
  dense(b, "q, 7168 x 12288 Q8_0", BlockType::kQ8_0, kHidden, kD);
  dense(b, "o, 12288 x 7168 Q8_0", BlockType::kQ8_0, kD, kHidden);
  dense(b, "ffn, 7168 x 33792 Q8_0", BlockType::kQ8_0, kHidden, 33792);
  dense(b, "down, 33792 x 7168 Q8_0", BlockType::kQ8_0, 33792, kHidden);
  dense(b, "f_a, 7168 x 128 Q8_0", BlockType::kQ8_0, kHidden, 128);
  dense(b, "f_b, 128 x 12288 Q8_0", BlockType::kQ8_0, 128, kD);
  dense(b, "router, 7168 x 896 F32", BlockType::kF32, kHidden, kExperts);
  dense(b, "7168 x 2000 Q4_K", BlockType::kQ4_K, kHidden, 2000);
  experts(b);
  mla(b, 0);
  mla(b, 28672);
  kda(b);
  stream(b);
  return 0;
}

}  // namespace
}  // namespace k3

int main(int argc, char** argv) {
  try {
    return k3::run(argc, argv);
  } catch (const std::exception& e) {
    std::printf("%s\n", e.what());
    return 1;
  }
}
