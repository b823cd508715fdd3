// MLA for many tokens, in the non-absorbed form: keys and values of a group of heads are expanded from the latent cache by
// two products, then causal flash attention runs on tensor cores with f32 softmax. 192 + 128 multiplications a row and head
// instead of 576 + 512.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "kernels/cuda/check.h"
#include "kernels/cuda/mla_prefill.h"
#include "kernels/cuda/prefill.h"
#include "kernels/cuda/prefill_math.cuh"

namespace k3::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTileQ = 128;  // tokens of a block, 64 a warpgroup
constexpr int kTileS = 128;  // cached rows of a step
constexpr int kStages = 2;
constexpr int kKeyPanels = 3;  // nope 128 + rope 64
constexpr int kQBytes = kKeyPanels * kTileQ * kPanelRow;
constexpr int kKBytes = kKeyPanels * kTileS * kPanelRow;
constexpr int kVBytes = kTileS / kPanel * 128 * kPanelRow;
constexpr std::size_t kShared = 1024 + kQBytes + kStages * (kKBytes + kVBytes) + 64;

__device__ __forceinline__ float load(const float* p) { return *p; }
__device__ __forceinline__ float load(const __half* p) { return __half2float(*p); }
__device__ __forceinline__ float load(const __nv_bfloat16* p) { return __bfloat162float(*p); }

// A segment of the batch, read on the device.
struct Segment {
  std::int64_t begin, n_tok, pos, slot;  // pos: of its first token
};
__device__ __forceinline__ Segment segment_of(const BatchView& b, int seg) {
  const std::int64_t t0 = b.seg_begin[seg], t1 = b.seg_begin[seg + 1];
  if (t0 == t1) return {t0, 0, 0, 0};
  return {t0, t1 - t0, b.pos[t0], b.slot[t0]};
}

// A thread per piece: cached rows of the segment's slot to panels, zeros up to a whole tile of the products.
template <class T>
__global__ void __launch_bounds__(kThreads)
    rows_kernel(const Panels to, const MlaCache cache, const BatchView batch, int seg) {
  const Segment s = segment_of(batch, seg);
  const std::int64_t width = cache.kv_latent + cache.rope, pieces = width / 8;
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x,
                     row = i / pieces, piece = i % pieces, n_row = s.pos + s.n_tok;
  if (row >= to.rows || row >= (n_row + 255) / 256 * 256) return;
  float v[8] = {};
  if (row < n_row) {
    const T* from = reinterpret_cast<const T*>(cache.rows) + (s.slot * cache.n_ctx + row) * width;
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = finite_half(load(from + piece * 8 + j));
  }
  *panel_piece(to, piece / kPanelPieces, row, static_cast<int>(piece % kPanelPieces)) = pack8(v);
}

// Queries of heads [head0, head0 + n) to panels, a head's three after another; row: token of the segment.
__global__ void __launch_bounds__(kThreads)
    queries_kernel(const Panels to, const View<const float> q, std::int64_t head0,
                   const BatchView batch, int seg) {
  const Segment s = segment_of(batch, seg);
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x,
                     pieces = to.n_panel * kPanelPieces, t = i / pieces, piece = i % pieces;
  if (t >= s.n_tok) return;
  const float* from = q.row(s.begin + t) + head0 * kKeyPanels * kPanel + piece * 8;
  float v[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = finite_half(from[j]);
  *panel_piece(to, piece / kPanelPieces, t, static_cast<int>(piece % kPanelPieces)) = pack8(v);
}

struct Flash {
  View<float> o;  // at the group's first head
  Panels q;       // [3 * heads][tokens]
  Panels k;       // [2 * heads][cached rows]
  Panels rope;    // [1][cached rows]
  Panels v;       // [cached rows / 64][128 * heads]
  float scale_log2 = 0;
  BatchView batch;
  int seg = 0;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

struct Ports {
  char *q, *k, *v;
  std::uint64_t *q_full, *full, *empty;
};

__device__ __forceinline__ const char* tile(const Panels& p, std::int64_t panel, std::int64_t row) {
  return reinterpret_cast<const char*>(p.data) + (panel * p.rows + row) * kPanelRow;
}

__device__ __forceinline__ void copy_tiles(const Flash& f, const Ports& p, std::int64_t head,
                                           std::int64_t tok0, std::int64_t n_step) {
  constexpr int kPanelBytes = kTileS * kPanelRow;
  barrier_expect(p.q_full, kQBytes);
  for (int i = 0; i < kKeyPanels; ++i)
    bulk_load(p.q + i * kPanelBytes, tile(f.q, head * kKeyPanels + i, tok0), kPanelBytes, p.q_full);
  Ring<kStages> ring;
  for (std::int64_t step = 0; step < n_step; ++step) {
    const std::int64_t row = step * kTileS;
    std::uint64_t* full = &p.full[ring.stage];
    char *k = p.k + ring.stage * kKBytes, *v = p.v + ring.stage * kVBytes;
    barrier_wait(&p.empty[ring.stage], ring.parity ^ 1);
    barrier_expect(full, kKBytes + kVBytes);
    bulk_load(k, tile(f.k, head * 2, row), kPanelBytes, full);
    bulk_load(k + kPanelBytes, tile(f.k, head * 2 + 1, row), kPanelBytes, full);
    bulk_load(k + 2 * kPanelBytes, tile(f.rope, 0, row), kPanelBytes, full);
    for (int i = 0; i < kTileS / kPanel; ++i)
      bulk_load(v + i * kPanelBytes, tile(f.v, row / kPanel + i, head * 128), kPanelBytes, full);
    ring.next();
  }
}

// What a thread knows of its two rows of queries (8 apart).
struct Softmax {
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
};

// Scores to weights in place, in units of log2; rescales what was summed up. pos: last row that each query may see.
__device__ __forceinline__ void soften(float (&s)[kTileS / 2], float (&o)[64], Softmax& soft,
                                       float scale_log2, std::int64_t row0,
                                       const std::int64_t (&pos)[2]) {
  const int col = threadIdx.x % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = soft.top[half];
    const bool cut = row0 + kTileS - 1 > pos[half];
#pragma unroll
    for (int j = 0; j < kTileS / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[4 * j + 2 * half + e];
        x *= scale_log2;
        if (cut && row0 + 8 * j + col + e > pos[half]) x = -INFINITY;
        top = fmaxf(top, x);
      }
    }
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
    const float keep = exp2f(soft.top[half] - top);
    float sum = 0;
#pragma unroll
    for (int j = 0; j < kTileS / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[4 * j + 2 * half + e];
        x = exp2f(x - top);
        sum += x;
      }
    }
    soft.top[half] = top;
    soft.sum[half] = fmaf(soft.sum[half], keep, sum);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      o[4 * j + 2 * half] *= keep;
      o[4 * j + 2 * half + 1] *= keep;
    }
  }
}

__device__ __forceinline__ void attend(const Flash& f, const Ports& p, const Segment& segment,
                                       std::int64_t head, std::int64_t tok0, std::int64_t n_step,
                                       int group) {
  constexpr int kPanelBytes = kTileS * kPanelRow;
  const int lane = threadIdx.x % 32, row = group * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
  const std::int64_t pos[2] = {segment.pos + tok0 + row, segment.pos + tok0 + row + 8};
  float o[64];
#pragma unroll
  for (float& x : o) x = 0;
  Softmax soft;
  barrier_wait(p.q_full, 0);
  const std::uint64_t q = operand(p.q + group * 64 * kPanelRow);
  Ring<kStages> ring;
  for (std::int64_t step = 0; step < n_step; ++step) {
    const std::uint64_t k = operand(p.k + ring.stage * kKBytes),
                        v = operand(p.v + ring.stage * kVBytes);
    float s[kTileS / 2];
#pragma unroll
    for (float& x : s) x = 0;
    barrier_wait(&p.full[ring.stage], ring.parity);
    mma_fence();
#pragma unroll
    for (int i = 0; i < kKeyPanels * 4; ++i) {
      const int at = i / 4 * (kPanelBytes / 16) + i % 4 * 2;
      Wgmma<kTileS>::ss(s, q + at, k + at);
    }
    mma_commit();
    mma_wait<0>();
    hold(s);
    soften(s, o, soft, f.scale_log2, step * kTileS, pos);
    std::uint32_t weights[kTileS / 4];
#pragma unroll
    for (int i = 0; i < kTileS / 4; ++i) weights[i] = pack_half2(s[2 * i], s[2 * i + 1]);
    hold(o);
    mma_fence();
#pragma unroll
    for (int i = 0; i < kTileS / 16; ++i) {
      Wgmma<128>::rs(o, weights[4 * i], weights[4 * i + 1], weights[4 * i + 2], weights[4 * i + 3],
                     v + i / 4 * (kPanelBytes / 16) + i % 4 * 2);
    }
    mma_commit();
    mma_wait<0>();
    hold(o);
    if (threadIdx.x % 128 == 0) barrier_arrive(&p.empty[ring.stage]);
    ring.next();
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = soft.sum[half];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const std::int64_t t = tok0 + row + 8 * half;
    if (t >= segment.n_tok) continue;
    float* out = f.o.row(segment.begin + t) + head * 128 + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      out[8 * j] = o[4 * j + 2 * half] / sum;
      out[8 * j + 1] = o[4 * j + 2 * half + 1] / sum;
    }
  }
}

#endif

// blockIdx.x: tile of tokens, the last (it sees most rows) first; blockIdx.y: head of the group.
__global__ void __launch_bounds__(384, 1) flash_kernel(const __grid_constant__ Flash f) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ char raw[];
  const Segment segment = segment_of(f.batch, f.seg);
  const std::int64_t tok0 = static_cast<std::int64_t>(gridDim.x - 1 - blockIdx.x) * kTileQ;
  if (tok0 >= segment.n_tok) return;
  const std::int64_t last = min(tok0 + kTileQ, segment.n_tok) - 1,
                     n_step = (segment.pos + last + kTileS) / kTileS;
  char* base = raw + (1024 - (shared_address(raw) & 1023)) % 1024;
  char *k = base + kQBytes, *v = k + kStages * kKBytes;
  auto* barriers = reinterpret_cast<std::uint64_t*>(v + kStages * kVBytes);
  const Ports p{base, k, v, barriers, barriers + 1, barriers + 1 + kStages};
  if (threadIdx.x == 0) {
    barrier_init(p.q_full, 1);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&p.full[i], 1);
      barrier_init(&p.empty[i], 2);
    }
    barrier_init_done();
  }
  __syncthreads();
  const int group = static_cast<int>(threadIdx.x / 128) - 1;
  if (group < 0) {
    fewer_registers<24>();
    if (threadIdx.x == 0) copy_tiles(f, p, blockIdx.y, tok0, n_step);
  } else {
    more_registers<240>();
    attend(f, p, segment, blockIdx.y, tok0, n_step, group);
  }
#endif
}

unsigned blocks_for(std::int64_t n, std::int64_t per) {
  return static_cast<unsigned>((n + per - 1) / per);
}

void rows_to_panels(const Panels& to, const MlaCache& cache, const BatchView& batch, int seg,
                    cudaStream_t stream) {
  const unsigned blocks = blocks_for(to.rows * to.n_panel * kPanelPieces, kThreads);
  switch (cache.type) {
    case CacheType::kF32:
      rows_kernel<float><<<blocks, kThreads, 0, stream>>>(to, cache, batch, seg);
      break;
    case CacheType::kF16:
      rows_kernel<__half><<<blocks, kThreads, 0, stream>>>(to, cache, batch, seg);
      break;
    case CacheType::kBF16:
      rows_kernel<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(to, cache, batch, seg);
      break;
  }
  check_launch("rows_kernel");
}

}  // namespace

MlaScratch mla_scratch(std::int64_t n_ctx, std::int64_t kv_latent, std::int64_t n_tok) {
  MlaScratch s;
  s.rows = (n_ctx + 255) / 256 * 256;
  s.toks = (n_tok + kTileQ - 1) / kTileQ * kTileQ;
  const std::int64_t latent_panels = kv_latent / kPanel;
  s.fixed = s.rows * (latent_panels + 1) * kPanelRow + 2 * latent_panels * 128 * kPanelRow;
  // Per head: its parts of k_b and v_b, keys (2 panels), values (rows / 64 panels of 128), queries (3 panels).
  s.per_head = (2 * latent_panels * 128 + 4 * s.rows + kKeyPanels * s.toks) * kPanelRow;
  return s;
}

void mla_prefill(View<float> o, View<const float> q, const Weight& k_b, const Weight& v_b,
                 float scale, const MlaCache& cache, const BatchView& batch, std::byte* scratch,
                 std::size_t scratch_bytes, cudaStream_t stream) {
  const MlaScratch need = mla_scratch(cache.n_ctx, cache.kv_latent, batch.n_tok);
  const std::int64_t n_head = k_b.n_mat, latent_panels = cache.kv_latent / kPanel,
                     fit = (static_cast<std::int64_t>(scratch_bytes) - need.fixed) / need.per_head,
                     step = std::min(n_head, fit);
  if (step < 1) throw DeviceError("mla_prefill: the workspace does not hold one head");
  std::byte* at = scratch;
  const auto take = [&](std::int64_t rows, std::int64_t n_panel) {
    Panels p{reinterpret_cast<__half*>(at), rows, n_panel};
    at += rows * n_panel * kPanelRow;
    return p;
  };
  const Panels rows = take(need.rows, latent_panels + 1);
  // The product's tiles are 256 rows of its second operand: an odd number of heads needs room for one more.
  const std::int64_t weight_rows = (step * 128 + 255) / 256 * 256;
  const Panels wk = take(weight_rows, latent_panels), wv = take(weight_rows, latent_panels);
  const Panels k = take(need.rows, 2 * step), v = take(step * 128, need.rows / kPanel),
               queries = take(need.toks, kKeyPanels * step);
  const Panels latent{rows.data, rows.rows, latent_panels},
      rope{rows.data + rows.rows * latent_panels * kPanel, rows.rows, 1};
  Weight flat = v_b;  // matrices lie one after another: all heads' rows are rows of one
  flat.n_out *= flat.n_mat;
  flat.n_mat = 1;
  for (int seg = 0; seg < batch.n_seg; ++seg) {
    rows_to_panels(rows, cache, batch, seg, stream);
    for (std::int64_t h = 0; h < n_head; h += step) {
      const std::int64_t n = std::min(step, n_head - h);
      transposed_to_panels(wk, k_b, h, n, stream);
      weight_to_panels(wv, nullptr, flat, 0, h * 128, n * 128, 1, stream);
      Gemm expand;
      expand.a = latent;
      expand.b = wk;
      expand.m = need.rows;
      expand.n = n * 128;
      expand.out = {k.data, k.rows, 2 * n};
      expand.limit = {batch.pos, batch.seg_begin, seg, true};
      gemm(expand, stream);
      expand.a = wv;
      expand.b = latent;
      expand.m = n * 128;
      expand.n = need.rows;
      expand.out = {v.data, n * 128, v.n_panel};
      expand.limit.on_m = false;
      gemm(expand, stream);
      const Panels heads{queries.data, queries.rows, kKeyPanels * n};
      queries_kernel<<<blocks_for(batch.n_tok * heads.n_panel * kPanelPieces, kThreads), kThreads,
                       0, stream>>>(heads, q, h, batch, seg);
      const Flash f{o.columns(h * 128, n * 128),
                    heads,
                    Panels{k.data, k.rows, 2 * n},
                    rope,
                    expand.out,
                    scale * 1.44269504f,
                    batch,
                    seg};
      allow_shared(flash_kernel, kShared);
      flash_kernel<<<dim3(blocks_for(batch.n_tok, kTileQ), static_cast<unsigned>(n)), 384, kShared,
                     stream>>>(f);
      check_launch("flash_kernel");
    }
  }
}

}  // namespace k3::cuda
