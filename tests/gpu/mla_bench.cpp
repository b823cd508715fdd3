// Time of attention over the latent cache at K3's widths, a layer, in a graph of 24 layers with a cache each (so that the
// deep ones come from device memory), and its error against the exact kernel. No test: prints two tables.
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/backend.h"
#include "kernels/half.h"

namespace {

using namespace k3;
constexpr std::int64_t kLatent = 512, kRope = 64, kWidth = kLatent + kRope, kContext = 131072;
constexpr int kLayers = 24;
constexpr float kScale = 0.07216878f;  // 1 / sqrt(192)

std::vector<float> normal_values(std::size_t n, unsigned seed, float size) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::vector<float> v(n);
  for (float& x : v) x = size * normal(rng);
  return v;
}

std::vector<std::uint16_t> rows_of(CacheType type, std::int64_t n) {
  const std::vector<float> some = normal_values(1 << 20, 1, 1);
  std::vector<std::uint16_t> rows(static_cast<std::size_t>(n * kWidth));
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const float v = some[(i * 7919 + i / 613) % some.size()];
    rows[i] = type == CacheType::kF16 ? float_to_half(v) : float_to_bf16(v);
  }
  return rows;
}

float* floats(const std::unique_ptr<DeviceBuffer>& b) {
  return reinterpret_cast<float*>(b->data());
}

struct Step {
  Step(Backend& b, std::int64_t heads, float q_size)
      : q(b.allocate(static_cast<std::size_t>(heads * kWidth) * 4)),
        ctx(b.allocate(static_cast<std::size_t>(heads * kLatent) * 4)),
        pos(b.allocate(4)),
        slot(b.allocate(4)) {
    q_host = normal_values(static_cast<std::size_t>(heads * kWidth), 2, q_size);
    b.upload(q->data(), q_host.data(), q_host.size() * 4);
    batch.n_tok = 1;
    batch.pos = reinterpret_cast<const std::int32_t*>(pos->data());
    batch.slot = reinterpret_cast<const std::int32_t*>(slot->data());
  }
  void at(Backend& b, std::int64_t depth) {
    const auto p = static_cast<std::int32_t>(depth - 1);
    b.upload(pos->data(), &p, 4);
    b.synchronize();
  }
  std::vector<float> q_host;
  std::unique_ptr<DeviceBuffer> q, ctx, pos, slot;
  BatchView batch;
};

void attend(Backend& b, const Step& s, std::int64_t heads, const MlaCache& cache) {
  b.mla_attend({floats(s.ctx), 1, heads * kLatent}, {floats(s.q), 1, heads * kWidth}, heads, kScale,
               cache, s.batch);
}

void times(Backend& b, CacheType type, const std::vector<MlaCache>& caches, std::int64_t heads) {
  Step s(b, heads, 3);
  s.at(b, 128);
  const auto replay = b.capture([&] {
    for (const MlaCache& c : caches) attend(b, s, heads, c);
  });
  for (const std::int64_t depth : {128, 1024, 4096, 16384, 32768, 131072}) {
    s.at(b, depth);
    std::vector<double> us;
    for (int round = 0; round < 7; ++round) {
      const int n = depth > 8192 ? 4 : 20;
      const auto from = std::chrono::steady_clock::now();
      for (int i = 0; i < n; ++i) replay->run();
      b.synchronize();
      const std::chrono::duration<double, std::micro> took =
          std::chrono::steady_clock::now() - from;
      if (round > 0) us.push_back(took.count() / n / static_cast<double>(caches.size()));
    }
    std::sort(us.begin(), us.end());
    const double bytes = static_cast<double>(depth * kWidth * 2);
    std::printf(
        "%-5s %3d heads  depth %6d  %8.2f us a layer  (%.2f .. %.2f)  %7.1f GB/s  %6.1f TFLOP/s\n",
        type == CacheType::kF16 ? "f16" : "bf16", static_cast<int>(heads), static_cast<int>(depth),
        us[us.size() / 2], us.front(), us.back(), bytes / us[us.size() / 2] / 1e3,
        2e-6 * static_cast<double>(heads * depth * (kWidth + kLatent)) / us[us.size() / 2]);
    std::fflush(stdout);
  }
}

// ||x - y|| / ||y||
double relative(const std::vector<float>& x, const std::vector<float>& y) {
  double d = 0, n = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    d += (static_cast<double>(x[i]) - y[i]) * (static_cast<double>(x[i]) - y[i]);
    n += static_cast<double>(y[i]) * y[i];
  }
  return std::sqrt(d / n);
}

// What rounding the queries alone does, once and as a sum of two, and what the fast kernel does in all.
void errors(Backend& fast, Backend& exact, CacheType type, std::byte* rows, std::int64_t depth,
            float q_size) {
  const std::int64_t heads = 12;
  const MlaCache cache{rows, type, kContext, kLatent, kRope, {}};
  std::vector<std::vector<float>> got;
  const auto rounded = [&](float v) {
    return type == CacheType::kF16 ? half_to_float(float_to_half(v))
                                   : bf16_to_float(float_to_bf16(v));
  };
  for (int kind = 0; kind < 4; ++kind) {  // exact, one value, two values, the fast kernel
    Backend& b = kind == 3 ? fast : exact;
    Step s(b, heads, q_size);
    s.at(b, depth);
    std::vector<float> q = s.q_host;
    constexpr float kLog2E = 1.4426950408889634f;  // the kernel rounds scaled queries
    for (float& v : q) {
      const float x = v * kScale * kLog2E, hi = rounded(x);
      if (kind == 1) v = hi / (kScale * kLog2E);
      if (kind == 2) v = (hi + rounded(x - hi)) / (kScale * kLog2E);
    }
    b.upload(s.q->data(), q.data(), q.size() * 4);
    attend(b, s, heads, cache);
    std::vector<float> out(static_cast<std::size_t>(heads * kLatent));
    b.download(out.data(), s.ctx->data(), out.size() * 4);
    got.push_back(out);
  }
  std::printf(
      "%-5s depth %6d, score spread %4.1f: q rounded %.2e, as two values %.2e, fast kernel %.2e\n",
      type == CacheType::kF16 ? "f16" : "bf16", static_cast<int>(depth),
      static_cast<double>(q_size) * std::sqrt(static_cast<double>(kWidth)) *
          static_cast<double>(kScale),
      relative(got[1], got[0]), relative(got[2], got[0]), relative(got[3], got[0]));
}

}  // namespace

int main() try {
  const auto fast = make_cuda_backend(0, Precision::kFast), exact = make_cuda_backend(0);
  std::printf("%s\n", fast->describe().c_str());
  for (const CacheType type : {CacheType::kF16, CacheType::kBF16}) {
    const std::size_t bytes = static_cast<std::size_t>(kContext * kWidth) * 2;
    const std::vector<std::uint16_t> host = rows_of(type, kContext);
    std::vector<std::unique_ptr<DeviceBuffer>> buffers;
    std::vector<MlaCache> caches;
    for (int i = 0; i < kLayers; ++i) {
      buffers.push_back(fast->allocate(bytes));
      if (i == 0) fast->upload(buffers[0]->data(), host.data(), bytes);
      if (i > 0) fast->copy(buffers.back()->data(), buffers[0]->data(), bytes);
      caches.push_back({buffers.back()->data(), type, kContext, kLatent, kRope, {}});
    }
    fast->synchronize();
    for (const std::int64_t heads : {12, 48, 96}) {
      if (type == CacheType::kF16 || heads != 48) times(*fast, type, caches, heads);
    }
    for (const std::int64_t depth : {128, 4096, 131072}) {
      for (const float q_size : {1.0f, 5.0f})
        errors(*fast, *exact, type, buffers[0]->data(), depth, q_size);
    }
  }
  return 0;
} catch (const std::exception& e) {
  std::fprintf(stderr, "mla_bench: %s\n", e.what());
  return 1;
}
