// With G_t the sum of g over a chunk's tokens up to t, S the state before the chunk, and for tokens s <= t of the chunk
//   A[t,s] = sum_i k_t k_s exp(G_t - G_s)   B[t,s] = sum_i q_t k_s exp(G_t - G_s) / sqrt(N)
// the recurrence of the model becomes
//   E = (I + diag(beta) A')^-1 diag(beta) (V - (k exp(G)) S)      A': A below its diagonal
//   O = (q exp(G) / sqrt(N)) S + B' E                              B': B up to its diagonal
//   S <- exp(G_last) S + (k exp(G_last - G))^T E
// Every exponent is a difference of sums that is never positive, so nothing overflows however strong the decay.
// Sums of g are kept in units of log2(e), so that a decay is one ex2.
// A first kernel makes the 16 x 16 matrices of all chunks at once; a second walks the chunks of a head.
#include <algorithm>

#include "kernels/cuda/check.h"
#include "kernels/cuda/kda_chunk.h"
#include "kernels/cuda/reduce.cuh"

namespace k3::cuda {
namespace {

constexpr int kC = static_cast<int>(kKdaChunk);
constexpr int kN = static_cast<int>(kKdaDim);
constexpr int kThreads = 128;
constexpr int kCols = 32;      // value columns of a block
constexpr int kRows = kN / 8;  // key channels of half a warp
constexpr int kMatrix = kC * kC;

struct Heads {
  View<float> o;
  View<const float> q, k, v, g, beta;
  KdaState state;
  BatchView batch;
  float* scratch;  // per chunk and head: T [16][16], B [16][16]
};

// Chunks of all segments are numbered in one row; numbers may be skipped between segments.
__device__ __forceinline__ std::int64_t first_chunk(const BatchView& b, int seg) {
  return b.seg_begin[seg] / kC + seg;
}

constexpr float kLog2E = 1.44269504f;
__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float dot4(const float4& a, const float4& b, float sum) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

constexpr int kPairs = kC * (kC + 1) / 2;  // tokens s <= t
constexpr int kPairThreads = 160;          // whole warps
constexpr int kPadded = kN + 4;            // rows whose 16-byte pieces fall on other banks

// A block per chunk and head; blockIdx.x: number of the chunk, blockIdx.y: head. A thread per pair of tokens.
__global__ void __launch_bounds__(kPairThreads)
    chunk_matrices_kernel(const __grid_constant__ Heads h) {
  __shared__ __align__(16) float q[kC][kPadded], k[kC][kPadded], sum[kC][kPadded];
  __shared__ float a[kC][kC + 1], beta[kC];
  int seg = 0;
  while (seg + 1 < h.batch.n_seg && first_chunk(h.batch, seg + 1) <= blockIdx.x) ++seg;
  const std::int64_t t0 = h.batch.seg_begin[seg] +
                          (static_cast<std::int64_t>(blockIdx.x) - first_chunk(h.batch, seg)) * kC;
  const int n =
      static_cast<int>(min(static_cast<std::int64_t>(kC), h.batch.seg_begin[seg + 1] - t0));
  if (n <= 0) return;
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t head = blockIdx.y, c = head * kN + thread;
  if (thread < kN) {
    float total = 0;
#pragma unroll
    for (int t = 0; t < kC; ++t) {
      const bool here = t < n;
      sum[t][thread] = total += here ? h.g.row(t0 + t)[c] * kLog2E : 0.0f;
      q[t][thread] = here ? h.q.row(t0 + t)[c] : 0.0f;
      k[t][thread] = here ? h.k.row(t0 + t)[c] : 0.0f;
    }
  } else if (thread < kN + kC) {
    const int t = thread - kN;
    beta[t] = t < n ? h.beta.row(t0 + t)[head] : 0.0f;
  }
  __syncthreads();
  float* out_t = h.scratch + (blockIdx.x * h.state.n_head + head) * 2 * kMatrix;
  float* out_b = out_t + kMatrix;
  if (thread < kPairs) {
    int t = 0, s = thread;
    while (s > t) s -= ++t;
    float with_k = 0, with_q = 0;
#pragma unroll 4
    for (int i = 0; i < kN; i += 4) {
      const float4 later = *reinterpret_cast<const float4*>(&sum[t][i]),
                   sooner = *reinterpret_cast<const float4*>(&sum[s][i]);
      float4 decayed = *reinterpret_cast<const float4*>(&k[s][i]);
      decayed.x *= exp2_of(later.x - sooner.x);
      decayed.y *= exp2_of(later.y - sooner.y);
      decayed.z *= exp2_of(later.z - sooner.z);
      decayed.w *= exp2_of(later.w - sooner.w);
      with_k = dot4(*reinterpret_cast<const float4*>(&k[t][i]), decayed, with_k);
      with_q = dot4(*reinterpret_cast<const float4*>(&q[t][i]), decayed, with_q);
    }
    a[t][s] = with_k;
    out_b[t * kC + s] = with_q / sqrtf(static_cast<float>(kN));
    if (s < t) out_b[s * kC + t] = 0;
  }
  __syncthreads();
  // Forward substitution, a thread per column: (I + diag(beta) A') T = I.
  if (thread >= kC) return;
  float x[kC];
#pragma unroll
  for (int t = 0; t < kC; ++t) {
    float before = 0;
#pragma unroll
    for (int s = 0; s < t; ++s) before = fmaf(a[t][s], x[s], before);
    x[t] = (t == thread ? 1.0f : 0.0f) - beta[t] * before;
    out_t[t * kC + thread] = x[t] * beta[thread];
  }
}

// Shared memory of a block that walks chunks. Two buffers of inputs: one is filled while the other is used.
struct Inputs {
  // As they come; then q exp(G) / sqrt(N), k exp(G_last - G), k exp(G).
  float q[kC][kN], k[kC][kN], g[kC][kN];
  float v[kC][kCols];
  float t[kC][kC], b[kC][kC];
};
struct Walk {
  Inputs in[2];
  float part[4][2][kC][kCols];  // of (k exp(G)) S and (q exp(G)) S, by warp
  float e[kC][kCols];
  float decay[kN];  // exp(G_last)
};

// 16 bytes from device to shared memory, in the background; zeros where not `here`.
__device__ __forceinline__ void fetch16(float* to, const float* from, bool here) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   static_cast<std::uint32_t>(__cvta_generic_to_shared(to))),
               "l"(__cvta_generic_to_global(from)), "r"(here ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void fetch(const Heads& h, Inputs& in, std::int64_t t0, int n,
                                      std::int64_t chunk, std::int64_t head, std::int64_t col0) {
  const std::int64_t last = t0 + n - 1;
  for (int i = static_cast<int>(threadIdx.x); i < kC * kN / 4; i += kThreads) {
    const int t = i / (kN / 4), c = i % (kN / 4) * 4;
    const std::int64_t row = min(t0 + t, last), at = head * kN + c;
    fetch16(&in.q[t][c], h.q.row(row) + at, t < n);
    fetch16(&in.k[t][c], h.k.row(row) + at, t < n);
    fetch16(&in.g[t][c], h.g.row(row) + at, t < n);
  }
  const int t = static_cast<int>(threadIdx.x) / (kCols / 4), c = threadIdx.x % (kCols / 4) * 4;
  fetch16(&in.v[t][c], h.v.row(min(t0 + t, last)) + head * kN + col0 + c, t < n);
  const float* matrices = h.scratch + (chunk * h.state.n_head + head) * 2 * kMatrix;
  fetch16(threadIdx.x < kMatrix / 4 ? &in.t[0][0] + threadIdx.x * 4
                                    : &in.b[0][0] + (threadIdx.x - kMatrix / 4) * 4,
          matrices + threadIdx.x * 4, true);
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// A thread per channel: raw inputs to those of the formulas, in place.
__device__ __forceinline__ void decay_inputs(Inputs& in, float (&decay)[kN]) {
  const int i = static_cast<int>(threadIdx.x);
  const float scale = 1.0f / sqrtf(static_cast<float>(kN));
  float sum[kC], total = 0;
#pragma unroll
  for (int t = 0; t < kC; ++t) sum[t] = total += in.g[t][i] * kLog2E;
#pragma unroll
  for (int t = 0; t < kC; ++t) {
    const float k = in.k[t][i], grown = exp2_of(sum[t]);
    in.g[t][i] = k * grown;
    in.q[t][i] *= grown * scale;
    in.k[t][i] = k * exp2_of(total - sum[t]);
  }
  decay[i] = exp2_of(total);
}

// Half a warp holds kRows channels of the block's columns, a lane two columns: s[row][column].
using StatePart = float[kRows][2];

// Sums of the two halves of a warp: a lane of the first half gets that of its first column, of the second its second.
__device__ __forceinline__ float join_halves(float first, float second, int half) {
  const float other = __shfl_xor_sync(0xffffffffu, half == 0 ? second : first, 16);
  return (half == 0 ? first : second) + other;
}

// This warp's channels' part of the two products with the state.
__device__ __forceinline__ void state_products(const Inputs& in, const StatePart& s,
                                               float (&part)[2][kC][kCols], int row0) {
  const int half = threadIdx.x % 32 / 16, col = threadIdx.x % 16 * 2 + half;
#pragma unroll 2
  for (int t = 0; t < kC; ++t) {
    float x[2] = {0, 0}, y[2] = {0, 0};
#pragma unroll
    for (int r = 0; r < kRows; r += 4) {
      const float4 k = *reinterpret_cast<const float4*>(&in.g[t][row0 + r]);
      const float4 q = *reinterpret_cast<const float4*>(&in.q[t][row0 + r]);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float4 column = {s[r][j], s[r + 1][j], s[r + 2][j], s[r + 3][j]};
        x[j] = dot4(k, column, x[j]);
        y[j] = dot4(q, column, y[j]);
      }
    }
    part[0][t][col] = join_halves(x[0], x[1], half);
    part[1][t][col] = join_halves(y[0], y[1], half);
  }
}

// S <- exp(G_last) S + (k exp(G_last - G))^T E for this warp's channels.
__device__ __forceinline__ void update_state(const Inputs& in, const float (&decay)[kN],
                                             const float (&e)[kC][kCols], StatePart& s, int row0) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    s[r][0] *= decay[row0 + r];
    s[r][1] *= decay[row0 + r];
  }
#pragma unroll 4
  for (int t = 0; t < kC; ++t) {
    const float2 et = *reinterpret_cast<const float2*>(&e[t][threadIdx.x % 16 * 2]);
#pragma unroll
    for (int r = 0; r < kRows; r += 4) {
      const float4 k = *reinterpret_cast<const float4*>(&in.k[t][row0 + r]);
      const float row[4] = {k.x, k.y, k.z, k.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[r + i][0] = fmaf(row[i], et.x, s[r + i][0]);
        s[r + i][1] = fmaf(row[i], et.y, s[r + i][1]);
      }
    }
  }
}

// y[i] += row `mine + i` of a 16 x 16 matrix times this lane's column.
__device__ __forceinline__ void small_product(const float (&m)[kC][kC],
                                              const float (&column)[kC][kCols], int mine,
                                              float (&y)[4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int s = 0; s < kC; s += 4) {
    const float4 v = {column[s][lane], column[s + 1][lane], column[s + 2][lane],
                      column[s + 3][lane]};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      y[i] = dot4(*reinterpret_cast<const float4*>(&m[mine + i][s]), v, y[i]);
  }
}

// Outputs of 4 tokens, and E for all, from the parts of the products.
__device__ __forceinline__ void chunk_outputs(const Heads& h, Walk& w, Inputs& in, std::int64_t t0,
                                              int n, std::int64_t col) {
  const int lane = threadIdx.x % 32, mine = static_cast<int>(threadIdx.x) / 32 * 4;
  float o[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int t = mine + i;
    const auto total = [&](int which) {
      return (w.part[0][which][t][lane] + w.part[1][which][t][lane]) +
             (w.part[2][which][t][lane] + w.part[3][which][t][lane]);
    };
    in.v[t][lane] -= total(0);
    o[i] = total(1);
  }
  __syncthreads();
  float e[4] = {};
  small_product(in.t, in.v, mine, e);
#pragma unroll
  for (int i = 0; i < 4; ++i) w.e[mine + i][lane] = e[i];
  __syncthreads();
  small_product(in.b, w.e, mine, o);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (mine + i < n) h.o.row(t0 + mine + i)[col] = o[i];
  }
}

// blockIdx: kCols value columns, head, segment. The state stays in registers.
__global__ void __launch_bounds__(kThreads, 3) chunk_walk_kernel(const __grid_constant__ Heads h) {
  extern __shared__ __align__(16) char raw[];
  Walk& w = *reinterpret_cast<Walk*>(raw);
  const int seg = static_cast<int>(blockIdx.z);
  const std::int64_t begin = h.batch.seg_begin[seg], end = h.batch.seg_begin[seg + 1];
  if (begin == end) return;
  const int row0 = static_cast<int>(threadIdx.x) / 16 * kRows;
  const std::int64_t head = blockIdx.y, col0 = blockIdx.x * kCols,
                     first = first_chunk(h.batch, seg);
  float* stored = h.state.s + (h.batch.slot[begin] * h.state.n_head + head) * kN * kN + col0 +
                  threadIdx.x % 16 * 2;
  const bool fresh = h.batch.pos[begin] == 0;
  StatePart s;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    for (int j = 0; j < 2; ++j) s[r][j] = fresh ? 0.0f : stored[(row0 + r) * kN + j];
  }
  const auto size = [&](std::int64_t t0) {
    return static_cast<int>(min(static_cast<std::int64_t>(kC), end - t0));
  };
  fetch(h, w.in[0], begin, size(begin), first, head, col0);
  for (std::int64_t t0 = begin, chunk = 0; t0 < end; t0 += kC, ++chunk) {
    Inputs& in = w.in[chunk % 2];
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    if (t0 + kC < end)
      fetch(h, w.in[(chunk + 1) % 2], t0 + kC, size(t0 + kC), first + chunk + 1, head, col0);
    decay_inputs(in, w.decay);
    __syncthreads();
    state_products(in, s, w.part[threadIdx.x / 32], row0);
    __syncthreads();
    chunk_outputs(h, w, in, t0, size(t0), head * kN + col0 + threadIdx.x % 32);
    update_state(in, w.decay, w.e, s, row0);
    __syncthreads();
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    for (int j = 0; j < 2; ++j) stored[(row0 + r) * kN + j] = s[r][j];
  }
}

constexpr int kConvRun = 32;  // tokens of a thread
constexpr int kMaxTaps = 8;

// A thread per channel and run of tokens; blockIdx.y: run within the segment blockIdx.z.
__global__ void __launch_bounds__(kThreads)
    conv_tokens_kernel(const View<float> qkv, const View<const float> u, const float* conv,
                       const KdaState state, const BatchView batch) {
  const std::int64_t c = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t begin = batch.seg_begin[blockIdx.z], end = batch.seg_begin[blockIdx.z + 1];
  const std::int64_t t0 = begin + static_cast<std::int64_t>(blockIdx.y) * kConvRun,
                     t1 = min(t0 + kConvRun, end);
  if (c >= u.cols || t0 >= t1) return;
  const int taps = static_cast<int>(state.conv_kernel), past = taps - 1;
  const float* window = state.window + batch.slot[begin] * past * u.cols + c;
  const bool fresh = batch.pos[begin] == 0;
  float w[kMaxTaps], in[kMaxTaps];
#pragma unroll
  for (int j = 0; j < kMaxTaps; ++j) {
    w[j] = j < taps ? conv[c * taps + j] : 0.0f;
    const std::int64_t t = t0 - past + j;
    in[j] = 0;
    if (j < past) {
      if (t >= begin)
        in[j] = u.row(t)[c];
      else if (!fresh)
        in[j] = window[(past + t - begin) * u.cols];
    }
  }
  for (std::int64_t t = t0; t < t1; ++t) {
    const float newest = u.row(t)[c];
    float z = 0;
#pragma unroll
    for (int j = 0; j < kMaxTaps; ++j) {
      if (j == past) in[j] = newest;
      if (j < taps) z = fmaf(w[j], in[j], z);
    }
    qkv.row(t)[c] = z * sigmoid(z);
#pragma unroll
    for (int j = 0; j + 1 < kMaxTaps; ++j) in[j] = in[j + 1];
  }
}

// After it: the last inputs of each segment become its window.
__global__ void __launch_bounds__(kThreads)
    conv_window_kernel(const View<const float> u, const KdaState state, const BatchView batch) {
  const std::int64_t c = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t begin = batch.seg_begin[blockIdx.y], end = batch.seg_begin[blockIdx.y + 1];
  if (c >= u.cols || begin == end) return;
  const int past = static_cast<int>(state.conv_kernel) - 1;
  float* window = state.window + batch.slot[begin] * past * u.cols + c;
  const bool fresh = batch.pos[begin] == 0;
  // Oldest first: what is overwritten has been moved on by then.
  for (int j = 0; j < past; ++j) {
    const std::int64_t t = end - past + j;
    float v = 0;
    if (t >= begin)
      v = u.row(t)[c];
    else if (!fresh)
      v = window[(past + t - begin) * u.cols];
    window[j * u.cols] = v;
  }
}

unsigned blocks_for(std::int64_t n, std::int64_t per) {
  return static_cast<unsigned>((n + per - 1) / per);
}

}  // namespace

void kda_chunks(View<float> o, View<const float> q, View<const float> k, View<const float> v,
                View<const float> g, View<const float> beta, const KdaState& state,
                const BatchView& batch, float* scratch, cudaStream_t stream) {
  if (o.empty()) return;
  const Heads h{o, q, k, v, g, beta, state, batch, scratch};
  const auto heads = static_cast<unsigned>(state.n_head), segs = static_cast<unsigned>(batch.n_seg);
  const dim3 chunks(static_cast<unsigned>(batch.n_tok / kC + batch.n_seg + 1), heads);
  chunk_matrices_kernel<<<chunks, kPairThreads, 0, stream>>>(h);
  check_launch("chunk_matrices_kernel");
  check(cudaFuncSetAttribute(chunk_walk_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(sizeof(Walk))),
        "cudaFuncSetAttribute");
  chunk_walk_kernel<<<dim3(kN / kCols, heads, segs), kThreads, sizeof(Walk), stream>>>(h);
  check_launch("chunk_walk_kernel");
}

void kda_conv_tokens(View<float> qkv, View<const float> u, const float* conv, const KdaState& state,
                     const BatchView& batch, cudaStream_t stream) {
  if (u.empty()) return;
  const unsigned channels = blocks_for(u.cols, kThreads), segs = static_cast<unsigned>(batch.n_seg);
  conv_tokens_kernel<<<dim3(channels, blocks_for(batch.n_tok, kConvRun), segs), kThreads, 0,
                       stream>>>(qkv, u, conv, state, batch);
  conv_window_kernel<<<dim3(channels, segs), kThreads, 0, stream>>>(u, state, batch);
  check_launch("conv_tokens_kernel");
}

}  // namespace k3::cuda
