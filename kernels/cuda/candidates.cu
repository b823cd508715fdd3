// The search of a vocabulary band for candidates, on the device: every block finds the best of its slice and its sums, the
// last one to finish merges them. Ordered as kernels/cpu/sampling.cpp orders them: larger key, then lower id.
#include <limits>

#include "kernels/cpu/sampling.h"
#include "kernels/cuda/candidates.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/pdl.cuh"
#include "kernels/cuda/reduce.cuh"

namespace k3::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread =
    8;  // logits a thread holds: a block's slice is at most kThreads * kPerThread
constexpr int kMaxBlocks = 1024;

struct Scored {
  float key;
  float logit;
  std::int32_t id;  // -1: none
};

__device__ __forceinline__ bool better(const Scored& a, const Scored& b) {
  if (a.id < 0) return false;
  return b.id < 0 || a.key > b.key || (a.key == b.key && a.id < b.id);
}

// gumbel_from_key, in double as the host has it.
__device__ float device_gumbel(std::uint64_t key, std::int32_t id) {
  const std::uint64_t bits = mix_bits(
      key ^ (static_cast<std::uint64_t>(static_cast<std::uint32_t>(id)) * 0x9fb21c651e98df25ULL));
  const double e = (bits >> 63) != 0 ? -log(static_cast<double>(~bits | 1) * 0x1p-64)
                                     : -log1p(-(static_cast<double>(bits | 1) * 0x1p-64));
  return static_cast<float>(-log(e));
}

// The best of the block's threads' offers, for all threads. scratch: one per warp.
__device__ Scored block_best(Scored mine, Scored* scratch) {
  for (int o = 16; o > 0; o /= 2) {
    const Scored other{__shfl_xor_sync(0xffffffffu, mine.key, o),
                       __shfl_xor_sync(0xffffffffu, mine.logit, o),
                       __shfl_xor_sync(0xffffffffu, mine.id, o)};
    if (better(other, mine)) mine = other;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = mine;
  __syncthreads();
  Scored best = scratch[0];
  for (int w = 1; w < kThreads / 32; ++w)
    if (better(scratch[w], best)) best = scratch[w];
  return best;
}

__device__ double block_sum(double v, double* scratch) {
  for (int o = 16; o > 0; o /= 2) v += __shfl_xor_sync(0xffffffffu, v, o);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
  __syncthreads();
  double sum = 0;
  for (int w = 0; w < kThreads / 32; ++w) sum += scratch[w];
  return sum;
}

struct Search {
  const float* logits;
  int n, vocab_begin;
  int want;
  float inv_temperature;
  bool perturbed;
  std::uint64_t key;
  CandidateScratch scratch;
};

struct Scratch {
  Scored best[kThreads / 32];
  double sums[kThreads / 32];
};

// This block's slice: its best candidates, its largest logit and its sums.
__device__ void search_slice(const Search& l, Scratch& sh) {
  const int per = (l.n + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
  const int begin = static_cast<int>(blockIdx.x) * per, end = min(begin + per, l.n);
  Scored own[kPerThread];
  float top = -INFINITY;
  bool bad = false;
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const int i = begin + j * kThreads + static_cast<int>(threadIdx.x);
    own[j] = {0, -INFINITY, -1};
    if (i >= end) continue;
    const float v = l.logits[i];
    bad = bad || isnan(v) || v == INFINITY;
    own[j] = {l.perturbed ? v * l.inv_temperature + device_gumbel(l.key, l.vocab_begin + i) : v, v,
              l.vocab_begin + i};
    top = fmaxf(top, v);
  }
  const Scored largest = block_best({top, top, 0}, sh.best);
  top = largest.logit;
  double sum = 0, scaled = 0;
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    if (own[j].id < 0 || own[j].logit == -INFINITY) continue;
    const double below = static_cast<double>(own[j].logit) - top;
    sum += exp(below);
    if (l.inv_temperature != 0) scaled += exp(below * l.inv_temperature);
  }
  sum = block_sum(sum, sh.sums);
  scaled = block_sum(scaled, sh.sums);
  const bool any_bad = __syncthreads_or(bad) != 0;
  if (threadIdx.x == 0)
    l.scratch.slice[blockIdx.x] = {top, any_bad ? 1 : 0, sum,
                                   l.inv_temperature != 0 ? scaled : sum};
  auto* out = reinterpret_cast<Scored*>(l.scratch.found) + blockIdx.x * l.want;
  for (int k = 0; k < l.want; ++k) {
    Scored mine{0, 0, -1};
#pragma unroll
    for (int j = 0; j < kPerThread; ++j)
      if (better(own[j], mine)) mine = own[j];
    const Scored best = block_best(mine, sh.best);
    if (threadIdx.x == 0) out[k] = best;
#pragma unroll
    for (int j = 0; j < kPerThread; ++j)
      if (own[j].id == best.id) own[j].id = -1;
  }
}

// The last block: slices' lists are in order, so their heads are what to compare.
__device__ void merge_slices(const Search& l, Scratch& sh) {
  const auto* found = reinterpret_cast<const Scored*>(l.scratch.found);
  CandidateHeader& head = *l.scratch.header;
  const int n_slice = static_cast<int>(gridDim.x);
  constexpr int kLists = kMaxBlocks / kThreads;
  int at[kLists] = {};
  auto offer = [&](int j) {
    const int s = j * kThreads + static_cast<int>(threadIdx.x);
    return s < n_slice && at[j] < l.want ? found[s * l.want + at[j]] : Scored{0, 0, -1};
  };
  float top = -INFINITY;
  bool bad = false;
  for (int s = threadIdx.x; s < n_slice; s += kThreads) {
    top = fmaxf(top, l.scratch.slice[s].top);
    bad = bad || l.scratch.slice[s].bad != 0;
  }
  top = block_best({top, top, 0}, sh.best).logit;
  double sum = 0, scaled = 0;
  const double scale = l.inv_temperature != 0 ? l.inv_temperature : 1.0;
  for (int s = threadIdx.x; s < n_slice; s += kThreads) {
    const CandidateSlice& slice = l.scratch.slice[s];
    if (slice.top == -INFINITY) continue;
    const double below = static_cast<double>(slice.top) - top;
    sum += slice.sum_exp * exp(below);
    scaled += slice.sum_exp_scaled * exp(below * scale);
  }
  sum = block_sum(sum, sh.sums);
  scaled = block_sum(scaled, sh.sums);
  const bool any_bad = __syncthreads_or(bad) != 0;
  int n = 0;
  for (; n < l.want; ++n) {
    Scored mine{0, 0, -1};
    int from = -1;
#pragma unroll
    for (int j = 0; j < kLists; ++j) {
      const Scored one = offer(j);
      if (!better(one, mine)) continue;
      mine = one;
      from = j;
    }
    const Scored best = block_best(mine, sh.best);
    if (best.id < 0) break;
    if (threadIdx.x == 0) l.scratch.best[n] = {best.id, best.logit, best.key};
#pragma unroll
    for (int j = 0; j < kLists; ++j)
      if (from == j && mine.id == best.id) ++at[j];
  }
  if (threadIdx.x == 0) head = {n, any_bad ? 1 : 0, top, 0, sum, scaled};
}

__global__ void __launch_bounds__(kThreads) search_kernel(const __grid_constant__ Search l) {
  __shared__ Scratch sh;
  __shared__ bool last;
  let_successor_start();
  wait_for_predecessor();
  search_slice(l, sh);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(l.scratch.arrived, 1u) == gridDim.x - 1;
    if (last) *l.scratch.arrived = 0;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  merge_slices(l, sh);
}

}  // namespace

bool search_candidates_on_device(const float* logits, std::int64_t n, std::int64_t vocab_begin,
                                 const CandidateQuery& q, const CandidateScratch& scratch,
                                 cudaStream_t stream) {
  if (n < 1 || q.n < 1 || q.n > kMaxDeviceCandidates || n > kMaxBlocks * kThreads * kPerThread)
    return false;
  Search l{logits,
           static_cast<int>(n),
           static_cast<int>(vocab_begin),
           q.n,
           q.inv_temperature,
           q.inv_temperature != 0 && !q.by_logit,
           draw_key(q.seed, q.draw),
           scratch};
  const std::int64_t per = kThreads * kPerThread;
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(
      kMaxBlocks,
      std::max<std::int64_t>((n + per - 1) / per, std::min<std::int64_t>(132, (n + 255) / 256))));
  launch_chained("search_kernel", search_kernel, dim3(blocks), dim3(kThreads), 0, 1, stream, l);
  return true;
}

std::size_t candidate_scratch_bytes() {
  return 256 + kMaxBlocks * (sizeof(CandidateSlice) + kMaxDeviceCandidates * sizeof(Scored)) + 1024;
}

std::size_t candidate_answer_bytes() {
  return sizeof(CandidateHeader) + kMaxDeviceCandidates * sizeof(Candidate);
}

CandidateScratch lay_out_candidates(std::byte* memory, std::byte* answer) {
  CandidateScratch s{};
  auto take = [&](std::size_t bytes) {
    std::byte* at = memory;
    memory += (bytes + 255) / 256 * 256;
    return at;
  };
  s.header = reinterpret_cast<CandidateHeader*>(answer);
  s.best = reinterpret_cast<Candidate*>(answer + sizeof(CandidateHeader));
  s.arrived = reinterpret_cast<unsigned*>(take(sizeof(unsigned)));
  s.slice = reinterpret_cast<CandidateSlice*>(take(kMaxBlocks * sizeof(CandidateSlice)));
  s.found = take(kMaxBlocks * kMaxDeviceCandidates * sizeof(Scored));
  return s;
}

CandidateResult candidates_from(const CandidateHeader& h, const Candidate* best) {
  CandidateResult r;
  if (h.bad != 0) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    r.best = {Candidate{-1, nan, nan}};
    r.max_logit = nan;
    r.sum_exp = r.sum_exp_scaled = nan;
    return r;
  }
  r.best.assign(best, best + h.n);
  r.max_logit = h.top;
  r.sum_exp = h.sum_exp;
  r.sum_exp_scaled = h.sum_exp_scaled;
  return r;
}

}  // namespace k3::cuda
