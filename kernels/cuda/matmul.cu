// Matrix products in the exact path: a warp per output row, weights decoded in registers, f32 throughout. A row's decoded
// octets serve up to kTokTile tokens.
#include <vector>

#include "kernels/check_shapes.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/decode.cuh"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/reduce.cuh"

namespace k3::cuda {
namespace {

constexpr int kWarps = 8;    // rows per block
constexpr int kTokTile = 8;  // tokens that share a decoded octet
constexpr int kMaxJobs = 8;  // jobs of one launch

struct Job {
  float* y;
  const float* x;
  const std::byte* w;
  std::int64_t y_stride, x_stride, row_bytes, n_in, n_out, first;
  std::int64_t first_block;  // of the grid
};
struct Jobs {
  Job job[kMaxJobs];
  int n;
};

// y[t][row] for the tokens of one tile. x rows need no alignment: octets of x come from cache.
template <BlockType T>
__device__ void row_times_tokens(const Job& job, std::int64_t row, std::int64_t t0, int n_tok) {
  const int lane = threadIdx.x % 32;
  const std::byte* w = job.w + row * job.row_bytes;
  float acc[kTokTile] = {};
  const std::int64_t whole = job.n_in / 8 * 8;
  for (std::int64_t i = lane * 8; i < whole; i += 32 * 8) {
    float v[8];
    decode8<T>(w, job.first + i, v);
#pragma unroll
    for (int t = 0; t < kTokTile; ++t) {
      if (t >= n_tok) break;
      const float* x = job.x + (t0 + t) * job.x_stride + i;
      for (int j = 0; j < 8; ++j) acc[t] = fmaf(v[j], x[j], acc[t]);
    }
  }
  if (whole + lane < job.n_in) {  // plain floats only: block types come in octets
    const float v = decode1<T>(w, job.first + whole + lane);
#pragma unroll
    for (int t = 0; t < kTokTile; ++t) {
      if (t < n_tok) acc[t] = fmaf(v, job.x[(t0 + t) * job.x_stride + whole + lane], acc[t]);
    }
  }
#pragma unroll
  for (int t = 0; t < kTokTile; ++t) {
    if (t >= n_tok) break;
    const float sum = warp_sum(acc[t]);
    if (lane == 0) job.y[(t0 + t) * job.y_stride + row] = sum;
  }
}

template <BlockType T>
__global__ void __launch_bounds__(kWarps * 32) matmul_kernel(Jobs jobs, std::int64_t n_tok) {
  int j = 0;
  while (j + 1 < jobs.n && blockIdx.x >= jobs.job[j + 1].first_block) ++j;
  const Job& job = jobs.job[j];
  const std::int64_t row = (blockIdx.x - job.first_block) * kWarps + threadIdx.x / 32;
  if (row >= job.n_out) return;
  const std::int64_t t0 = static_cast<std::int64_t>(blockIdx.y) * kTokTile;
  row_times_tokens<T>(job, row, t0,
                      static_cast<int>(min(static_cast<std::int64_t>(kTokTile), n_tok - t0)));
}

template <BlockType T>
__global__ void __launch_bounds__(kWarps * 32)
    head_matmul_kernel(Job job, std::int64_t n_tok, std::int64_t y_head, std::int64_t x_head,
                       std::int64_t mat_bytes) {
  job.w += blockIdx.z * mat_bytes;
  job.x += blockIdx.z * x_head;
  job.y += blockIdx.z * y_head;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= job.n_out) return;
  const std::int64_t t0 = static_cast<std::int64_t>(blockIdx.y) * kTokTile;
  row_times_tokens<T>(job, row, t0,
                      static_cast<int>(min(static_cast<std::int64_t>(kTokTile), n_tok - t0)));
}

template <BlockType T>
__global__ void embed_kernel(View<float> y, const std::int32_t* ids, Weight table,
                             std::int64_t vocab_begin) {
  const std::int64_t t = blockIdx.x, row = ids[t] - vocab_begin;
  const bool here = row >= 0 && row < table.n_out;
  const std::byte* w = table.data + (here ? row : 0) * table.row_bytes;
  for (std::int64_t i = threadIdx.x; i < y.cols; i += blockDim.x) {
    y.row(t)[i] = here ? decode1<T>(w, table.first + i) : 0.0f;
  }
}

template <BlockType T>
__global__ void decode_kernel(float* out, Weight w) {
  const std::int64_t row = blockIdx.x % w.n_out, mat = blockIdx.x / w.n_out;
  const std::byte* bytes = w.data + mat * w.mat_bytes + row * w.row_bytes;
  for (std::int64_t i = threadIdx.x; i < w.n_in; i += blockDim.x)
    out[blockIdx.x * w.n_in + i] = decode1<T>(bytes, w.first + i);
}

Job make_job(View<float> y, View<const float> x, const Weight& w) {
  return {y.data, x.data, w.data, y.stride, x.stride, w.row_bytes, w.n_in, w.n_out, w.first, 0};
}

unsigned blocks_for(std::int64_t n, std::int64_t per) {
  return static_cast<unsigned>((n + per - 1) / per);
}

void launch(BlockType type, Jobs& jobs, std::int64_t n_tok, cudaStream_t stream) {
  std::int64_t blocks = 0;
  for (int i = 0; i < jobs.n; ++i) {
    jobs.job[i].first_block = blocks;
    blocks += blocks_for(jobs.job[i].n_out, kWarps);
  }
  const dim3 grid(static_cast<unsigned>(blocks), blocks_for(n_tok, kTokTile));
  with_type(type, [&]<BlockType T>() {
    matmul_kernel<T><<<grid, kWarps * 32, 0, stream>>>(jobs, n_tok);
  });
  check_launch("matmul_kernel");
}

}  // namespace

bool has_code_for_device() {
  cudaFuncAttributes attributes{};
  const cudaError_t status = cudaFuncGetAttributes(&attributes, matmul_kernel<BlockType::kF32>);
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction) {
    cudaGetLastError();  // the question is answered; nothing has failed
    return false;
  }
  check(status, "cudaFuncGetAttributes");
  return true;
}

// Jobs of one block type go into one launch: the projections of a layer read the same x.
void matmul(std::span<const MatmulJob> jobs, cudaStream_t stream) {
  std::vector<bool> done(jobs.size());
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    check_shapes(jobs[i]);
    if (done[i] || jobs[i].y.empty()) continue;
    if (jobs[i].w->n_in == 0) {  // an empty band contributes nothing to the sum
      const View<float> y = jobs[i].y;
      check(cudaMemset2DAsync(y.data, static_cast<std::size_t>(y.stride) * sizeof(float), 0,
                              static_cast<std::size_t>(y.cols) * sizeof(float),
                              static_cast<std::size_t>(y.rows), stream),
            "cudaMemset2DAsync");
      continue;
    }
    Jobs group{};
    for (std::size_t k = i; k < jobs.size() && group.n < kMaxJobs; ++k) {
      const MatmulJob& j = jobs[k];
      if (done[k] || j.y.empty() || j.w->n_in == 0 || j.w->type != jobs[i].w->type ||
          j.x.rows != jobs[i].x.rows)
        continue;
      check_shapes(j);
      group.job[group.n++] = make_job(j.y, j.x, *j.w);
      done[k] = true;
    }
    launch(jobs[i].w->type, group, jobs[i].x.rows, stream);
  }
}

void head_matmul(View<float> y, std::int64_t y_head, View<const float> x, std::int64_t x_head,
                 const Weight& w, cudaStream_t stream) {
  if (w.empty() || y.rows == 0) return;
  const dim3 grid(blocks_for(w.n_out, kWarps), blocks_for(y.rows, kTokTile),
                  static_cast<unsigned>(w.n_mat));
  const Job job = make_job(y, x, w);
  with_type(w.type, [&]<BlockType T>() {
    head_matmul_kernel<T>
        <<<grid, kWarps * 32, 0, stream>>>(job, y.rows, y_head, x_head, w.mat_bytes);
  });
  check_launch("head_matmul_kernel");
}

void embed(View<float> y, const BatchView& batch, const Weight& table, std::int64_t vocab_begin,
           cudaStream_t stream) {
  if (batch.n_tok == 0) return;
  with_type(table.type, [&]<BlockType T>() {
    embed_kernel<T>
        <<<static_cast<unsigned>(batch.n_tok), 256, 0, stream>>>(y, batch.ids, table, vocab_begin);
  });
  check_launch("embed_kernel");
}

void decode_weight(float* out, const Weight& w, cudaStream_t stream) {
  if (w.empty()) return;
  with_type(w.type, [&]<BlockType T>() {
    decode_kernel<T><<<static_cast<unsigned>(w.n_out * w.n_mat), 128, 0, stream>>>(out, w);
  });
  check_launch("decode_kernel");
}

}  // namespace k3::cuda
