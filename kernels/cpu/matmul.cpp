#include <algorithm>

#include "kernels/check_shapes.h"
#include "kernels/cpu/dequant.h"
#include "kernels/cpu/ops.h"

namespace k3::cpu {
namespace {

// A job's rows in panels: small enough to be shared out evenly, large enough for the tables to work on several at once.
std::int64_t rows_per_piece(const RowsJob& job) {
  return job.n_tok == 1 ? kRowBlock : panel_rows(job.n_in);
}

std::int64_t pieces(const RowsJob& job) {
  const std::int64_t n = rows_per_piece(job);
  return (job.n_out + n - 1) / n;
}

}  // namespace

RowsJob rows_job(View<float> y, View<const float> x, const Weight& w, std::int64_t mat) {
  check_shapes({y, x, &w});
  RowsJob job;
  job.w = w.data + mat * w.mat_bytes;
  job.row_bytes = w.row_bytes;
  job.type = w.type;
  job.first = w.first;
  job.n_in = w.n_in;
  job.n_out = w.n_out;
  job.x = x.data;
  job.x_stride = x.stride;
  job.y = y.data;
  job.y_stride = y.stride;
  job.n_tok = y.rows;
  if (w.n_in == 0) {  // an empty band contributes nothing to the sum
    for (std::int64_t t = 0; t < y.rows; ++t) std::fill_n(y.row(t), y.cols, 0.0f);
    job.n_out = 0;
  }
  return job;
}

void multiply(Ops& ops) {
  std::int64_t total = 0, scratch = 0, work = 0, n_tok = 0;
  for (const RowsJob& j : ops.jobs) {
    if (j.n_tok == 0) continue;
    total += pieces(j);
    scratch = std::max(scratch, scratch_elems(j.n_in));
    work += j.n_tok * j.n_out * j.n_in;
    n_tok = std::max(n_tok, j.n_tok);
  }
  if (total == 0) return;
  ops.pool.reserve(static_cast<std::size_t>(scratch));
  const auto run = [&](std::int64_t begin, std::int64_t end, int thread) {
    std::int64_t at = 0;  // first piece of the job
    for (const RowsJob& j : ops.jobs) {
      if (j.n_tok == 0) continue;
      const std::int64_t n = pieces(j), rows = rows_per_piece(j);
      const std::int64_t b = std::max(begin - at, std::int64_t{0}), e = std::min(end - at, n);
      if (b < e) {
        ops.table.multiply_rows(j, b * rows, std::min(e * rows, j.n_out), ops.pool.scratch(thread));
      }
      at += n;
    }
  };
  // One token: the same rows go to the same thread each time, whose caches hold some of them.
  const std::int64_t cost = std::max<std::int64_t>(1, work / total);
  if (n_tok == 1) {
    ops.pool.split(total, cost, run);
  } else {
    ops.pool.deal(total, cost, run);
  }
}

void matmul(Ops& ops, std::span<const MatmulJob> jobs) {
  ops.jobs.clear();
  for (const MatmulJob& j : jobs) ops.jobs.push_back(rows_job(j.y, j.x, *j.w, 0));
  multiply(ops);
}

void head_matmul(Ops& ops, View<float> y, std::int64_t y_head, View<const float> x,
                 std::int64_t x_head, const Weight& w) {
  ops.jobs.clear();
  for (std::int64_t h = 0; h < w.n_mat; ++h) {
    ops.jobs.push_back(
        rows_job(y.columns(h * y_head, w.n_out), x.columns(h * x_head, w.n_in), w, h));
  }
  multiply(ops);
}

void embed(Ops& ops, View<float> y, const BatchView& batch, const Weight& table,
           std::int64_t vocab_begin) {
  ops.pool.split(batch.n_tok, y.cols, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int64_t row = batch.ids[t] - vocab_begin;
      if (row < 0 || row >= table.n_out) {
        std::fill_n(y.row(t), y.cols, 0.0f);
      } else {
        dequantize_range(table.type, table.data + row * table.row_bytes, table.first, table.n_in,
                         y.row(t));
      }
    }
  });
}

}  // namespace k3::cpu
