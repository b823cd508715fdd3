// Routing and routed experts of one token in the fast path, two launches. The first chooses the experts, in every block
// alike, and takes gate and up; the second takes down and adds the experts up in the order of choice.
#include <algorithm>

#include "kernels/cuda/bulk.cuh"
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
constexpr int kMaxShared = 222 * 1024;
constexpr int kTileRows = 16;
constexpr int kPartPieces = 7;                   // of a row that a warp takes at once, at most
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

// Where the warps' tiles arrive: groups of `warps` warps share a tile, each with its part of the rows' pieces, and a ring
// of `stages` tiles.
struct TileRing {
  int at;  // offset in shared memory
  int warps, stages, stage_bytes;
};
constexpr int kMaxStages = 4;

struct TileSource {
  const std::byte* data;
  int n_row;
  unsigned bytes;
};

__device__ __forceinline__ TileSource tile_source(const Rows& m, std::int64_t mat, int tile,
                                                  int n_out) {
  const int row = tile * kTileRows, n = min(kTileRows, n_out - row);
  return {m.data + mat + row * m.row_bytes, n, static_cast<unsigned>(n * m.row_bytes)};
}

__device__ __forceinline__ const char* tile_row(const Rows& m, const char* tile, int row,
                                                int n_row) {
  return tile + min(row, n_row - 1) * m.row_bytes;
}

// All warps of a group see every item of the group, in order: use(item, where its tile lies, its rows).
template <class Source, class Use>
__device__ __forceinline__ void run_tiles(const TileRing& ring, char* shared, int n_item,
                                          const Source& source, const Use& use) {
  __shared__ std::uint64_t arrived[kWarps][kMaxStages], used[kWarps][kMaxStages];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / ring.warps,
            n_group = kWarps / ring.warps;
  if (threadIdx.x < n_group) {
    for (int i = 0; i < ring.stages; ++i) {
      barrier_init(&arrived[threadIdx.x][i], 1);
      barrier_init(&used[threadIdx.x][i], static_cast<unsigned>(ring.warps));
    }
    barrier_init_done();
  }
  __syncthreads();
  if (group >= n_group) return;
  char* stages = shared + ring.at + group * ring.stages * ring.stage_bytes;
  const bool fetches = warp % ring.warps == 0 && lane == 0;
  auto fetch = [&](int item, int at) {
    const TileSource s = source(item);
    barrier_expect(&arrived[group][at], s.bytes);
    bulk_load(stages + at * ring.stage_bytes, s.data, s.bytes, &arrived[group][at]);
  };
  if (fetches) {
    for (int i = 0; i < ring.stages && group + i * n_group < n_item; ++i)
      fetch(group + i * n_group, i);
  }
  int at = 0;
  unsigned parity = 0;
  for (int item = group; item < n_item; item += n_group) {
    barrier_wait(&arrived[group][at], parity);
    use(item, stages + at * ring.stage_bytes, source(item).n_row);
    __syncwarp();
    if (lane == 0) barrier_arrive(&used[group][at]);
    const int ahead = item + ring.stages * n_group;
    if (fetches && ahead < n_item) {
      barrier_wait(&used[group][at], parity);
      fetch(ahead, at);
    }
    if (++at == ring.stages) {
      at = 0;
      parity ^= 1;
    }
  }
}

// A row's pieces cut into parts, so that warps' shares are alike.
struct Cut {
  int parts, pieces;
};

Cut cut_of(const Rows& r) {
  const int n = r.n_in / 128, parts = (n + kPartPieces - 1) / kPartPieces;
  return {parts, (n + parts - 1) / parts};
}

// A tile's two rows of this lane, summed over the lanes that share them.
__device__ __forceinline__ void put_tile(const float (&acc)[2], float* sums, int at, int parts) {
  const float a = sum_lanes(acc[0], 4), b = sum_lanes(acc[1], 4);
  if (threadIdx.x % 4 != 0) return;
  sums[at] = a;
  sums[at + 8 * parts] = b;
}

__device__ __forceinline__ float part_sum(const float* sums, int parts) {
  float v = sums[0];
  for (int p = 1; p < parts; ++p) v += sums[p];
  return v;
}

struct InStep {
  Routing routing;
  const float* z;
  Staged staged;
  int p_at, candidate_at, sums_at;  // offsets in shared memory
  Cut cut;
  TileRing ring;
  Rows gate, up;
  std::int64_t gate_mat, up_mat;
  int n_out, n_mat, expert_begin;
  Situ situ;
  float* hidden;  // [n_used][n_out]
  std::int32_t* ids;
  float* weights;
};

__global__ void __launch_bounds__(kThreads, 1) expert_in_kernel(const __grid_constant__ InStep l) {
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
  const int lane = threadIdx.x % 32;
  const int tiles = (l.n_out + kTileRows - 1) / kTileRows;  // of an expert
  const unsigned total = static_cast<unsigned>(chosen.n * tiles);
  const int t0 = static_cast<int>(total * blockIdx.x / gridDim.x),
            t1 = static_cast<int>(total * (blockIdx.x + 1) / gridDim.x);
  float* gate_sums = reinterpret_cast<float*>(shared + l.sums_at);  // [tile row][part]
  float* up_sums = gate_sums + (t1 - t0) * kTileRows * l.cut.parts;
  // Item: a tile of gate, then the same of up.
  run_tiles(
      l.ring, shared, 2 * (t1 - t0),
      [&](int item) {
        const int i = (t0 + item / 2) / tiles, tile = t0 + item / 2 - i * tiles;
        const Rows& m = item % 2 == 0 ? l.gate : l.up;
        const std::int64_t mat = chosen.expert[i] * (item % 2 == 0 ? l.gate_mat : l.up_mat);
        return tile_source(m, mat, tile, l.n_out);
      },
      [&](int item, const char* tile, int n_row) {
        const int part = static_cast<int>(threadIdx.x) / 32 % l.ring.warps;
        const Rows& m = item % 2 == 0 ? l.gate : l.up;
        float acc[2] = {};
        add_tile(m, {tile_row(m, tile, lane / 4, n_row), tile_row(m, tile, lane / 4 + 8, n_row)},
                 shared, l.staged, 0, part * l.cut.pieces,
                 min((part + 1) * l.cut.pieces, l.staged.n / 128), acc);
        put_tile(acc, item % 2 == 0 ? gate_sums : up_sums,
                 (item / 2 * kTileRows + lane / 4) * l.cut.parts + part, l.cut.parts);
      });
  __syncthreads();
  for (int k = threadIdx.x; k < (t1 - t0) * kTileRows; k += kThreads) {
    const int tile = t0 + k / kTileRows, i = tile / tiles;
    const int row = (tile - i * tiles) * kTileRows + k % kTileRows;
    if (row >= l.n_out) continue;
    const float g = part_sum(gate_sums + k * l.cut.parts, l.cut.parts),
                u = part_sum(up_sums + k * l.cut.parts, l.cut.parts);
    l.hidden[chosen.place[i] * l.n_out + row] = situ4({g, 0, 0, 0}, {u, 0, 0, 0}, l.situ).x;
  }
}

struct OutStep {
  const std::int32_t* ids;
  const float* weights;
  int n_used, n_mat, expert_begin;
  const float* hidden;
  Staged staged;  // room for the most experts a part takes
  int sums_at;    // offset in shared memory
  Cut cut;
  TileRing ring;
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
__global__ void __launch_bounds__(kThreads, 1)
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
  const int tiles = (l.n_out + kTileRows - 1) / kTileRows, t0 = tiles * slice / n_slice,
            n_tile = tiles * (slice + 1) / n_slice - t0;
  const int lane = threadIdx.x % 32, n_row = n_tile * kTileRows;
  float* sums = reinterpret_cast<float*>(shared + l.sums_at);  // [expert][tile row][part]
  run_tiles(
      l.ring, shared, (i1 - i0) * n_tile,
      [&](int item) {
        const int i = item / n_tile;
        return tile_source(l.down, chosen.expert[i0 + i] * l.down_mat, t0 + item - i * n_tile,
                           l.n_out);
      },
      [&](int item, const char* tile, int rows) {
        const int piece = static_cast<int>(threadIdx.x) / 32 % l.ring.warps, i = item / n_tile;
        float acc[2] = {};
        add_tile(
            l.down,
            {tile_row(l.down, tile, lane / 4, rows), tile_row(l.down, tile, lane / 4 + 8, rows)},
            shared, s, i * n_in / 32, piece * l.cut.pieces,
            min((piece + 1) * l.cut.pieces, n_in / 128), acc);
        put_tile(acc, sums,
                 (i * n_row + (item - i * n_tile) * kTileRows + lane / 4) * l.cut.parts + piece,
                 l.cut.parts);
      });
  __syncthreads();
  const int r0 = t0 * kTileRows, r1 = min(r0 + n_row, l.n_out);
  float* out = l.n_part > 1 ? l.part + part * l.n_out : l.m;
  for (int k = threadIdx.x; k < r1 - r0; k += kThreads) {
    float sum = 0;
    for (int i = 0; i < i1 - i0; ++i)
      sum = fmaf(chosen.weight[i0 + i], part_sum(sums + (i * n_row + k) * l.cut.parts, l.cut.parts),
                 sum);
    out[r0 + k] = sum;
  }
  if (l.n_part > 1) join_parts(l, slice, r0, r1);
}

void raise_shared(const void* kernel, int bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "cudaFuncSetAttribute");
}

// Rows come in pieces of four groups of one block each.
bool in_pieces(const Weight& w) {
  return w.layout == kPlanes && w.type == BlockType::kIQ1_S && w.n_in % 128 == 0 &&
         w.first % 128 == 0;
}

int tiles_of(const Weight& w) { return static_cast<int>((w.n_out + kTileRows - 1) / kTileRows); }

TileRing ring_of(const Cut& cut, int row_bytes, int used) {
  TileRing r{};
  r.at = (used + 127) / 128 * 128;
  r.warps = cut.parts;
  r.stage_bytes = (kTileRows * row_bytes + 127) / 128 * 128;
  if (cut.parts <= kWarps)
    r.stages = std::min(kMaxStages, (kMaxShared - r.at) / (kWarps / r.warps * r.stage_bytes));
  return r;
}
std::size_t shared_bytes(const TileRing& r) {
  return static_cast<std::size_t>(r.at + kWarps / r.warps * r.stages * r.stage_bytes);
}

bool supported(const ExpertStep& e) {
  const Weight &gate = *e.w.gate, &up = *e.w.up, &down = *e.w.down;
  auto aligned = [](const float* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; };
  const bool fits = gate.n_in == e.z.cols && up.n_in == gate.n_in && up.n_out == gate.n_out &&
                    down.n_in == gate.n_out && down.n_out == e.m.cols;
  return fits && e.m.rows == 1 && e.ids.cols <= kMaxUsed && e.logits.cols <= kMaxExperts &&
         !gate.empty() && !down.empty() && in_pieces(gate) && in_pieces(up) && in_pieces(down) &&
         down.n_in <= kMaxStaged && aligned(e.z.data) && e.ids.cols <= e.logits.cols;
}

}  // namespace

std::size_t expert_scratch_floats() { return kMaxParts * 65536; }

bool fused_experts(const ExpertStep& e, float* hidden, std::size_t hidden_floats, float* parts,
                   unsigned* arrived, cudaStream_t stream) {
  if (!supported(e) || (e.bias_stride != 0 && e.logits.rows > 1)) return false;
  const Weight &gate = *e.w.gate, &down = *e.w.down;
  const auto n_used = static_cast<int>(e.ids.cols), n_in = static_cast<int>(down.n_in);
  const int fit = std::max(1, kMaxStaged / n_in);  // experts that a block can stage
  const int n_part = (n_used + fit - 1) / fit;
  const int blocks = device_blocks();
  if (n_part > kMaxParts || down.n_out > 65536 || n_part > blocks ||
      static_cast<std::size_t>(n_used * n_in) > hidden_floats)
    return false;

  InStep in{};
  in.routing = {e.logits.data, e.bias,      static_cast<int>(e.logits.cols),
                n_used,        e.normalise, e.scale};
  in.z = e.z.data;
  in.p_at = lay_out(in.staged, static_cast<int>(e.z.cols), true, false, 0);
  in.candidate_at = (in.p_at + in.routing.n_expert * 4 + 7) / 8 * 8;
  in.gate = rows_of(gate);
  in.up = rows_of(*e.w.up);
  in.cut = cut_of(in.gate);
  in.sums_at = in.candidate_at + in.routing.n_expert * 8;
  const int in_tiles = n_used * tiles_of(gate) / blocks + 1;
  const int in_row = static_cast<int>(std::max(gate.row_bytes, e.w.up->row_bytes));
  in.ring = ring_of(in.cut, in_row, in.sums_at + 2 * in_tiles * kTileRows * in.cut.parts * 4);
  in.gate_mat = gate.mat_bytes;
  in.up_mat = e.w.up->mat_bytes;
  in.n_out = static_cast<int>(gate.n_out);
  in.n_mat = static_cast<int>(gate.n_mat);
  in.expert_begin = static_cast<int>(e.w.expert_begin);
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
  const int most = (n_used + n_part - 1) / n_part;  // experts of a part
  out.sums_at = lay_out(out.staged, most * n_in, true, false, 0);
  out.down = rows_of(down);
  out.cut = cut_of(out.down);
  const int out_tiles = tiles_of(down) / (blocks / n_part) + 1;
  out.ring = ring_of(out.cut, static_cast<int>(down.row_bytes),
                     out.sums_at + most * out_tiles * kTileRows * out.cut.parts * 4);
  out.down_mat = down.mat_bytes;
  out.n_out = static_cast<int>(down.n_out);
  out.n_part = n_part;
  out.m = e.m.data;
  out.part = parts;
  out.arrived = arrived;

  if (in.ring.stages < 1 || out.ring.stages < 1) return false;
  static const bool raised =
      (raise_shared(reinterpret_cast<const void*>(expert_in_kernel), kMaxShared),
       raise_shared(reinterpret_cast<const void*>(expert_out_kernel), kMaxShared), true);
  static_cast<void>(raised);
  launch_chained("expert_in_kernel", expert_in_kernel, dim3(static_cast<unsigned>(blocks)),
                 dim3(kThreads), shared_bytes(in.ring), 1, stream, in);
  launch_chained("expert_out_kernel", expert_out_kernel,
                 dim3(static_cast<unsigned>(blocks / n_part * n_part)), dim3(kThreads),
                 shared_bytes(out.ring), 1, stream, out);
  return true;
}

}  // namespace k3::cuda
