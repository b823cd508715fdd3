// Time of every launch of a decode step at K3's shapes, cut over P ranks, in a graph: microseconds and GB/s of the bytes it
// must read. Weights are made on the device, in as many copies as keep them out of the cache. decode_bench [P]
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda_devices.h"

namespace k3 {
namespace {

constexpr std::int64_t kHidden = 7168, kD = 12288, kLatent = 3584, kFfn = 3072, kExperts = 896,
                       kUsed = 16, kShared = 6144, kVocab = 163840;
constexpr int kReps = 24;

class Bench {
 public:
  Bench() : b(make_cuda_backend(0, Precision::kFast)) {}

  View<float> floats(std::int64_t cols, float scale = 1, std::int64_t rows = 1) {
    std::vector<float> v(static_cast<std::size_t>(rows * cols));
    for (float& x : v) {
      state_ = state_ * 6364136223846793005u + 1442695040888963407u;
      x = scale * (static_cast<float>(state_ >> 40) * 0x1p-23f - 1.0f);
    }
    storage.push_back(b->allocate(v.size() * sizeof(float)));
    b->upload(storage.back()->data(), v.data(), v.size() * sizeof(float));
    b->synchronize();
    return {reinterpret_cast<float*>(storage.back()->data()), rows, cols};
  }
  View<std::int32_t> ints(std::vector<std::int32_t> v) {
    storage.push_back(b->allocate(v.size() * sizeof(std::int32_t)));
    b->upload(storage.back()->data(), v.data(), v.size() * sizeof(std::int32_t));
    b->synchronize();
    return {reinterpret_cast<std::int32_t*>(storage.back()->data()), 1,
            static_cast<std::int64_t>(v.size())};
  }
  Weight weight(BlockType type, std::int64_t n_in, std::int64_t n_out, std::int64_t n_mat = 1) {
    HostBox box;
    box.type = type;
    box.dims = box.end = {n_in, n_out, n_mat};
    const Weight w = b->synthesize(
        box, {SynthKind::kMatrix, type, ++key_, 1.0f / std::sqrt(static_cast<float>(n_in))},
        storage);
    bytes_ += block_bytes(type, static_cast<std::uint64_t>(n_in * n_out * n_mat));
    b->synchronize();
    return w;
  }
  // `make(i)` prepares copy i and gives what to launch.
  void run(const char* name, double bytes, int copies,
           const std::function<std::function<void()>(int)>& make) {
    std::vector<std::function<void()>> launches;
    for (int i = 0; i < copies; ++i) launches.push_back(make(i));
    const auto graph = b->capture([&] {
      for (int r = 0; r < kReps; ++r) launches[static_cast<std::size_t>(r % copies)]();
    });
    std::vector<double> us;
    for (int k = 0; k < 12; ++k) {
      b->synchronize();
      const auto t0 = std::chrono::steady_clock::now();
      graph->run();
      b->synchronize();
      us.push_back(
          std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - t0).count() /
          kReps);
    }
    std::sort(us.begin(), us.end());
    std::printf("%-34s %9.2f MB %8.2f us (%.2f - %.2f) %8.1f GB/s\n", name, bytes / 1e6, us[6],
                us[1], us[10], bytes / us[6] / 1e3);
    std::fflush(stdout);
    storage.clear();
  }

  std::unique_ptr<Backend> b;
  std::vector<std::unique_ptr<DeviceBuffer>> storage;

 private:
  std::uint64_t state_ = 88172645463325252u, key_ = 0, bytes_ = 0;
};

double q8(std::int64_t n) {
  return static_cast<double>(block_bytes(BlockType::kQ8_0, static_cast<std::uint64_t>(n)));
}

int copies_for(double bytes) { return static_cast<int>(std::clamp(4e8 / bytes, 2.0, 24.0)); }

void products(Bench& t, int P) {
  const std::int64_t d = kD / P;
  double bytes = q8(kHidden * (4 * d + 128)) + 4.0 * kHidden * 96 / P;
  t.run("kda projections", bytes, copies_for(bytes), [&](int) {
    std::vector<Weight> w;
    for (int i = 0; i < 4; ++i) w.push_back(t.weight(BlockType::kQ8_0, kHidden, d));
    w.push_back(t.weight(BlockType::kQ8_0, kHidden, 128));
    w.push_back(t.weight(BlockType::kF32, kHidden, 96 / P));
    std::vector<View<float>> y;
    for (const Weight& one : w) y.push_back(t.floats(one.n_out));
    const View<float> x = t.floats(kHidden);
    return [&t, w, y, x] {
      std::vector<MatmulJob> jobs;
      for (std::size_t i = 0; i < w.size(); ++i) jobs.push_back({y[i], x, &w[i]});
      t.b->matmul(jobs);
    };
  });
  bytes = q8(kHidden * d);
  t.run("attn output", bytes, copies_for(bytes), [&](int) {
    const Weight w = t.weight(BlockType::kQ8_0, d, kHidden);
    const View<float> x = t.floats(d), y = t.floats(kHidden);
    return [&t, w, x, y] {
      const MatmulJob job{y, x, &w};
      t.b->matmul({&job, 1});
    };
  });
  bytes = 4.0 * kHidden * kExperts / P + q8(kHidden * (kLatent / P + 2 * kShared / P));
  t.run("router, latent, shared in", bytes, copies_for(bytes), [&](int) {
    const Weight r = t.weight(BlockType::kF32, kHidden, kExperts / P),
                 z = t.weight(BlockType::kQ8_0, kHidden, kLatent / P),
                 g = t.weight(BlockType::kQ8_0, kHidden, kShared / P),
                 u = t.weight(BlockType::kQ8_0, kHidden, kShared / P);
    const View<float> x = t.floats(kHidden), yr = t.floats(r.n_out), yz = t.floats(z.n_out),
                      yg = t.floats(g.n_out);
    return [=, &t] {
      Operand o;
      o.x = x;
      o.situ = {4, 25};
      using Join = FusedProduct::Join;
      const FusedProduct p[] = {{yr, Join::kOne, {&r, 0}, {}},
                                {yz, Join::kOne, {&z, 0}, {}},
                                {yg, Join::kSitu, {&g, 0}, {&u, 0}}};
      if (!t.b->fused_products({&o, 1}, p)) std::abort();
    };
  });
  bytes = q8(kHidden * (kLatent / P + kShared / P));
  t.run("routed up, shared down", bytes, copies_for(bytes), [&](int) {
    const Weight up = t.weight(BlockType::kQ8_0, kLatent / P, kHidden),
                 down = t.weight(BlockType::kQ8_0, kShared / P, kHidden);
    const View<float> m = t.floats(kLatent), h = t.floats(kShared / P), norm = t.floats(kLatent),
                      y = t.floats(kHidden);
    return [=, &t] {
      Operand o[2];
      o[0].op = Operand::Op::kRms;
      o[0].x = m;
      o[0].norm_w = norm.data;
      o[0].eps = 1e-5f;
      o[0].n = kLatent / P;
      o[1].x = h;
      const FusedProduct p{y, FusedProduct::Join::kAdd, {&up, 0}, {&down, 1}};
      if (!t.b->fused_products(o, {&p, 1})) std::abort();
    };
  });
  bytes = q8(kHidden * (kVocab / P));
  t.run("output head", bytes, 2, [&](int) {
    const Weight w = t.weight(BlockType::kQ8_0, kHidden, kVocab / P);
    const View<float> x = t.floats(kHidden), y = t.floats(kVocab / P);
    return [&t, w, x, y] {
      const MatmulJob job{y, x, &w};
      t.b->matmul({&job, 1});
    };
  });
}

void experts(Bench& t, int P) {
  const double bytes = 3.0 * 16 *
                       static_cast<double>(block_bytes(
                           BlockType::kIQ1_S, static_cast<std::uint64_t>(kLatent * kFfn / P)));
  const std::int64_t held = P == 1 ? 448 : kExperts;
  const Weight gate = t.weight(BlockType::kIQ1_S, kLatent, kFfn / P, held),
               up = t.weight(BlockType::kIQ1_S, kLatent, kFfn / P, held);
  // The band of a stored tensor: its rows start inside a block on most ranks.
  HostBox box;
  box.type = BlockType::kIQ1_S;
  box.dims = {kFfn, kLatent, held};
  box.end = {kFfn / P, kLatent, held};
  const Weight down = t.b->synthesize(box, {SynthKind::kMatrix, box.type, 99, 0.02f}, t.storage);
  t.run("experts: route, gate, up, down", bytes, 12, [&](int) {
    std::vector<float> v;
    const View<float> logits = t.floats(kExperts, 3), z = t.floats(kLatent), m = t.floats(kLatent),
                      bias = t.floats(kExperts, 0.01f), w = t.floats(kUsed);
    std::vector<float> fix(kExperts);
    t.b->download(fix.data(), logits.data, fix.size() * sizeof(float));
    for (std::int64_t e = held; e < kExperts; ++e) fix[static_cast<std::size_t>(e)] = -50;
    t.b->upload(logits.data, fix.data(), fix.size() * sizeof(float));
    t.b->synchronize();
    const View<std::int32_t> ids = t.ints(std::vector<std::int32_t>(kUsed));
    return [=, &t] {
      ExpertStep s;
      s.m = m;
      s.z = z;
      s.logits = logits;
      s.ids = ids;
      s.weights = w;
      s.bias = bias.data;
      s.normalise = true;
      s.scale = 1;
      s.w = {&gate, &up, &down, 0};
      s.situ = {4, 25};
      if (!t.b->fused_experts(s)) std::abort();
    };
  });
}

void small(Bench& t, int P) {
  const std::int64_t heads = 96 / P, N = 128, d = heads * N;
  const double bytes = 2.0 * 4 * static_cast<double>(heads * N * N) + q8(N * d);
  t.run("kda step", bytes, copies_for(bytes), [&](int) {
    const Weight f_b = t.weight(BlockType::kQ8_0, N, d);
    const View<float> u = t.floats(3 * d), f = t.floats(N), gate = t.floats(d),
                      beta = t.floats(heads), o = t.floats(d), conv = t.floats(3 * d * 4),
                      dt = t.floats(d), a = t.floats(heads), norm = t.floats(N),
                      s = t.floats(heads * N * N), window = t.floats(9 * d);
    const View<std::int32_t> batch = t.ints({0, 9, 0, 0, 1});
    return [=, &t] {
      KdaStep k;
      k.o = o;
      k.u = u;
      k.f = f;
      k.gate = gate;
      k.beta = beta;
      k.f_b = &f_b;
      k.conv = conv.data;
      k.dt = dt.data;
      k.a = a.data;
      k.norm_w = norm.data;
      k.eps = 1e-5f;
      k.safe_gate = true;
      k.lower_bound = -5;
      const std::int32_t* i = batch.data;
      if (!t.b->fused_kda(k, {s.data, window.data, heads, N, 4}, {1, 1, i, i + 1, i + 2, i + 3}))
        std::abort();
    };
  });
  for (const int n_bank : {1, 8}) {
    const double streams = 4.0 * kHidden * (n_bank + 4);
    t.run(n_bank == 1 ? "mix, bank 1" : "mix, bank 8", streams, 4, [&](int) {
      const View<float> x = t.floats(kHidden), add = t.floats(kHidden), y = t.floats(kHidden),
                        bank = t.floats(kHidden, 1, 9), score = t.floats(kHidden),
                        norm = t.floats(kHidden);
      return [=, &t] {
        MixStep m;
        m.y = y;
        m.x = x;
        m.add = add;
        m.bank = bank.data;
        m.n_bank = n_bank;
        m.bank_stride = kHidden;
        m.score_w = score.data;
        m.norm_w = norm.data;
        m.eps = 1e-5f;
        if (!t.b->fused_mix(m)) std::abort();
      };
    });
  }
}

void run(int P) {
  Bench t;
  std::printf("P = %d, %s\n", P, t.b->describe().c_str());
  products(t, P);
  experts(t, P);
  small(t, P);
}

}  // namespace
}  // namespace k3

int main(int argc, char** argv) {
  if (k3::cuda_devices().empty()) return 77;
  k3::run(argc > 1 ? std::atoi(argv[1]) : 1);
}
