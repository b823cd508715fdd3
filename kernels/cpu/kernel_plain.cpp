// The definition of each loop, and what runs where nothing better can.
#include <algorithm>

#include "kernels/cpu/dequant.h"
#include "kernels/cpu/loops.h"

namespace k3::cpu {
namespace {

struct Plain {};

constexpr std::int64_t kLanes = 16;

float combine(const float (&acc)[kLanes]) {
  float s[kLanes];
  std::copy(acc, acc + kLanes, s);
  for (std::int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (std::int64_t l = 0; l < half; ++l) s[l] += s[l + half];
  }
  return s[0];
}

// Sixteen sums, element i in sum i % 16, combined pairwise: one order for every caller.
float dot(const float* a, const float* b, std::int64_t n) {
  float acc[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (std::int64_t l = 0; l < kLanes; ++l) acc[l] += a[i + l] * b[i + l];
  }
  for (std::int64_t l = 0; i + l < n; ++l) acc[l] += a[i + l] * b[i + l];
  return combine(acc);
}

void multiply_rows(const RowsJob& job, std::int64_t o0, std::int64_t o1, float* scratch) {
  for (std::int64_t o = o0; o < o1; ++o) {
    const std::byte* row = job.w + o * job.row_bytes;
    const float* values = scratch;
    if (job.type == BlockType::kF32) {
      values = reinterpret_cast<const float*>(row) + job.first;
    } else {
      dequantize_range(job.type, row, job.first, job.n_in, scratch);
    }
    for (std::int64_t t = 0; t < job.n_tok; ++t) {
      job.y[t * job.y_stride + o] = dot(job.x + t * job.x_stride, values, job.n_in);
    }
  }
}

}  // namespace

const KernelTable& plain_table() {
  using L = Loops<Plain>;
  static constexpr KernelTable table{
      "plain",          multiply_rows,   dot,     L::add_scaled, L::add_rows,  L::scale_by,
      L::sum_squares,   L::sigmoid_gate, L::situ, L::exp,        L::kda_gates, L::conv_silu,
      L::delta_columns, L::halves,       L::bf16s};
  return table;
}

}  // namespace k3::cpu
