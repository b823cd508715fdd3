// Products of one token's activations with many weight rows, in one launch: every block takes an even share of the bytes.
#include <algorithm>

#include "kernels/cuda/bulk.cuh"
#include "kernels/cuda/check.h"
#include "kernels/cuda/gemv.cuh"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/pdl.cuh"

namespace k3::cuda {
namespace gemv {
namespace {

constexpr int kMaxInputs = 2;
constexpr int kMaxGroups = static_cast<int>(kMaxProducts);
constexpr int kMaxShared = 224 * 1024;
constexpr int kStageBytes =
    3840;  // the most a unit takes: 7 pieces for each lane, and their scales
constexpr int kMaxStages = 4;

struct Input {
  Operand::Op op;
  const float* x;      // kRms: the first of the columns wanted
  const float* other;  // kRms: the norm's weights of these columns
  const float* whole;  // kRms: the row that is normalised
  int n_whole;
  float eps;
  Situ situ;
  Staged staged;
};

// A matrix, its rows cut into parts of at most kMaxLoads loads a lane: a part of a set of rows is a warp's unit of work, so
// that units are alike and few are left over.
struct Matrix {
  Rows rows;
  int input;
  int pieces;  // of a row, 16 bytes each
  int lanes;   // that share a row
  int per;     // rows of a set
  int per_log2;
  unsigned inverse;  // 2^32 / parts, rounded up: exact for the units a block can have
  int parts;         // of a row
  int part_step;     // pieces from one part to the next

  __device__ int set_of(int unit) const {
    return parts == 1 ? unit : static_cast<int>(__umulhi(static_cast<unsigned>(unit), inverse));
  }
};

// Rows of y: a, or a joined with b.
struct Group {
  Matrix m[2];
  int n_matrix;
  FusedProduct::Join join;
  Situ situ;
  float* y;
  int n_out;
  unsigned row_cost;     // 16-byte pieces read for one row
  unsigned cost_before;  // of the groups before this one
};

struct Launch {
  Input input[kMaxInputs];
  Group group[kMaxGroups];
  int n_input, n_group;
  int sums_at;  // offset in shared memory: the units' sums
  int ring_at;  // and of the warps' rings
  int stages;   // of a ring
  unsigned cost;
};

__device__ void stage(const Input& in, char* shared, float* scratch) {
  float scale = 1;
  if (in.op == Operand::Op::kRms) {
    float square = 0;
    for (int i = threadIdx.x * 4; i < in.n_whole; i += kThreads * 4) {
      const float4 v = *reinterpret_cast<const float4*>(in.whole + i);
      square = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, square))));
    }
    square = block_sum(square, scratch);
    scale = 1.0f / sqrtf(square / static_cast<float>(in.n_whole) + in.eps);
  }
  const int n4 = in.staged.n / 4, rounds = (n4 + kThreads - 1) / kThreads;
#pragma unroll 6
  for (int r = 0; r < rounds; ++r) {
    const int i4 = r * kThreads + static_cast<int>(threadIdx.x);
    float4 v{}, o{};
    if (i4 < n4) {
      v = *reinterpret_cast<const float4*>(in.x + i4 * 4);
      if (in.op != Operand::Op::kPlain) o = *reinterpret_cast<const float4*>(in.other + i4 * 4);
    }
    if (in.op == Operand::Op::kSitu) {
      v = situ4(v, o, in.situ);
    } else if (in.op == Operand::Op::kSigmoidGate) {
      v = {v.x * sigmoid(o.x), v.y * sigmoid(o.y), v.z * sigmoid(o.z), v.w * sigmoid(o.w)};
    } else if (in.op == Operand::Op::kRms) {
      v = {v.x * scale * o.x, v.y * scale * o.y, v.z * scale * o.z, v.w * scale * o.w};
    }
    put4(shared, in.staged, i4, v);
  }
}

__device__ __forceinline__ float joined(const Group& g, float a, float b) {
  if (g.join == FusedProduct::Join::kAdd) return a + b;
  if (g.join == FusedProduct::Join::kSitu) return situ4({a, 0, 0, 0}, {b, 0, 0, 0}, g.situ).x;
  return a;
}

// First row of the group whose share of the cost begins at or after `at`.
__device__ __forceinline__ int first_row(const Group& g, unsigned at) {
  if (at <= g.cost_before) return 0;
  return static_cast<int>(
      min((at - g.cost_before + g.row_cost - 1) / g.row_cost, static_cast<unsigned>(g.n_out)));
}

// The block's rows of a group.
struct Share {
  int begin, n;
};

// Thread k finds group k's share: divisions are slow, so no thread makes more than one.
__device__ __forceinline__ void find_shares(const Launch& l, Share* shares) {
  if (threadIdx.x < l.n_group) {
    const unsigned each = l.cost / gridDim.x, rest = l.cost % gridDim.x, b = blockIdx.x;
    const Group& g = l.group[threadIdx.x];
    const int r0 = first_row(g, b * each + min(b, rest)),
              r1 = first_row(g, (b + 1) * each + min(b + 1, rest));
    shares[threadIdx.x] = {r0, max(r1 - r0, 0)};
  }
  __syncthreads();
}

// The units of one warp, matrix after matrix. `turn`: the warp whose turn a matrix's first unit is; it goes on from matrix to
// matrix, so that no warp takes every remainder.
struct Cursor {
  const Launch& l;
  const Share* shares;  // of every group
  int k = -1, i = 0;    // group and matrix
  int unit = 0, units = 0;
  int r0 = 0, n = 0;  // the block's rows in this group
  int turn = 0;
  int sums = 0, next_sums = 0;  // where the matrix's sums begin

  // False when no unit is left; else the fields name one.
  __device__ bool settle() {
    while (unit >= units) {
      if (k == l.n_group) return false;
      turn = (turn + units) % kWarps;
      if (k < 0 || ++i == l.group[k].n_matrix) {
        ++k;
        i = 0;
        units = unit = 0;
        if (k == l.n_group) return false;
        r0 = shares[k].begin;
        n = shares[k].n;
      }
      const Matrix& m = l.group[k].m[i];
      units = ((n + m.per - 1) >> m.per_log2) * m.parts;
      unit = (static_cast<int>(threadIdx.x) / 32 - turn + kWarps) % kWarps;
      sums = next_sums;
      next_sums += n * m.parts;
    }
    return true;
  }
  __device__ const Matrix& matrix() const { return l.group[k].m[i]; }
};

// Lane 0: asks for the unit's bytes: whole rows, or a part of a row's codes and of its scales.
__device__ void fetch(const Cursor& c, char* to, std::uint64_t* arrived) {
  const Matrix& m = c.matrix();
  const int set = m.set_of(c.unit), part = c.unit - set * m.parts;
  const std::byte* row = m.rows.data + (c.r0 + set * m.per) * m.rows.row_bytes;
  if (m.parts == 1) {
    const auto bytes =
        static_cast<unsigned>(min(m.per, c.n - set * m.per) * static_cast<int>(m.rows.row_bytes));
    barrier_expect(arrived, bytes);
    bulk_load(to, row, bytes, arrived);
    return;
  }
  const int first = part * m.part_step, pieces = min(m.part_step, m.pieces - first);
  const bool q8 = m.rows.codec == Codec::kQ8;
  barrier_expect(arrived, static_cast<unsigned>(pieces * (q8 ? 17 : 16)));
  bulk_load(to, row + first * 16, static_cast<unsigned>(pieces * 16), arrived);
  // A half for two pieces: a byte a piece.
  if (q8)
    bulk_load(to + m.part_step * 16, row + m.rows.scales + first, static_cast<unsigned>(pieces),
              arrived);
}

// The unit whose bytes lie at `from`: its rows' sums.
__device__ __forceinline__ void multiply(const Cursor& c, const char* from, const char* shared,
                                         float* sums) {
  const Matrix& m = c.matrix();
  const Staged& s = c.l.input[m.input].staged;
  const int lane = threadIdx.x % 32, sub = lane % m.lanes;
  const int set = m.set_of(c.unit), part = c.unit - set * m.parts;
  const int at = set * m.per + lane / m.lanes;
  const int first = part * m.part_step, n = min(m.part_step, m.pieces - first);
  const char* codes = from + (m.parts > 1 ? 0
                                          : min(lane / m.lanes, c.n - 1 - set * m.per) *
                                                static_cast<int>(m.rows.row_bytes));
  const char* scales = codes + (m.parts > 1 ? m.part_step * 16 : m.rows.scales);
  float v = m.rows.codec == Codec::kQ8 ? unit_q8(codes, scales, n, shared, s, first, sub, m.lanes)
                                       : unit_f32(codes, n, shared, s, first, sub, m.lanes);
  v = sum_lanes(v, m.lanes);
  if (sub == 0 && at < c.n) sums[c.sums + at * m.parts + part] = v;
}

__device__ __forceinline__ float row_sum(const float* sums, int parts) {
  float v = sums[0];
  for (int p = 1; p < parts; ++p) v += sums[p];
  return v;
}

__global__ void __launch_bounds__(kThreads, 1) product_kernel(const __grid_constant__ Launch l) {
  extern __shared__ __align__(128) char shared[];
  __shared__ float scratch[33];
  let_successor_start();
  __shared__ Share shares[kMaxGroups];
  find_shares(l, shares);
  // Every warp has its own ring of stages in shared memory. Copies into it start while the predecessor still runs.
  __shared__ std::uint64_t arrived[kWarps][kMaxStages];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  char* ring = shared + l.ring_at + warp * l.stages * kStageBytes;
  Cursor ahead{l, shares};
  if (lane == 0) {
    for (int i = 0; i < l.stages; ++i) barrier_init(&arrived[warp][i], 1);
    barrier_init_done();
  }
  __syncwarp();
  for (int i = 0; i < l.stages && ahead.settle(); ++i, ahead.unit += kWarps)
    if (lane == 0) fetch(ahead, ring + i * kStageBytes, &arrived[warp][i]);
  wait_for_predecessor();
  for (int i = 0; i < l.n_input; ++i) stage(l.input[i], shared, scratch);
  __syncthreads();
  float* sums = reinterpret_cast<float*>(shared + l.sums_at);
  int at = 0;
  unsigned parity = 0;
  for (Cursor now{l, shares}; now.settle(); now.unit += kWarps) {
    barrier_wait(&arrived[warp][at], parity);
    multiply(now, ring + at * kStageBytes, shared, sums);
    __syncwarp();
    if (ahead.settle()) {
      if (lane == 0) fetch(ahead, ring + at * kStageBytes, &arrived[warp][at]);
      ahead.unit += kWarps;
    }
    if (++at == l.stages) {
      at = 0;
      parity ^= 1;
    }
  }
  __syncthreads();
  for (int k = 0; k < l.n_group; ++k) {
    const Group& g = l.group[k];
    const int r0 = shares[k].begin, n = shares[k].n;
    const float* second = sums + n * g.m[0].parts;
    for (int at = threadIdx.x; at < n; at += kThreads) {
      const float a = row_sum(sums + at * g.m[0].parts, g.m[0].parts);
      const float b = g.n_matrix > 1 ? row_sum(second + at * g.m[1].parts, g.m[1].parts) : 0.0f;
      g.y[r0 + at] = joined(g, a, b);
    }
    sums += n * (g.m[0].parts + (g.n_matrix > 1 ? g.m[1].parts : 0));
  }
}

bool aligned(const float* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }

bool make_input(const Operand& o, Input& in) {
  if (o.x.rows != 1 || !aligned(o.x.data)) return false;
  in = {o.op, o.x.data, o.other.data, nullptr, 0, o.eps, o.situ, {}};
  in.staged.n = static_cast<int>(o.width());
  if (o.op == Operand::Op::kRms) {
    in.x = o.x.data + o.begin;
    in.other = o.norm_w + o.begin;
    in.whole = o.x.data;
    in.n_whole = static_cast<int>(o.x.cols);
    if (o.begin % 4 != 0 || in.n_whole % 4 != 0) return false;
  }
  return in.staged.n % 4 == 0 && (o.op == Operand::Op::kPlain || aligned(in.other));
}

// Notes what the staged operand must offer for this weight.
bool need(const Weight& w, Input& in) {
  if (!has_codec(w) || w.n_in != in.staged.n) return false;
  if (w.layout == kPlanes) {
    in.staged.quantised = true;
  } else {
    in.staged.f32 = 0;
  }
  return true;
}

bool make_matrix(const FusedProduct::Term& t, Launch& l, Matrix& m) {
  if (t.w->empty() || !need(*t.w, l.input[t.operand])) return false;
  m.rows = rows_of(*t.w);
  m.input = t.operand;
  m.pieces = pieces_of(m.rows);
  m.lanes = lanes_for(m.rows);
  m.per = 32 / m.lanes;
  const int loads = (m.pieces + m.lanes - 1) / m.lanes;
  m.parts = (loads + kMaxLoads - 1) / kMaxLoads;
  // Parts of whole lanes and of 16 pieces, so that their scales can be copied too.
  m.part_step = (m.pieces + m.parts - 1) / m.parts;
  m.part_step = (m.part_step + 15) / 16 * 16;
  m.parts = (m.pieces + m.part_step - 1) / m.part_step;
  if (m.parts == 1) m.part_step = m.pieces;
  for (m.per_log2 = 0; 1 << m.per_log2 < m.per;) ++m.per_log2;
  m.inverse = static_cast<unsigned>((std::uint64_t{1} << 32) / static_cast<unsigned>(m.parts)) + 1;
  return m.parts == 1 ? m.per * m.rows.row_bytes <= kStageBytes
                      : m.part_step * 17 <= kStageBytes && m.pieces % 16 == 0;
}

bool make_group(const FusedProduct& p, std::span<const Operand> operands, Launch& l) {
  Group& g = l.group[l.n_group];
  g = {};
  g.join = p.join;
  g.n_matrix = p.join == FusedProduct::Join::kOne ? 1 : 2;
  if (p.y.rows != 1 || !make_matrix(p.a, l, g.m[0]) || p.y.cols != p.a.w->n_out) return false;
  if (g.n_matrix > 1 && (!make_matrix(p.b, l, g.m[1]) || p.b.w->n_out != p.a.w->n_out))
    return false;
  g.situ = operands[static_cast<std::size_t>(p.a.operand)].situ;
  g.y = p.y.data;
  g.n_out = static_cast<int>(p.y.cols);
  for (int i = 0; i < g.n_matrix; ++i)
    g.row_cost += static_cast<unsigned>(g.m[i].rows.row_bytes / 16);
  g.cost_before = l.cost;
  l.cost += g.row_cost * static_cast<unsigned>(g.n_out);
  ++l.n_group;
  return true;
}

// Bytes of the sums of the block with the most rows: its share of every group, rounded up.
int sums_bytes(const Launch& l, int blocks) {
  long long floats = 0;
  for (int k = 0; k < l.n_group; ++k) {
    const Group& g = l.group[k];
    const long long rows =
        std::min<long long>(g.n_out, l.cost / static_cast<unsigned>(blocks) / g.row_cost + 2);
    for (int i = 0; i < g.n_matrix; ++i) floats += rows * g.m[i].parts;
  }
  return static_cast<int>(std::min<long long>(floats * 4, 1 << 30));
}

int multiprocessors() {
  int device = 0, n = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, device),
        "cudaDeviceGetAttribute");
  return n;
}

}  // namespace

int device_blocks() {
  static const int n = multiprocessors();
  return n;
}

}  // namespace gemv

bool has_gemv(const Weight& w) { return gemv::has_codec(w); }

bool fused_products(std::span<const Operand> operands, std::span<const FusedProduct> products,
                    cudaStream_t stream) {
  using namespace gemv;
  if (operands.size() > kMaxInputs || products.size() > kMaxGroups || products.empty())
    return false;
  Launch l{};
  for (const Operand& o : operands)
    if (!make_input(o, l.input[l.n_input++])) return false;
  for (const FusedProduct& p : products)
    if (!make_group(p, operands, l)) return false;
  int shared = 0;
  for (int i = 0; i < l.n_input; ++i) {
    Staged& s = l.input[i].staged;
    shared = lay_out(s, s.n, s.quantised, s.f32 >= 0, shared);
  }
  l.sums_at = shared;
  l.ring_at = (shared + sums_bytes(l, device_blocks()) + 127) / 128 * 128;
  l.stages = std::min(kMaxStages, (kMaxShared - l.ring_at) / (kWarps * kStageBytes));
  if (l.stages < 1) return false;
  shared = l.ring_at + kWarps * l.stages * kStageBytes;
  static const cudaError_t raised =
      cudaFuncSetAttribute(product_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxShared);
  check(raised, "cudaFuncSetAttribute");
  launch_chained("product_kernel", product_kernel, dim3(static_cast<unsigned>(device_blocks())),
                 dim3(kThreads), static_cast<std::size_t>(shared), 1, stream, l);
  return true;
}

}  // namespace k3::cuda
