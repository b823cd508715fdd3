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

// Rows of y: a, or a joined with b.
struct Group {
  Rows a, b;
  int a_input, b_input;
  FusedProduct::Join join;
  Situ situ;
  float* y;
  int n_out;
  int lanes;
  int row_cost;           // bytes read for one row
  long long cost_before;  // of the groups before this one
};

struct Launch {
  Input input[kMaxInputs];
  Group group[kMaxGroups];
  int n_input, n_group;
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

__global__ void __launch_bounds__(kThreads, 1) product_kernel(const __grid_constant__ Launch l) {
  extern __shared__ __align__(128) char shared[];
  __shared__ float scratch[33];
  let_successor_start();
  const long long begin = l.cost * blockIdx.x / gridDim.x,
                  end = l.cost * (blockIdx.x + 1) / gridDim.x;
  wait_for_predecessor();
  for (int i = 0; i < l.n_input; ++i) stage(l.input[i], shared, scratch);
  __syncthreads();
  const int lane = threadIdx.x % 32;
  int warp =
      threadIdx.x / 32;  // rotates from group to group, so that no warp takes every remainder
  for (int k = 0; k < l.n_group; ++k) {
    const Group& g = l.group[k];
    const int r0 = first_row(g, begin), r1 = first_row(g, end), per = 32 / g.lanes;
    const int sub = lane % g.lanes;
    int row = r0 + warp * per + lane / g.lanes;
    for (; row - lane / g.lanes < r1; row += kWarps * per) {
      const int own = min(row, r1 - 1);
      float a = dot_row(g.a, own, shared, l.input[g.a_input].staged, 0, sub, g.lanes);
      a = sum_lanes(a, g.lanes);
      float b = 0;
      if (g.join != FusedProduct::Join::kOne) {
        b = dot_row(g.b, own, shared, l.input[g.b_input].staged, 0, sub, g.lanes);
        b = sum_lanes(b, g.lanes);
      }
      if (sub == 0 && row < r1) g.y[row] = joined(g, a, b);
    }
    const int sets = (r1 - r0 + per - 1) / per;
    warp = (warp + kWarps - sets % kWarps) % kWarps;
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

bool make_group(const FusedProduct& p, std::span<const Operand> operands, Launch& l) {
  Group& g = l.group[l.n_group];
  if (p.y.rows != 1 || p.a.w->empty() || !need(*p.a.w, l.input[p.a.operand])) return false;
  g = {};
  g.a = rows_of(*p.a.w);
  g.a_input = p.a.operand;
  g.join = p.join;
  g.situ = operands[static_cast<std::size_t>(p.a.operand)].situ;
  g.y = p.y.data;
  g.n_out = static_cast<int>(p.y.cols);
  g.lanes = lanes_for(g.a);
  g.row_cost = static_cast<int>(g.a.row_bytes);
  if (p.join != FusedProduct::Join::kOne) {
    if (p.b.w->empty() || p.b.w->n_out != p.a.w->n_out || !need(*p.b.w, l.input[p.b.operand]))
      return false;
    g.b = rows_of(*p.b.w);
    g.b_input = p.b.operand;
    g.lanes = std::max(g.lanes, lanes_for(g.b));
    g.row_cost += static_cast<int>(g.b.row_bytes);
  }
  g.cost_before = l.cost;
  l.cost += static_cast<long long>(g.row_cost) * g.n_out;
  ++l.n_group;
  return true;
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
  if (shared > kMaxShared) return false;
  static const cudaError_t raised =
      cudaFuncSetAttribute(product_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxShared);
  check(raised, "cudaFuncSetAttribute");
  launch_chained("product_kernel", product_kernel, dim3(static_cast<unsigned>(device_blocks())),
                 dim3(kThreads), static_cast<std::size_t>(shared), 1, stream, l);
  return true;
}

}  // namespace k3::cuda
