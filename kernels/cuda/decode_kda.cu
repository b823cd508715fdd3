// One token through a KDA layer between its projections, in the fast path: a block per head, the head's state in registers.
#include "kernels/cuda/check.h"
#include "kernels/cuda/gemv.cuh"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/pdl.cuh"

namespace k3::cuda {
namespace {

constexpr int N = 128;  // head size: the published model's
constexpr int kThreads = 512;
constexpr int kParts = kThreads / N;  // of the state's rows
constexpr int kRows = N / kParts;     // state rows a thread holds, of one column
constexpr int kMaxPast = 7;

struct Step {
  float* o;
  const float* u;
  const float* f;
  const float* gate;
  const float* beta;  // before the sigmoid
  gemv::Rows f_b;
  const float* conv;
  const float* dt;
  const float* a;
  const float* norm_w;
  float eps, lower_bound;
  bool safe_gate;
  KdaState state;
  const std::int32_t* slot;
  const std::int32_t* pos;
};

// A quarter of a row of f_b, kept from before the predecessor has finished.
struct DecayRow {
  int4 w[8];
  float scale;
};

__device__ __forceinline__ DecayRow load_decay(const gemv::Rows& m, int row, int quarter) {
  DecayRow r{};
  const std::byte* p = m.data + row * m.row_bytes;
  if (m.codec == gemv::Codec::kQ8) {
    r.w[0] = gemv::load_stream(p + quarter * 32);
    r.w[1] = gemv::load_stream(p + quarter * 32 + 16);
    r.scale = gemv::half_at(p + m.scales + quarter * 2);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) r.w[i] = gemv::load_stream(p + quarter * 128 + i * 16);
  }
  return r;
}

__device__ __forceinline__ float dot_decay(const DecayRow& r, bool q8, const float* f) {
  float sum = 0;
  if (!q8) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sum = fmaf(__int_as_float(r.w[i].x), f[4 * i], sum);
      sum = fmaf(__int_as_float(r.w[i].y), f[4 * i + 1], sum);
      sum = fmaf(__int_as_float(r.w[i].z), f[4 * i + 2], sum);
      sum = fmaf(__int_as_float(r.w[i].w), f[4 * i + 3], sum);
    }
    return sum;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int word[4] = {r.w[i].x, r.w[i].y, r.w[i].z, r.w[i].w};
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const auto code = static_cast<std::int8_t>(word[j / 4] >> (8 * (j % 4)));
      sum = fmaf(static_cast<float>(code), f[16 * i + j], sum);
    }
  }
  return sum * r.scale;
}

struct Shared {
  float f[N], decay[N];
  float qkv[3][N];
  float part[kParts][N];
  float square[12];  // warps' sums
};

__global__ void __launch_bounds__(kThreads) kda_step_kernel(const __grid_constant__ Step l) {
  __shared__ Shared sh;
  let_successor_start();
  const int tid = threadIdx.x, head = blockIdx.x, col = tid % N, part = tid / N, warp = tid / 32;
  const std::int64_t d = l.state.n_head * N, slot = l.slot[0];
  const bool fresh = l.pos[0] == 0;
  float* stored = l.state.s + (slot * l.state.n_head + head) * N * N;
  // All of this was written before this step began: it can be on its way while the projections still run.
  float s[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) s[r] = stored[(part * kRows + r) * N + col];
  const DecayRow decay_row = load_decay(l.f_b, head * N + tid / 4, tid % 4);
  const int taps = static_cast<int>(l.state.conv_kernel), past = taps - 1;
  const std::int64_t channel = part * d + head * N + col;  // part: q, k, v
  float* window = l.state.window + slot * past * 3 * d + channel;
  float in[kMaxPast + 1], tap[kMaxPast + 1];
#pragma unroll
  for (int j = 0; j <= kMaxPast; ++j) {
    in[j] = part < 3 && j < past && !fresh ? window[j * 3 * d] : 0.0f;
    tap[j] = part < 3 && j < taps ? l.conv[channel * taps + j] : 0.0f;
  }
  wait_for_predecessor();

  if (tid < N) sh.f[tid] = l.f[tid];
  const float beta = sigmoid(l.beta[head]);
  if (part < 3) {
    const float now = l.u[channel];
    float z = 0;
#pragma unroll
    for (int j = 0; j <= kMaxPast; ++j) {
      if (j == past) in[j] = now;
      if (j <= past) z = fmaf(tap[j], in[j], z);
    }
    z = z * sigmoid(z);
    sh.qkv[part][col] = z;
#pragma unroll
    for (int j = 0; j < kMaxPast; ++j)
      if (j < past) window[j * 3 * d] = in[j + 1];
    const float square = warp_sum(z * z);
    if (tid % 32 == 0) sh.square[warp] = square;
  }
  __syncthreads();
  float g = dot_decay(decay_row, l.f_b.codec == gemv::Codec::kQ8, sh.f + tid % 4 * 32);
  g += __shfl_xor_sync(0xffffffffu, g, 1);
  g += __shfl_xor_sync(0xffffffffu, g, 2);
  if (tid % 4 == 0) {
    const float f = g + l.dt[head * N + tid / 4], a = l.a[head];
    sh.decay[tid / 4] =
        expf(l.safe_gate ? l.lower_bound * sigmoid(-a * f) : a * (f > 20.0f ? f : log1pf(expf(f))));
  }
  auto norm = [&](int first) {
    const float square =
        sh.square[first] + sh.square[first + 1] + sh.square[first + 2] + sh.square[first + 3];
    return 1.0f / fmaxf(sqrtf(square), l.eps);
  };
  const float q_scale = norm(0) / sqrtf(static_cast<float>(N)), k_scale = norm(4);
  __syncthreads();
  const float* q = sh.qkv[0] + part * kRows;
  const float* k = sh.qkv[1] + part * kRows;
  const float* decay = sh.decay + part * kRows;
  float pred = 0;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    s[r] = fresh ? 0.0f : s[r] * decay[r];
    pred = fmaf(s[r], k[r] * k_scale, pred);
  }
  sh.part[part][col] = pred;
  __syncthreads();
  pred = sh.part[0][col] + sh.part[1][col] + sh.part[2][col] + sh.part[3][col];
  const float e = beta * (sh.qkv[2][col] - pred);
  float out = 0;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    s[r] = fmaf(k[r] * k_scale, e, s[r]);
    out = fmaf(s[r], q[r] * q_scale, out);
    stored[(part * kRows + r) * N + col] = s[r];
  }
  __syncthreads();
  sh.part[part][col] = out;
  __syncthreads();
  if (tid < N) {
    out = sh.part[0][col] + sh.part[1][col] + sh.part[2][col] + sh.part[3][col];
    const float square = warp_sum(out * out);
    if (tid % 32 == 0) sh.square[warp] = square;
  }
  __syncthreads();
  if (tid < N) {
    const float square = sh.square[0] + sh.square[1] + sh.square[2] + sh.square[3];
    const float scale = 1.0f / sqrtf(square / static_cast<float>(N) + l.eps);
    l.o[head * N + tid] = out * scale * l.norm_w[tid] * sigmoid(l.gate[head * N + tid]);
  }
}

}  // namespace

bool fused_kda(const KdaStep& k, const KdaState& state, const BatchView& batch,
               cudaStream_t stream) {
  static_assert(kParts == 4, "the sums over parts are written out");
  if (batch.n_tok != 1 || state.head_dim != N || state.n_head == 0 || k.f_b->n_in != N ||
      state.conv_kernel - 1 > kMaxPast || !gemv::has_codec(*k.f_b) ||
      k.f_b->type == BlockType::kIQ1_S)
    return false;
  const Step step{
      k.o.data,    k.u.data, k.f.data,   k.gate.data, k.beta.data, gemv::rows_of(*k.f_b),
      k.conv,      k.dt,     k.a,        k.norm_w,    k.eps,       k.lower_bound,
      k.safe_gate, state,    batch.slot, batch.pos};
  launch_chained("kda_step_kernel", kda_step_kernel, dim3(static_cast<unsigned>(state.n_head)),
                 dim3(kThreads), 0, 1, stream, step);
  return true;
}

}  // namespace k3::cuda
