#include <stdexcept>
#include <string>

#include "kernels/cuda/check.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/reduce.cuh"

namespace k3::cuda {
namespace {

unsigned blocks_for(std::int64_t n, std::int64_t per) {
  return static_cast<unsigned>((n + per - 1) / per);
}

// A thread per channel and segment; it walks the segment's tokens with the taps' inputs in registers.
constexpr int kMaxTaps = 8;

__global__ void conv_kernel(View<float> qkv, View<const float> u, const float* conv, KdaState state,
                            BatchView batch) {
  const std::int64_t c = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (c >= u.cols) return;
  const std::int64_t t0 = batch.seg_begin[blockIdx.y], t1 = batch.seg_begin[blockIdx.y + 1];
  if (t0 == t1) return;
  const int taps = static_cast<int>(state.conv_kernel), past = taps - 1;
  float* window = state.window + batch.slot[t0] * past * u.cols + c;
  const bool fresh = batch.pos[t0] == 0;
  float w[kMaxTaps], in[kMaxTaps];
  for (int j = 0; j < taps; ++j) w[j] = conv[c * taps + j];
  for (int j = 0; j < past; ++j) in[j] = fresh ? 0.0f : window[j * u.cols];
  for (std::int64_t t = t0; t < t1; ++t) {
    in[past] = u.row(t)[c];
    float z = 0;
    for (int j = 0; j < taps; ++j) z = fmaf(w[j], in[j], z);
    qkv.row(t)[c] = z * sigmoid(z);
    for (int j = 0; j < past; ++j) in[j] = in[j + 1];
  }
  for (int j = 0; j < past; ++j) window[j * u.cols] = in[j];
}

// A warp per head of one token.
__global__ void l2_kernel(View<float> y, int head_dim, float eps) {
  const std::int64_t head =
      static_cast<std::int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  if (head >= y.cols / head_dim) return;
  float* h = y.row(blockIdx.y) + head * head_dim;
  float square = 0;
  for (int i = threadIdx.x % 32; i < head_dim; i += 32) square = fmaf(h[i], h[i], square);
  const float scale = 1.0f / fmaxf(sqrtf(warp_sum(square)), eps);
  for (int i = threadIdx.x % 32; i < head_dim; i += 32) h[i] *= scale;
}

__global__ void gates_kernel(View<float> g, View<float> beta, const float* dt, const float* a,
                             int head_dim, bool safe_gate, float lower_bound) {
  const std::int64_t c = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x,
                     t = blockIdx.y;
  if (c < g.cols) {
    const float f = g.row(t)[c] + dt[c], ah = a[c / head_dim];
    g.row(t)[c] =
        safe_gate ? lower_bound * sigmoid(-ah * f) : ah * (f > 20.0f ? f : log1pf(expf(f)));
  }
  if (c < beta.cols) beta.row(t)[c] = sigmoid(beta.row(t)[c]);
}

// One head of one segment, kCols value columns of it: thread (column, part) keeps N / kParts state rows of its column in
// registers. q, k and the decay of a token are shared by all columns.
constexpr int kParts = 4;
constexpr int kCols = 32;

template <int N>
__global__ void __launch_bounds__(kParts* kCols)
    scan_kernel(View<float> o, View<const float> q, View<const float> k, View<const float> v,
                View<const float> g, View<const float> beta, KdaState state, BatchView batch) {
  constexpr int kRows = N / kParts;
  __shared__ float sq[N], sk[N], sd[N];
  const std::int64_t t0 = batch.seg_begin[blockIdx.z], t1 = batch.seg_begin[blockIdx.z + 1];
  if (t0 == t1) return;
  const int part = threadIdx.x % kParts, col = blockIdx.x * kCols + threadIdx.x / kParts;
  const bool alive = col < N;
  const std::int64_t head = blockIdx.y, c = head * N;
  float* stored = state.s + (batch.slot[t0] * state.n_head + head) * N * N;
  const bool fresh = batch.pos[t0] == 0;
  float s[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r)
    s[r] = fresh || !alive ? 0.0f : stored[(r * kParts + part) * N + col];
  const float scale = 1.0f / sqrtf(static_cast<float>(N));
  for (std::int64_t t = t0; t < t1; ++t) {
    __syncthreads();
    for (int i = threadIdx.x; i < N; i += blockDim.x) {
      sq[i] = q.row(t)[c + i] * scale;
      sk[i] = k.row(t)[c + i];
      sd[i] = expf(g.row(t)[c + i]);
    }
    __syncthreads();
    float pred = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      s[r] *= sd[r * kParts + part];
      pred = fmaf(s[r], sk[r * kParts + part], pred);
    }
    for (int x = 1; x < kParts; x *= 2) pred += __shfl_xor_sync(0xffffffffu, pred, x);
    const float e = alive ? beta.row(t)[head] * (v.row(t)[c + col] - pred) : 0.0f;
    float out = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      s[r] = fmaf(sk[r * kParts + part], e, s[r]);
      out = fmaf(s[r], sq[r * kParts + part], out);
    }
    for (int x = 1; x < kParts; x *= 2) out += __shfl_xor_sync(0xffffffffu, out, x);
    if (alive && part == 0) o.row(t)[c + col] = out;
  }
  if (!alive) return;
#pragma unroll
  for (int r = 0; r < kRows; ++r) stored[(r * kParts + part) * N + col] = s[r];
}

// Any head size: a thread per value column, the state in device memory.
__global__ void scan_any_kernel(View<float> o, View<const float> q, View<const float> k,
                                View<const float> v, View<const float> g, View<const float> beta,
                                KdaState state, BatchView batch) {
  const int n = static_cast<int>(state.head_dim);
  const std::int64_t t0 = batch.seg_begin[blockIdx.z], t1 = batch.seg_begin[blockIdx.z + 1];
  const int col = blockIdx.x * blockDim.x + threadIdx.x;
  if (t0 == t1 || col >= n) return;
  const std::int64_t head = blockIdx.y, c = head * n;
  float* s = state.s + (batch.slot[t0] * state.n_head + head) * n * n + col;
  const bool fresh = batch.pos[t0] == 0;
  const float scale = 1.0f / sqrtf(static_cast<float>(n));
  for (std::int64_t t = t0; t < t1; ++t) {
    float pred = 0;
    for (int i = 0; i < n; ++i) {
      const float decayed = fresh && t == t0 ? 0.0f : s[i * n] * expf(g.row(t)[c + i]);
      s[i * n] = decayed;
      pred = fmaf(decayed, k.row(t)[c + i], pred);
    }
    const float e = beta.row(t)[head] * (v.row(t)[c + col] - pred);
    float out = 0;
    for (int i = 0; i < n; ++i) {
      s[i * n] = fmaf(k.row(t)[c + i], e, s[i * n]);
      out = fmaf(s[i * n], q.row(t)[c + i] * scale, out);
    }
    o.row(t)[c + col] = out;
  }
}

__global__ void output_gate_kernel(View<float> o, View<const float> gate, const float* w,
                                   int head_dim, float eps) {
  const std::int64_t head =
      static_cast<std::int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  if (head >= o.cols / head_dim) return;
  const std::int64_t t = blockIdx.y, c = head * head_dim;
  float square = 0;
  for (int i = threadIdx.x % 32; i < head_dim; i += 32)
    square = fmaf(o.row(t)[c + i], o.row(t)[c + i], square);
  const float scale = 1.0f / sqrtf(warp_sum(square) / static_cast<float>(head_dim) + eps);
  for (int i = threadIdx.x % 32; i < head_dim; i += 32) {
    o.row(t)[c + i] = o.row(t)[c + i] * scale * w[i] * sigmoid(gate.row(t)[c + i]);
  }
}

}  // namespace

void kda_conv(View<float> qkv, View<const float> u, const float* conv, const KdaState& state,
              const BatchView& batch, cudaStream_t stream) {
  if (u.empty()) return;
  if (state.conv_kernel > kMaxTaps) {
    throw std::invalid_argument("kda_conv: " + std::to_string(state.conv_kernel) +
                                " taps, at most 8 are supported");
  }
  conv_kernel<<<dim3(blocks_for(u.cols, 128), static_cast<unsigned>(batch.n_seg)), 128, 0,
                stream>>>(qkv, u, conv, state, batch);
  check_launch("conv_kernel");
}

void l2_norm_heads(View<float> y, std::int64_t head_dim, float eps, cudaStream_t stream) {
  if (y.empty()) return;
  l2_kernel<<<dim3(blocks_for(y.cols / head_dim, 4), static_cast<unsigned>(y.rows)), 128, 0,
              stream>>>(y, static_cast<int>(head_dim), eps);
  check_launch("l2_kernel");
}

void kda_gates(View<float> g, View<float> beta, const float* dt, const float* a,
               std::int64_t head_dim, bool safe_gate, float lower_bound, cudaStream_t stream) {
  if (g.empty()) return;
  gates_kernel<<<dim3(blocks_for(g.cols, 256), static_cast<unsigned>(g.rows)), 256, 0, stream>>>(
      g, beta, dt, a, static_cast<int>(head_dim), safe_gate, lower_bound);
  check_launch("gates_kernel");
}

void kda_scan(View<float> o, View<const float> q, View<const float> k, View<const float> v,
              View<const float> g, View<const float> beta, const KdaState& state,
              const BatchView& batch, cudaStream_t stream) {
  if (o.empty()) return;
  const auto heads = static_cast<unsigned>(state.n_head),
             segments = static_cast<unsigned>(batch.n_seg);
  auto launch = [&]<int N>() {
    scan_kernel<N><<<dim3((N + kCols - 1) / kCols, heads, segments), kParts * kCols, 0, stream>>>(
        o, q, k, v, g, beta, state, batch);
  };
  switch (state.head_dim) {
    case 16:
      launch.template operator()<16>();
      break;
    case 32:
      launch.template operator()<32>();
      break;
    case 64:
      launch.template operator()<64>();
      break;
    case 128:
      launch.template operator()<128>();
      break;
    default:
      scan_any_kernel<<<dim3(blocks_for(state.head_dim, 64), heads, segments), 64, 0, stream>>>(
          o, q, k, v, g, beta, state, batch);
  }
  check_launch("scan_kernel");
}

void kda_output_gate(View<float> o, View<const float> gate, const float* w, std::int64_t head_dim,
                     float eps, cudaStream_t stream) {
  if (o.empty()) return;
  output_gate_kernel<<<dim3(blocks_for(o.cols / head_dim, 4), static_cast<unsigned>(o.rows)), 128,
                       0, stream>>>(o, gate, w, static_cast<int>(head_dim), eps);
  check_launch("output_gate_kernel");
}

}  // namespace k3::cuda
