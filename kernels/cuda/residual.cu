#include <stdexcept>

#include "kernels/cuda/check.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/reduce.cuh"

namespace k3::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kMaxSources = 64;

// A block per token: scores of all sources, softmax, mixed stream and its norm.
__global__ void __launch_bounds__(kThreads)
    mix_norm_kernel(View<float> y, View<const float> x, const float* bank, int n_bank,
                    std::int64_t bank_stride, const float* score_w, const float* norm_w, float eps,
                    float* probs) {
  __shared__ float scratch[33];
  __shared__ float p[kMaxSources];
  const std::int64_t t = blockIdx.x, d = x.cols;
  auto source = [&](int s) { return s < n_bank ? bank + s * bank_stride + t * d : x.row(t); };
  if (n_bank == 0) {
    if (threadIdx.x == 0) p[0] = 1.0f;
  } else {
    for (int s = 0; s <= n_bank; ++s) {
      float dot = 0, square = 0;
      for (std::int64_t i = threadIdx.x; i < d; i += kThreads) {
        const float v = source(s)[i];
        dot = fmaf(score_w[i], v, dot);
        square = fmaf(v, v, square);
      }
      dot = block_sum(dot, scratch);
      square = block_sum(square, scratch);
      if (threadIdx.x == 0) p[s] = dot / sqrtf(square / static_cast<float>(d) + eps);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      float top = p[0], sum = 0;
      for (int s = 1; s <= n_bank; ++s) top = fmaxf(top, p[s]);
      for (int s = 0; s <= n_bank; ++s) sum += p[s] = expf(p[s] - top);
      for (int s = 0; s <= n_bank; ++s) {
        p[s] /= sum;
        if (probs != nullptr) probs[t * (n_bank + 1) + s] = p[s];
      }
    }
  }
  __syncthreads();
  float square = 0;
  for (std::int64_t i = threadIdx.x; i < d; i += kThreads) {
    float h = n_bank == 0 ? x.row(t)[i] : 0.0f;
    for (int s = 0; s <= n_bank && n_bank > 0; ++s) h = fmaf(p[s], source(s)[i], h);
    y.row(t)[i] = h;
    square = fmaf(h, h, square);
  }
  square = block_sum(square, scratch);
  const float scale = 1.0f / sqrtf(square / static_cast<float>(d) + eps);
  for (std::int64_t i = threadIdx.x; i < d; i += kThreads) y.row(t)[i] *= scale * norm_w[i];
}

__global__ void __launch_bounds__(kThreads)
    rms_norm_kernel(View<float> y, View<const float> x, const float* w, float eps) {
  __shared__ float scratch[33];
  const std::int64_t t = blockIdx.x;
  float square = 0;
  for (std::int64_t i = threadIdx.x; i < x.cols; i += kThreads)
    square = fmaf(x.row(t)[i], x.row(t)[i], square);
  square = block_sum(square, scratch);
  const float scale = 1.0f / sqrtf(square / static_cast<float>(x.cols) + eps);
  for (std::int64_t i = threadIdx.x; i < x.cols; i += kThreads)
    y.row(t)[i] = x.row(t)[i] * scale * w[i];
}

enum class Rows { kCopy, kAdd };

template <Rows Op>
__global__ void rows_kernel(View<float> y, View<const float> x) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x,
                     t = blockIdx.y;
  if (i >= y.cols) return;
  y.row(t)[i] = Op == Rows::kCopy ? x.row(t)[i] : y.row(t)[i] + x.row(t)[i];
}

constexpr int kMaxRanks = 64;
struct Widths {
  int a[kMaxRanks], b[kMaxRanks];
  int n;
};

__global__ void unpack_kernel(View<float> a, View<float> b, View<const float> all, Widths w) {
  const std::int64_t t = blockIdx.x;
  std::int64_t from = 0, a_at = 0, b_at = 0;
  for (int r = 0; r < w.n; ++r) {
    for (int i = threadIdx.x; i < w.a[r]; i += blockDim.x)
      a.row(t)[a_at + i] = all.row(t)[from + i];
    for (int i = threadIdx.x; i < w.b[r]; i += blockDim.x)
      b.row(t)[b_at + i] = all.row(t)[from + w.a[r] + i];
    from += w.a[r] + w.b[r];
    a_at += w.a[r];
    b_at += w.b[r];
  }
}

__global__ void nonfinite_kernel(View<const float> x, std::int32_t layer, std::int32_t* first) {
  const std::int64_t t = blockIdx.y;
  bool bad = false;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       i < x.cols; i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    bad = bad || !isfinite(x.row(t)[i]);
  }
  if (bad) atomicMin(first + t, layer);
}

__global__ void penalise_kernel(View<float> logits, std::int64_t vocab_begin,
                                const std::int32_t* history, std::int64_t n_hist, float repetition,
                                float presence) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n_hist) return;
  const std::int64_t col = history[i] - vocab_begin;
  if (col < 0 || col >= logits.cols) return;
  float& v = logits.row(blockIdx.y)[col];
  v = (v > 0 ? v / repetition : v * repetition) - presence;
}

unsigned blocks_for(std::int64_t n, std::int64_t per) {
  return static_cast<unsigned>((n + per - 1) / per);
}

template <Rows Op>
void launch_rows(View<float> y, View<const float> x, cudaStream_t stream) {
  if (y.empty()) return;
  rows_kernel<Op>
      <<<dim3(blocks_for(y.cols, 256), static_cast<unsigned>(y.rows)), 256, 0, stream>>>(y, x);
  check_launch("rows_kernel");
}

}  // namespace

void mix_norm(View<float> y, View<const float> x, const float* bank, std::int64_t n_bank,
              std::int64_t bank_stride, const float* score_w, const float* norm_w, float eps,
              float* probs, cudaStream_t stream) {
  if (y.empty()) return;
  if (n_bank + 1 > kMaxSources)
    throw std::invalid_argument("mix_norm: more than 63 banked streams");
  mix_norm_kernel<<<static_cast<unsigned>(x.rows), kThreads, 0, stream>>>(
      y, x, bank, static_cast<int>(n_bank), bank_stride, score_w, norm_w, eps, probs);
  check_launch("mix_norm_kernel");
}

void rms_norm(View<float> y, View<const float> x, const float* w, float eps, cudaStream_t stream) {
  if (y.empty()) return;
  rms_norm_kernel<<<static_cast<unsigned>(x.rows), kThreads, 0, stream>>>(y, x, w, eps);
  check_launch("rms_norm_kernel");
}

void residual(View<float> x, View<const float> a, bool restart, cudaStream_t stream) {
  restart ? launch_rows<Rows::kCopy>(x, a, stream) : launch_rows<Rows::kAdd>(x, a, stream);
}

void copy_rows(View<float> y, View<const float> x, cudaStream_t stream) {
  launch_rows<Rows::kCopy>(y, x, stream);
}

void unpack_bands(View<float> a, View<float> b, View<const float> all,
                  std::span<const std::int64_t> a_widths, std::span<const std::int64_t> b_widths,
                  cudaStream_t stream) {
  if (all.empty()) return;
  if (a_widths.size() > kMaxRanks) throw std::invalid_argument("unpack_bands: more than 64 ranks");
  Widths w{};
  w.n = static_cast<int>(a_widths.size());
  for (int r = 0; r < w.n; ++r) {
    w.a[r] = static_cast<int>(a_widths[static_cast<std::size_t>(r)]);
    w.b[r] = static_cast<int>(b_widths[static_cast<std::size_t>(r)]);
  }
  unpack_kernel<<<static_cast<unsigned>(all.rows), 256, 0, stream>>>(a, b, all, w);
  check_launch("unpack_kernel");
}

void note_nonfinite(View<const float> x, std::int32_t layer, std::int32_t* first,
                    cudaStream_t stream) {
  if (x.empty()) return;
  const unsigned blocks = min(blocks_for(x.cols, 256), 32u);
  nonfinite_kernel<<<dim3(blocks, static_cast<unsigned>(x.rows)), 256, 0, stream>>>(x, layer,
                                                                                    first);
  check_launch("nonfinite_kernel");
}

void penalise(View<float> logits, std::int64_t vocab_begin, const std::int32_t* history,
              std::int64_t n_hist, float repetition, float presence, cudaStream_t stream) {
  if (logits.empty() || n_hist == 0) return;
  penalise_kernel<<<dim3(blocks_for(n_hist, 256), static_cast<unsigned>(logits.rows)), 256, 0,
                    stream>>>(logits, vocab_begin, history, n_hist, repetition, presence);
  check_launch("penalise_kernel");
}

}  // namespace k3::cuda
