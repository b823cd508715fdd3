// Routing and routed experts of one token in the fast path, two launches. The first chooses the experts, in every block
// alike, and takes gate and up; the second takes down and adds the experts up in the order of choice.
#include <algorithm>

#include "kernels/cuda/check.h"
#include "kernels/cuda/gemv.cuh"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/pdl.cuh"

namespace k3::cuda {
namespace {

using namespace gemv;

constexpr int kMaxUsed = 32;  // experts a token uses: a warp holds them
constexpr int kMaxExperts = 2048;
constexpr int kMaxStaged = 12288;  // values a block of the second launch stages
constexpr int kMaxParts = 16;
constexpr int kBlocksPerSm = 2;
constexpr float kWeightFloor = 6.103515625e-5f;  // 2^-14, as the reference has it

// The experts a token uses that this rank holds, in order of choice.
struct Chosen {
  int n;
  int place[kMaxUsed];   // among the token's experts
  int expert[kMaxUsed];  // on this rank
  float weight[kMaxUsed];
};

// Warp 0: of the n_used choices (lane: expert id, weight), those in [begin, begin + n_mat).
__device__ void keep_local(Chosen& c, int n_used, int id, float weight, int begin, int n_mat) {
  const int lane = threadIdx.x, e = id - begin;
  const bool here = lane < n_used && e >= 0 && e < n_mat;
  const unsigned mask = __ballot_sync(0xffffffffu, here);
  if (here) {
    const int at = __popc(mask & ((1u << lane) - 1));
    c.place[at] = lane;
    c.expert[at] = e;
    c.weight[at] = weight;
  }
  if (lane == 0) c.n = __popc(mask);
}

struct Routing {
  const float* logits;
  const float* bias;
  int n_expert, n_used;
  bool normalise;
  float scale;
};

// Larger for a larger key, then for a lower index. A NaN comes after every number.
__device__ __forceinline__ unsigned key_bits(float key) {
  const unsigned bits = __float_as_uint(key);
  return isnan(key) ? 0 : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

struct RouteScratch {
  unsigned warp_best[kWarps];
  int n_candidate;
  unsigned long long chosen[kMaxUsed];
};

// The token's experts by sigmoid(logit) + bias, best first, and their weights: lane j of warp 0 returns the j-th.
// Only keys that reach the least of the warps' best can be among the first kWarps: there are as many at or above it.
__device__ void choose(const Routing& r, float* p, unsigned long long* candidate, RouteScratch& s,
                       int& id, float& weight) {
  const int lane = threadIdx.x % 32;
  unsigned best = 0;
  for (int e = threadIdx.x; e < r.n_expert; e += kThreads) {
    p[e] = sigmoid(r.logits[e]);
    best = max(best, key_bits(p[e] + r.bias[e]));
  }
  best = __reduce_max_sync(0xffffffffu, best);
  if (lane == 0) s.warp_best[threadIdx.x / 32] = best;
  if (threadIdx.x == 0) s.n_candidate = 0;
  __syncthreads();
  unsigned least = r.n_used <= kWarps ? 0xffffffffu : 0u;
  for (int w = 0; w < kWarps; ++w) least = min(least, s.warp_best[w]);
  for (int e = threadIdx.x; e < r.n_expert; e += kThreads) {
    const unsigned key = key_bits(p[e] + r.bias[e]);
    if (key < least) continue;
    candidate[atomicAdd(&s.n_candidate, 1)] =
        static_cast<unsigned long long>(key) << 32 | (0xffffffffu - static_cast<unsigned>(e));
  }
  __syncthreads();
  const int n = s.n_candidate;
  for (int i = threadIdx.x; i < n; i += kThreads) {
    int place = 0;
    for (int k = 0; k < n; ++k) place += candidate[k] > candidate[i];
    if (place < r.n_used) s.chosen[place] = candidate[i];
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;
  id = lane < r.n_used ? static_cast<int>(0xffffffffu - static_cast<unsigned>(s.chosen[lane])) : 0;
  const float mine = lane < r.n_used ? p[id] : 0.0f;
  float sum = 0;
  for (int j = 0; j < r.n_used; ++j) sum += __shfl_sync(0xffffffffu, mine, j);
  weight =
      mine / (r.normalise ? fmaxf(sum, kWeightFloor) : 1.0f) * (r.scale != 0.0f ? r.scale : 1.0f);
}

struct InStep {
  Routing routing;
  const float* z;
  Staged staged;
  int p_at, candidate_at;  // offsets in shared memory
  Rows gate, up;
  std::int64_t gate_mat, up_mat;
  int n_out, n_mat, expert_begin, lanes;
  Situ situ;
  float* hidden;  // [n_used][n_out]
  std::int32_t* ids;
  float* weights;
};

__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    expert_in_kernel(const __grid_constant__ InStep l) {
  extern __shared__ __align__(128) char shared[];
  __shared__ RouteScratch scratch;
  __shared__ Chosen chosen;
  let_successor_start();
  wait_for_predecessor();
  const int n4 = l.staged.n / 4;
  for (int r = 0; r < (n4 + kThreads - 1) / kThreads; ++r) {
    const int i4 = r * kThreads + static_cast<int>(threadIdx.x);
    put4(shared, l.staged, i4, i4 < n4 ? *reinterpret_cast<const float4*>(l.z + i4 * 4) : float4{});
  }
  int id = 0;
  float weight = 0;
  choose(l.routing, reinterpret_cast<float*>(shared + l.p_at),
         reinterpret_cast<unsigned long long*>(shared + l.candidate_at), scratch, id, weight);
  if (threadIdx.x < 32) {
    keep_local(chosen, l.routing.n_used, id, weight, l.expert_begin, l.n_mat);
    if (blockIdx.x == 0 && static_cast<int>(threadIdx.x) < l.routing.n_used) {
      l.ids[threadIdx.x] = id;
      l.weights[threadIdx.x] = weight;
    }
  }
  __syncthreads();
  const int lane = threadIdx.x % 32, sub = lane % l.lanes, per = 32 / l.lanes;
  const long long total = static_cast<long long>(chosen.n) * l.n_out;
  const int begin = static_cast<int>(total * blockIdx.x / gridDim.x),
            end = static_cast<int>(total * (blockIdx.x + 1) / gridDim.x);
  for (int base = begin + static_cast<int>(threadIdx.x / 32) * per; base < end;
       base += kWarps * per) {
    const int at = base + lane / l.lanes, own = min(at, end - 1);
    const int i = own / l.n_out, row = own - i * l.n_out;
    Rows gate = l.gate, up = l.up;
    gate.data += chosen.expert[i] * l.gate_mat;
    up.data += chosen.expert[i] * l.up_mat;
    const float g = sum_lanes(dot_row(gate, row, shared, l.staged, 0, sub, l.lanes), l.lanes);
    const float u = sum_lanes(dot_row(up, row, shared, l.staged, 0, sub, l.lanes), l.lanes);
    if (sub == 0 && at < end)
      l.hidden[chosen.place[i] * l.n_out + row] = situ4({g, 0, 0, 0}, {u, 0, 0, 0}, l.situ).x;
  }
}

struct OutStep {
  const std::int32_t* ids;
  const float* weights;
  int n_used, n_mat, expert_begin, lanes;
  const float* hidden;
  Staged staged;  // room for the most experts a part takes
  Rows down;
  std::int64_t down_mat;
  int n_out, n_part;
  float* m;
  float* part;        // [n_part][n_out], n_part > 1
  unsigned* arrived;  // per slice of the rows; zero between launches
};

// The last of the parts of a slice adds them up, in their order whoever was last.
__device__ void join_parts(const OutStep& l, int slice, int r0, int r1) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(&l.arrived[slice], 1u) == static_cast<unsigned>(l.n_part) - 1;
    if (last) l.arrived[slice] = 0;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  for (int row = r0 + static_cast<int>(threadIdx.x); row < r1; row += kThreads) {
    float sum = 0;
    for (int s = 0; s < l.n_part; ++s) sum += __ldcg(l.part + s * l.n_out + row);
    l.m[row] = sum;
  }
}

// Block = slice * n_part + part: a slice of the rows, a part of the experts.
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    expert_out_kernel(const __grid_constant__ OutStep l) {
  extern __shared__ __align__(128) char shared[];
  __shared__ Chosen chosen;
  let_successor_start();
  wait_for_predecessor();
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    keep_local(chosen, l.n_used, lane < l.n_used ? l.ids[lane] : -1,
               lane < l.n_used ? l.weights[lane] : 0.0f, l.expert_begin, l.n_mat);
  }
  __syncthreads();
  const int part = blockIdx.x % l.n_part, slice = blockIdx.x / l.n_part,
            n_slice = gridDim.x / l.n_part;
  const int i0 = chosen.n * part / l.n_part, i1 = chosen.n * (part + 1) / l.n_part;
  const int n_in = l.down.n_in, n4 = (i1 - i0) * n_in / 4;
  Staged s = l.staged;
  s.n = n4 * 4;
#pragma unroll 4
  for (int r = 0; r < (n4 + kThreads - 1) / kThreads; ++r) {
    const int i4 = r * kThreads + static_cast<int>(threadIdx.x);
    const int i = min(i4 * 4 / n_in, i1 - i0 - 1);
    float4 v{};
    if (i4 < n4)
      v = *reinterpret_cast<const float4*>(l.hidden + chosen.place[i0 + i] * n_in + i4 * 4 -
                                           i * n_in);
    put4(shared, s, i4, v);
  }
  __syncthreads();
  const int r0 = static_cast<int>(static_cast<long long>(l.n_out) * slice / n_slice),
            r1 = static_cast<int>(static_cast<long long>(l.n_out) * (slice + 1) / n_slice);
  const int lane = threadIdx.x % 32, sub = lane % l.lanes, per = 32 / l.lanes;
  float* out = l.n_part > 1 ? l.part + part * l.n_out : l.m;
  for (int base = r0 + static_cast<int>(threadIdx.x / 32) * per; base < r1; base += kWarps * per) {
    const int at = base + lane / l.lanes, row = min(at, r1 - 1);
    float acc = 0;
    for (int i = i0; i < i1; ++i) {
      Rows down = l.down;
      down.data += chosen.expert[i] * l.down_mat;
      acc = fmaf(chosen.weight[i],
                 dot_row(down, row, shared, s, (i - i0) * n_in / 16, sub, l.lanes), acc);
    }
    acc = sum_lanes(acc, l.lanes);
    if (sub == 0 && at < r1) out[row] = acc;
  }
  if (l.n_part > 1) join_parts(l, slice, r0, r1);
}

void raise_shared(const void* kernel, int bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "cudaFuncSetAttribute");
}

bool supported(const ExpertStep& e) {
  const Weight &gate = *e.w.gate, &up = *e.w.up, &down = *e.w.down;
  auto aligned = [](const float* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; };
  return e.m.rows == 1 && e.ids.cols <= kMaxUsed && e.logits.cols <= kMaxExperts && !gate.empty() &&
         !down.empty() && gate.layout == kPlanes && up.layout == kPlanes &&
         down.layout == kPlanes && down.n_in <= kMaxStaged && aligned(e.z.data) &&
         e.ids.cols <= e.logits.cols;
}

}  // namespace

std::size_t expert_scratch_floats() { return kMaxParts * 65536; }

bool fused_experts(const ExpertStep& e, float* hidden, std::size_t hidden_floats, float* parts,
                   unsigned* arrived, cudaStream_t stream) {
  if (!supported(e)) return false;
  const Weight &gate = *e.w.gate, &down = *e.w.down;
  const auto n_used = static_cast<int>(e.ids.cols), n_in = static_cast<int>(down.n_in);
  const int fit = std::max(1, kMaxStaged / n_in);  // experts that a block can stage
  const int n_part = (n_used + fit - 1) / fit;
  const int blocks = kBlocksPerSm * device_blocks();
  if (n_part > kMaxParts || down.n_out > 65536 || n_part > blocks ||
      static_cast<std::size_t>(n_used * n_in) > hidden_floats)
    return false;

  InStep in{};
  in.routing = {e.logits.data, e.bias,      static_cast<int>(e.logits.cols),
                n_used,        e.normalise, e.scale};
  in.z = e.z.data;
  in.p_at = lay_out(in.staged, static_cast<int>(e.z.cols), true, false, 0);
  in.candidate_at = (in.p_at + in.routing.n_expert * 4 + 7) / 8 * 8;
  const int in_shared = in.candidate_at + in.routing.n_expert * 8;
  in.gate = rows_of(gate);
  in.up = rows_of(*e.w.up);
  in.gate_mat = gate.mat_bytes;
  in.up_mat = e.w.up->mat_bytes;
  in.n_out = static_cast<int>(gate.n_out);
  in.n_mat = static_cast<int>(gate.n_mat);
  in.expert_begin = static_cast<int>(e.w.expert_begin);
  in.lanes = std::max(lanes_for(in.gate), lanes_for(in.up));
  in.situ = e.situ;
  in.hidden = hidden;
  in.ids = e.ids.data;
  in.weights = e.weights.data;

  OutStep out{};
  out.ids = e.ids.data;
  out.weights = e.weights.data;
  out.n_used = n_used;
  out.n_mat = in.n_mat;
  out.expert_begin = in.expert_begin;
  out.hidden = hidden;
  const int out_shared = lay_out(out.staged, (n_used + n_part - 1) / n_part * n_in, true, false, 0);
  out.down = rows_of(down);
  out.down_mat = down.mat_bytes;
  out.lanes = lanes_for(out.down);
  out.n_out = static_cast<int>(down.n_out);
  out.n_part = n_part;
  out.m = e.m.data;
  out.part = parts;
  out.arrived = arrived;

  constexpr int kMaxShared = 100 * 1024;
  if (in_shared > kMaxShared || out_shared > kMaxShared) return false;
  static const bool raised =
      (raise_shared(reinterpret_cast<const void*>(expert_in_kernel), kMaxShared),
       raise_shared(reinterpret_cast<const void*>(expert_out_kernel), kMaxShared), true);
  static_cast<void>(raised);
  launch_chained("expert_in_kernel", expert_in_kernel, dim3(static_cast<unsigned>(blocks)),
                 dim3(kThreads), static_cast<std::size_t>(in_shared), 1, stream, in);
  launch_chained("expert_out_kernel", expert_out_kernel,
                 dim3(static_cast<unsigned>(blocks / n_part * n_part)), dim3(kThreads),
                 static_cast<std::size_t>(out_shared), 1, stream, out);
  return true;
}

}  // namespace k3::cuda
