// The dense product of prefill: tiles of 128 x 256, one warp that copies panels into a ring of shared memory, two
// warpgroups that multiply 64 rows each; blocks stay and walk the tiles.
#include <algorithm>

#include "kernels/cuda/check.h"
#include "kernels/cuda/prefill.h"
#include "kernels/cuda/tensor_core.cuh"

namespace k3::cuda {
namespace {

constexpr int kTileM = 128;
constexpr int kTileN = 256;
constexpr int kStages = 4;
constexpr int kThreads = 384;  // a warpgroup that copies, two that multiply
constexpr int kABytes = kTileM * kPanelRow;
constexpr int kBBytes = kTileN * kPanelRow;
constexpr std::size_t kShared = 1024 + kStages * (kABytes + kBBytes) + 2 * kStages * 8;
constexpr std::int64_t kGroupM = 16;  // tiles in m that share what they read of b while it is in L2

struct Shape {
  std::int64_t tiles_m, tiles_n, n_step;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

struct Tile {
  std::int64_t m0, n0;
};

__device__ __forceinline__ Tile tile_at(std::int64_t i, const Shape& s) {
  const std::int64_t per_group = kGroupM * s.tiles_n, group = i / per_group;
  const std::int64_t first = group * kGroupM, size = min(kGroupM, s.tiles_m - first);
  const std::int64_t in = i - group * per_group;
  return {(first + in % size) * kTileM, in / size * kTileN};
}

// Tiles that lie wholly past the rows a cache has.
__device__ __forceinline__ std::int64_t row_limit(const RowLimit& l) {
  const std::int32_t t0 = l.seg_begin[l.seg], t1 = l.seg_begin[l.seg + 1];
  return t0 == t1 ? 0 : l.pos[t1 - 1] + 1;
}
__device__ __forceinline__ bool skipped(const Tile& t, const Gemm& g, std::int64_t limit) {
  return g.limit.pos != nullptr && (g.limit.on_m ? t.m0 : t.n0) >= limit;
}

struct Ports {
  char *a, *b;
  std::uint64_t *full, *empty;
};

__device__ __forceinline__ void copy_tiles(const Gemm& g, const Shape& s, const Ports& p,
                                           std::int64_t limit) {
  const std::int64_t parts = g.terms == 3 ? s.n_step / 3 : s.n_step;
  const char *a = reinterpret_cast<const char*>(g.a.data),
             *b = reinterpret_cast<const char*>(g.b.data);
  Ring<kStages> ring;
  for (std::int64_t i = blockIdx.x; i < s.tiles_m * s.tiles_n; i += gridDim.x) {
    const Tile t = tile_at(i, s);
    if (skipped(t, g, limit)) continue;
    for (std::int64_t k = 0; k < s.n_step; ++k) {
      // Split operands lie as [high | low]; the terms are high.high, low.high, high.low.
      const std::int64_t ka = k < 2 * parts ? k : k - 2 * parts, kb = k < parts ? k : k - parts;
      barrier_wait(&p.empty[ring.stage], ring.parity ^ 1);
      barrier_expect(&p.full[ring.stage], kABytes + kBBytes);
      bulk_load(p.a + ring.stage * kABytes, a + (ka * g.a.rows + t.m0) * kPanelRow, kABytes,
                &p.full[ring.stage]);
      bulk_load(p.b + ring.stage * kBBytes, b + (kb * g.b.rows + t.n0) * kPanelRow, kBBytes,
                &p.full[ring.stage]);
      ring.next();
    }
  }
}

__device__ __forceinline__ void store_rows(const Gemm& g, const float (&acc)[kTileN / 2],
                                           std::int64_t row, std::int64_t n0, bool pairs) {
  const int col = threadIdx.x % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int64_t m = row + 8 * half;
    if (m >= g.m) continue;
    const float scale = g.row_scale != nullptr ? g.row_scale[m] : 1.0f;
    float* y = g.y.row(m);
#pragma unroll
    for (int j = 0; j < kTileN / 8; ++j) {
      const std::int64_t n = n0 + 8 * j + col;
      float v0 = acc[4 * j + 2 * half] * scale, v1 = acc[4 * j + 2 * half + 1] * scale;
      if (n >= g.n) continue;
      if (g.col_scale != nullptr) {
        v0 *= g.col_scale[n];
        v1 *= n + 1 < g.n ? g.col_scale[n + 1] : 0.0f;
      }
      if (pairs && n + 1 < g.n) {
        *reinterpret_cast<float2*>(y + n) = {v0, v1};
      } else {
        y[n] = v0;
        if (n + 1 < g.n) y[n + 1] = v1;
      }
    }
  }
}

// A quad of threads holds one 16-byte piece of a panel's row.
__device__ __forceinline__ void store_panels(const Panels& out, const float (&acc)[kTileN / 2],
                                             std::int64_t row, std::int64_t n0) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int64_t m = row + 8 * half;
    if (m >= out.rows) continue;
#pragma unroll
    for (int j = 0; j < kTileN / 8; ++j) {
      const std::int64_t n = n0 + 8 * j;
      if (n / kPanel >= out.n_panel) continue;
      auto* piece = reinterpret_cast<std::uint32_t*>(
          panel_piece(out, n / kPanel, m, static_cast<int>(n % kPanel) / 8));
      piece[threadIdx.x % 4] =
          pack_half2(finite_half(acc[4 * j + 2 * half]), finite_half(acc[4 * j + 2 * half + 1]));
    }
  }
}

__device__ __forceinline__ void multiply_tiles(const Gemm& g, const Shape& s, const Ports& p,
                                               std::int64_t limit, int group) {
  const bool pairs = reinterpret_cast<std::uintptr_t>(g.y.data) % 8 == 0 && g.y.stride % 2 == 0;
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  Ring<kStages> ring;
  for (std::int64_t i = blockIdx.x; i < s.tiles_m * s.tiles_n; i += gridDim.x) {
    const Tile t = tile_at(i, s);
    if (skipped(t, g, limit)) continue;
    float acc[kTileN / 2];
#pragma unroll
    for (float& v : acc) v = 0;
    int before = -1;  // the stage whose products may still run
    for (std::int64_t k = 0; k < s.n_step; ++k) {
      barrier_wait(&p.full[ring.stage], ring.parity);
      const std::uint64_t a = operand(p.a + ring.stage * kABytes + group * 64 * kPanelRow),
                          b = operand(p.b + ring.stage * kBBytes);
      mma_fence();
#pragma unroll
      for (int step = 0; step < kPanel / 16; ++step)
        Wgmma<kTileN>::ss(acc, a + 2 * step, b + 2 * step);
      mma_commit();
      mma_wait<1>();
      if (before >= 0 && threadIdx.x % 128 == 0) barrier_arrive(&p.empty[before]);
      before = ring.stage;
      ring.next();
    }
    mma_wait<0>();
    hold(acc);
    if (threadIdx.x % 128 == 0) barrier_arrive(&p.empty[before]);
    const std::int64_t row = t.m0 + group * 64 + warp * 16 + lane / 4;
    if (g.out.data != nullptr) {
      store_panels(g.out, acc, row, t.n0);
    } else {
      store_rows(g, acc, row, t.n0, pairs);
    }
  }
}

#endif

__global__ void __launch_bounds__(kThreads, 1)
    gemm_kernel(const __grid_constant__ Gemm g, const Shape s) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ char raw[];
  char* base = raw + (1024 - (shared_address(raw) & 1023)) % 1024;
  Ports p{base, base + kStages * kABytes, nullptr, nullptr};
  p.full = reinterpret_cast<std::uint64_t*>(base + kStages * (kABytes + kBBytes));
  p.empty = p.full + kStages;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&p.full[i], 1);
      barrier_init(&p.empty[i], 2);
    }
    barrier_init_done();
  }
  __syncthreads();
  const std::int64_t limit = g.limit.pos != nullptr ? row_limit(g.limit) : 0;
  const int group = static_cast<int>(threadIdx.x / 128) - 1;
  if (group < 0) {
    fewer_registers<40>();
    if (threadIdx.x == 0) copy_tiles(g, s, p, limit);
  } else {
    more_registers<232>();
    multiply_tiles(g, s, p, limit, group);
  }
#endif
}

// 1 where the code that the device runs was compiled for sm_90a.
__global__ void probe_kernel(int* answer) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  *answer = 1;
#else
  *answer = 0;
#endif
}

}  // namespace

bool has_prefill_code() {
  int device = 0, major = 0, minor = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
        "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
        "cudaDeviceGetAttribute");
  if (major != 9 || minor != 0) return false;
  int *d_answer = nullptr, answer = 0;
  check(cudaMalloc(reinterpret_cast<void**>(&d_answer), sizeof(int)), "cudaMalloc");
  probe_kernel<<<1, 1>>>(d_answer);
  check_launch("probe_kernel");
  const cudaError_t status = cudaMemcpy(&answer, d_answer, sizeof(int), cudaMemcpyDeviceToHost);
  cudaFree(d_answer);
  check(status, "cudaMemcpy");
  return answer == 1;
}

void gemm(const Gemm& g, cudaStream_t stream) {
  if (g.m == 0 || g.n == 0) return;
  allow_shared(gemm_kernel, kShared);
  const std::int64_t n_step = g.terms == 3 ? g.a.n_panel / 2 * 3 : g.a.n_panel;
  const Shape s{(g.m + kTileM - 1) / kTileM, (g.n + kTileN - 1) / kTileN, n_step};
  const auto blocks =
      static_cast<unsigned>(std::min<std::int64_t>(processors(), s.tiles_m * s.tiles_n));
  gemm_kernel<<<blocks, kThreads, kShared, stream>>>(g, s);
  check_launch("gemm_kernel");
}

}  // namespace k3::cuda
