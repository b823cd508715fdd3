// Products of one token's activations with many weight rows, in one launch: every block takes an even share of the bytes.
#include <algorithm>

#include "kernels/check_shapes.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/gemv.cuh"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/pdl.cuh"

namespace k3::cuda {
namespace gemv {
namespace {

constexpr int kMaxInputs = 2;
constexpr int kMaxGroups = static_cast<int>(kMaxProducts);
constexpr int kMaxShared = 200 * 1024;

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
  int lanes;      // that share a row
  int parts;      // of a row
  int part_step;  // pieces from one part to the next
};

// Rows of y: a, or a joined with b.
struct Group {
  Matrix m[2];
  int n_matrix;
  FusedProduct::Join join;
  Situ situ;
  float* y;
  int n_out;
  int row_cost;           // bytes read for one row
  long long cost_before;  // of the groups before this one
};

struct Launch {
  Input input[kMaxInputs];
  Group group[kMaxGroups];
  int n_input, n_group;
  int sums_at;  // offset in shared memory: the units' sums
  long long cost;
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
#pragma unroll 4
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
__device__ __forceinline__ int first_row(const Group& g, long long at) {
  const long long row = (at - g.cost_before + g.row_cost - 1) / g.row_cost;
  return static_cast<int>(max(0ll, min(row, static_cast<long long>(g.n_out))));
}

// This warp's units of a matrix's rows [r0, r1); sums[(row - r0) * parts + part]. `turn`: the warp whose turn the first
// unit is; goes on from matrix to matrix, so that no warp takes every remainder.
__device__ __forceinline__ void multiply_rows(const Launch& l, const Matrix& m, int r0, int r1,
                                              const char* shared, float* sums, int& turn) {
  const int per = 32 / m.lanes, lane = threadIdx.x % 32, sub = lane % m.lanes;
  const int units = (r1 - r0 + per - 1) / per * m.parts;
  const int warp = threadIdx.x / 32;
  const Staged& s = l.input[m.input].staged;
  for (int u = (warp - turn + kWarps) % kWarps; u < units; u += kWarps) {
    const int set = u / m.parts, part = u - set * m.parts;
    const int at = set * per + lane / m.lanes, row = r0 + min(at, r1 - r0 - 1);
    const std::byte* p = m.rows.data + row * m.rows.row_bytes;
    const int piece = part * m.part_step + sub;
    float v = m.rows.codec == Codec::kQ8 ? unit_q8(m.rows, p, shared, s, piece, m.lanes)
                                         : unit_f32(m.rows, p, shared, s, piece, m.lanes);
    v = sum_lanes(v, m.lanes);
    if (sub == 0 && at < r1 - r0) sums[at * m.parts + part] = v;
  }
  turn = (turn + units) % kWarps;
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
  const long long begin = l.cost * blockIdx.x / gridDim.x,
                  end = l.cost * (blockIdx.x + 1) / gridDim.x;
  wait_for_predecessor();
  for (int i = 0; i < l.n_input; ++i) stage(l.input[i], shared, scratch);
  __syncthreads();
  float* sums = reinterpret_cast<float*>(shared + l.sums_at);
  int turn = 0;
  for (int k = 0; k < l.n_group; ++k) {
    const Group& g = l.group[k];
    const int r0 = first_row(g, begin), r1 = first_row(g, end);
    if (r0 >= r1) continue;
    for (int i = 0; i < g.n_matrix; ++i) {
      multiply_rows(l, g.m[i], r0, r1, shared, sums, turn);
      sums += (r1 - r0) * g.m[i].parts;
    }
  }
  __syncthreads();
  sums = reinterpret_cast<float*>(shared + l.sums_at);
  for (int k = 0; k < l.n_group; ++k) {
    const Group& g = l.group[k];
    const int r0 = first_row(g, begin), n = max(first_row(g, end) - r0, 0);
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
  m.lanes = lanes_for(m.rows);
  const int loads = (pieces_of(m.rows) + m.lanes - 1) / m.lanes;
  m.parts = (loads + kMaxLoads - 1) / kMaxLoads;
  m.part_step = (loads + m.parts - 1) / m.parts * m.lanes;
  return true;
}

bool make_group(const FusedProduct& p, std::span<const Operand> operands, Launch& l) {
  Group& g = l.group[l.n_group];
  g = {};
  g.join = p.join;
  g.n_matrix = p.join == FusedProduct::Join::kOne ? 1 : 2;
  if (p.y.rows != 1 || !make_matrix(p.a, l, g.m[0])) return false;
  if (g.n_matrix > 1 && (!make_matrix(p.b, l, g.m[1]) || p.b.w->n_out != p.a.w->n_out))
    return false;
  g.situ = operands[static_cast<std::size_t>(p.a.operand)].situ;
  g.y = p.y.data;
  g.n_out = static_cast<int>(p.y.cols);
  for (int i = 0; i < g.n_matrix; ++i) g.row_cost += static_cast<int>(g.m[i].rows.row_bytes);
  g.cost_before = l.cost;
  l.cost += static_cast<long long>(g.row_cost) * g.n_out;
  ++l.n_group;
  return true;
}

// Bytes of the sums of the block with the most rows: its share of every group, rounded up.
int sums_bytes(const Launch& l, int blocks) {
  long long floats = 0;
  for (int k = 0; k < l.n_group; ++k) {
    const Group& g = l.group[k];
    const long long rows = std::min<long long>(g.n_out, l.cost / blocks / g.row_cost + 2);
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
  shared += sums_bytes(l, device_blocks());
  if (shared > kMaxShared) return false;
  static const cudaError_t raised =
      cudaFuncSetAttribute(product_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxShared);
  check(raised, "cudaFuncSetAttribute");
  launch_chained("product_kernel", product_kernel, dim3(static_cast<unsigned>(device_blocks())),
                 dim3(kThreads), static_cast<std::size_t>(shared), 1, stream, l);
  return true;
}

}  // namespace k3::cuda
