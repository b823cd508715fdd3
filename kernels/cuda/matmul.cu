// Matrix products in the exact path: a warp takes a few output rows, weights decoded in registers, f32 throughout.
#include <vector>

#include "kernels/check_shapes.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/codec.cuh"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/reduce.cuh"

namespace k3::cuda {
namespace {

constexpr int kWarps = 4;    // per block
constexpr int kMaxJobs = 8;  // of one launch
constexpr std::int64_t kManyTok = 8;

struct Job {
  View<float> y;
  View<const float> x;
  Weight w;
  std::int64_t first_block;  // of the grid
};
struct Jobs {
  Job job[kMaxJobs];
  int n;
};

template <class Codec, int kRows, int kTok, bool kVector>
__device__ void product(const Job& job, std::int64_t mat, const float* x, float* y,
                        std::int64_t row0, std::int64_t t0) {
  if (row0 >= job.w.n_out) return;
  const int n_tok = static_cast<int>(min(static_cast<std::int64_t>(kTok), job.y.rows - t0));
  float acc[kRows][kTok] = {};
  rows_dot<Codec, kRows, kTok, kVector>(job.w, mat, row0, x + t0 * job.x.stride, job.x.stride,
                                        n_tok, acc);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int t = 0; t < kTok; ++t) {
      const float sum = warp_sum(acc[r][t]);
      if (threadIdx.x % 32 == 0 && t < n_tok && row0 + r < job.w.n_out)
        y[(t0 + t) * job.y.stride + row0 + r] = sum;
    }
  }
}

template <class Codec, int kRows, int kTok, bool kVector>
__global__ void __launch_bounds__(kWarps * 32) matmul_kernel(const __grid_constant__ Jobs jobs) {
  int j = 0;
  while (j + 1 < jobs.n && blockIdx.x >= jobs.job[j + 1].first_block) ++j;
  const Job& job = jobs.job[j];
  const std::int64_t row0 = ((blockIdx.x - job.first_block) * kWarps + threadIdx.x / 32) * kRows;
  product<Codec, kRows, kTok, kVector>(job, 0, job.x.data, job.y.data, row0,
                                       static_cast<std::int64_t>(blockIdx.y) * kTok);
}

template <class Codec, int kRows, int kTok, bool kVector>
__global__ void __launch_bounds__(kWarps * 32)
    head_matmul_kernel(const __grid_constant__ Job job, std::int64_t y_head, std::int64_t x_head) {
  const std::int64_t row0 = (static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32) *
                            kRows,
                     h = blockIdx.z;
  product<Codec, kRows, kTok, kVector>(job, h, job.x.data + h * x_head, job.y.data + h * y_head,
                                       row0, static_cast<std::int64_t>(blockIdx.y) * kTok);
}

template <class Codec>
__global__ void embed_kernel(View<float> y, const std::int32_t* ids, Weight table,
                             std::int64_t vocab_begin) {
  const std::int64_t t = blockIdx.x, row = ids[t] - vocab_begin;
  const bool here = row >= 0 && row < table.n_out;
  const auto w = Codec::at(table, 0, here ? row : 0);
  for (std::int64_t i = threadIdx.x; i < y.cols; i += blockDim.x)
    y.row(t)[i] = here ? Codec::one(w, i) : 0.0f;
}

unsigned blocks_for(std::int64_t n, std::int64_t per) {
  return static_cast<unsigned>((n + per - 1) / per);
}

bool vector_ok(View<const float> x, std::int64_t head = 0) {
  return reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0 && x.stride % 4 == 0 && head % 4 == 0;
}

// Rows a warp takes and tokens it serves, chosen by size: enough warps to fill the device come first. Only the codecs
// built for speed come in several tiles, to keep the program small.
template <class Codec, class F>
void with_tile(std::int64_t n_row, std::int64_t n_tok, bool vector, const F& f) {
  constexpr std::int64_t kFill = 132 * 16;  // warps that keep memory busy
  if constexpr (Codec::kFast) {
    if (vector && n_tok > 1) return f.template operator()<2, 8, true>();
    if (vector && n_row >= 4 * kFill) return f.template operator()<4, 1, true>();
    if (vector && n_row >= 2 * kFill) return f.template operator()<2, 1, true>();
    if (vector) return f.template operator()<1, 1, true>();
  }
  n_tok == 1 ? f.template operator()<1, 1, false>() : f.template operator()<1, 8, false>();
}

template <class Codec>
void launch(Jobs& jobs, bool vector, bool one_tile, cudaStream_t stream) {
  std::int64_t n_row = 0;
  for (int i = 0; i < jobs.n; ++i) n_row += jobs.job[i].w.n_out;
  const std::int64_t n_tok = jobs.job[0].x.rows;
  with_tile<Codec>(
      n_row, one_tile ? kManyTok : n_tok, vector, [&]<int kRows, int kTok, bool kVector>() {
        std::int64_t blocks = 0;
        for (int i = 0; i < jobs.n; ++i) {
          jobs.job[i].first_block = blocks;
          blocks += blocks_for(jobs.job[i].w.n_out, kWarps * kRows);
        }
        const dim3 grid(static_cast<unsigned>(blocks), blocks_for(n_tok, kTok));
        matmul_kernel<Codec, kRows, kTok, kVector><<<grid, kWarps * 32, 0, stream>>>(jobs);
      });
  check_launch("matmul_kernel");
}

}  // namespace

bool has_code_for_device() {
  cudaFuncAttributes attributes{};
  const cudaError_t status =
      cudaFuncGetAttributes(&attributes, matmul_kernel<RawCodec<BlockType::kF32>, 1, 1, false>);
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction) {
    cudaGetLastError();  // the question is answered; nothing has failed
    return false;
  }
  check(status, "cudaFuncGetAttributes");
  return true;
}

// Jobs of one codec go into one launch: the projections of a layer read the same x.
void matmul(std::span<const MatmulJob> jobs, cudaStream_t stream, bool one_tile) {
  std::vector<bool> done(jobs.size());
  for (const MatmulJob& j : jobs) check_shapes(j);
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    if (done[i] || jobs[i].y.empty()) continue;
    const Weight& w = *jobs[i].w;
    if (w.n_in == 0) {  // an empty band contributes nothing to the sum
      const View<float> y = jobs[i].y;
      check(cudaMemset2DAsync(y.data, static_cast<std::size_t>(y.stride) * sizeof(float), 0,
                              static_cast<std::size_t>(y.cols) * sizeof(float),
                              static_cast<std::size_t>(y.rows), stream),
            "cudaMemset2DAsync");
      continue;
    }
    Jobs group{};
    const bool vector = vector_ok(jobs[i].x);
    for (std::size_t k = i; k < jobs.size() && group.n < kMaxJobs; ++k) {
      const MatmulJob& j = jobs[k];
      if (done[k] || j.y.empty() || j.w->n_in == 0 || j.w->type != w.type ||
          j.w->layout != w.layout || j.x.rows != jobs[i].x.rows || vector_ok(j.x) != vector) {
        continue;
      }
      group.job[group.n++] = {j.y, j.x, *j.w, 0};
      done[k] = true;
    }
    with_codec(w, [&]<class Codec>() { launch<Codec>(group, vector, one_tile, stream); });
  }
}

void head_matmul(View<float> y, std::int64_t y_head, View<const float> x, std::int64_t x_head,
                 const Weight& w, cudaStream_t stream, bool one_tile) {
  if (w.empty() || y.rows == 0) return;
  const Job job{y, x, w, 0};
  with_codec(w, [&]<class Codec>() {
    with_tile<Codec>(w.n_out * w.n_mat, one_tile ? kManyTok : y.rows, vector_ok(x, x_head),
                     [&]<int kRows, int kTok, bool kVector>() {
                       const dim3 grid(blocks_for(w.n_out, kWarps * kRows),
                                       blocks_for(y.rows, kTok), static_cast<unsigned>(w.n_mat));
                       head_matmul_kernel<Codec, kRows, kTok, kVector>
                           <<<grid, kWarps * 32, 0, stream>>>(job, y_head, x_head);
                     });
  });
  check_launch("head_matmul_kernel");
}

void embed(View<float> y, const BatchView& batch, const Weight& table, std::int64_t vocab_begin,
           cudaStream_t stream) {
  if (batch.n_tok == 0) return;
  with_codec(table, [&]<class Codec>() {
    embed_kernel<Codec>
        <<<static_cast<unsigned>(batch.n_tok), 256, 0, stream>>>(y, batch.ids, table, vocab_begin);
  });
  check_launch("embed_kernel");
}

}  // namespace k3::cuda
