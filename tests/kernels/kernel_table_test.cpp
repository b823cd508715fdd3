// Every table that this processor can run, against the plain one.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "kernels/cpu/dequant.h"
#include "kernels/cpu/kernel_table.h"
#include "support/random_blocks.h"

namespace k3::cpu {
namespace {

using test::kAllTypes;
using test::random_blocks;
using test::random_values;

void for_each_table(const std::function<void(const KernelTable&)>& body) {
  for (const KernelTable* t : usable_tables()) {
    CAPTURE(t->name);
    body(*t);
  }
}

// A band of a stored matrix: columns [c0, c1) of n_out rows of kStored elements.
struct Band {
  BlockType type;
  std::int64_t c0, c1, n_out;
  std::vector<std::byte> stored;
};

constexpr std::int64_t kStored = 1024;

RowsJob job_of(const Band& b) {
  const BlockTraits& t = traits(b.type);
  RowsJob job;
  job.type = b.type;
  job.row_bytes = kStored / t.elems * t.bytes;
  job.w = b.stored.data() + b.c0 / t.elems * t.bytes;
  job.first = b.c0 % t.elems;
  job.n_in = b.c1 - b.c0;
  job.n_out = b.n_out;
  return job;
}

std::vector<float> multiply(const KernelTable& table, RowsJob job, const std::vector<float>& x,
                            std::int64_t n_tok, std::int64_t pieces = 1) {
  std::vector<float> y(static_cast<std::size_t>(n_tok * job.n_out), -7.0f);
  std::vector<float> scratch(static_cast<std::size_t>(scratch_elems(job.n_in)));
  job.x = x.data();
  job.x_stride = job.n_in;
  job.y = y.data();
  job.y_stride = job.n_out;
  job.n_tok = n_tok;
  for (std::int64_t p = 0; p < pieces; ++p) {
    table.multiply_rows(job, job.n_out * p / pieces, job.n_out * (p + 1) / pieces, scratch.data());
  }
  return y;
}

// The sum that all tables but the plain one promise: 16 lanes, each step fused, combined pairwise.
float fused_dot(const float* a, const float* b, std::int64_t n) {
  float s[16] = {};
  for (std::int64_t i = 0; i < n; ++i) s[i % 16] = std::fma(a[i], b[i], s[i % 16]);
  for (int half = 8; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) s[l] += s[l + half];
  }
  return s[0];
}

// The largest |got - want| over the sum of |x| |w| of the element.
double worst_error(const Band& b, const std::vector<float>& x, std::int64_t n_tok,
                   const std::vector<float>& got, const std::vector<float>& want) {
  const RowsJob job = job_of(b);
  std::vector<float> row(static_cast<std::size_t>(job.n_in));
  double worst = 0;
  for (std::int64_t o = 0; o < b.n_out; ++o) {
    dequantize_range(b.type, job.w + o * job.row_bytes, job.first, job.n_in, row.data());
    for (std::int64_t t = 0; t < n_tok; ++t) {
      double size = 1e-30;
      for (std::int64_t i = 0; i < job.n_in; ++i) {
        size += std::abs(static_cast<double>(row[static_cast<std::size_t>(i)]) *
                         x[static_cast<std::size_t>(t * job.n_in + i)]);
      }
      const auto at = static_cast<std::size_t>(t * b.n_out + o);
      const double d = std::abs(static_cast<double>(got[at]) - want[at]) / size;
      if (!(d <= worst)) worst = d;
    }
  }
  return worst;
}

std::vector<Band> bands(BlockType type) {
  const auto stored = random_blocks(type, kStored * 11, 3);
  std::vector<Band> all;
  // Whole, odd numbers of rows, cuts inside blocks at either end, narrower than a block, narrower than a vector.
  for (const auto& [c0, c1, n] : {std::array<std::int64_t, 3>{0, 1024, 11},
                                  {0, 512, 4},
                                  {256, 768, 7},
                                  {32, 992, 5},
                                  {16, 1008, 3},
                                  {272, 304, 9},
                                  {512, 525, 2},
                                  {3, 1021, 4},
                                  {7, 12, 1}}) {
    all.push_back({type, c0, c1, n, stored});
  }
  return all;
}

}  // namespace

TEST_CASE("every table multiplies every type like the plain one, up to the order of additions") {
  for_each_table([](const KernelTable& table) {
    for (const BlockType type : kAllTypes) {
      CAPTURE(traits(type).name);
      for (const Band& b : bands(type)) {
        CAPTURE(b.c0);
        CAPTURE(b.c1);
        for (const std::int64_t n_tok : {1, 2, 5, 9}) {
          const auto x = random_values(static_cast<std::size_t>(n_tok * (b.c1 - b.c0)), 17);
          const auto got = multiply(table, job_of(b), x, n_tok);
          const auto want = multiply(plain_table(), job_of(b), x, n_tok);
          // Half a unit in the last place for each of the 1024 / 16 + 4 additions that differ.
          CHECK(worst_error(b, x, n_tok, got, want) <= 68 * 0x1p-24);
        }
      }
    }
  });
}

TEST_CASE("all tables but the plain one give the bits of one fused sum of 16 lanes") {
  for_each_table([](const KernelTable& table) {
    if (&table == &plain_table()) return;
    for (const BlockType type : kAllTypes) {
      CAPTURE(traits(type).name);
      for (const Band& b : bands(type)) {
        const RowsJob job = job_of(b);
        const std::int64_t n_tok = 5;
        const auto x = random_values(static_cast<std::size_t>(n_tok * job.n_in), 5);
        std::vector<float> want, row(static_cast<std::size_t>(job.n_in));
        for (std::int64_t t = 0; t < n_tok; ++t) {
          for (std::int64_t o = 0; o < b.n_out; ++o) {
            dequantize_range(type, job.w + o * job.row_bytes, job.first, job.n_in, row.data());
            want.push_back(fused_dot(row.data(), x.data() + t * job.n_in, job.n_in));
          }
        }
        CHECK(multiply(table, job, x, n_tok) == want);
      }
    }
  });
}

TEST_CASE("a token's product does not depend on its neighbours nor on how rows are shared out") {
  for_each_table([](const KernelTable& table) {
    for (const BlockType type : kAllTypes) {
      CAPTURE(traits(type).name);
      for (const Band& b : bands(type)) {
        const std::int64_t n_tok = 6, n_in = b.c1 - b.c0;
        const auto x = random_values(static_cast<std::size_t>(n_tok * n_in), 23);
        const auto together = multiply(table, job_of(b), x, n_tok);
        CHECK(multiply(table, job_of(b), x, n_tok, 3) == together);
        std::vector<float> single;
        for (std::int64_t t = 0; t < n_tok; ++t) {
          const std::vector<float> one(x.begin() + t * n_in, x.begin() + (t + 1) * n_in);
          const auto y = multiply(table, job_of(b), one, 1);
          single.insert(single.end(), y.begin(), y.end());
        }
        CHECK(single == together);
      }
    }
  });
}

TEST_CASE("elementwise loops and the delta rule have the plain table's bits") {
  for_each_table([](const KernelTable& table) {
    const KernelTable& plain = plain_table();
    for (const std::int64_t n : {1, 7, 16, 64, 65, 128, 200}) {
      CAPTURE(n);
      const auto size = static_cast<std::size_t>(n);
      const auto a = random_values(size, 1, -9, 9), b = random_values(size, 2, -9, 9),
                 c = random_values(size, 3, 0, 1);
      const auto same = [&](auto&& run) {
        std::vector<float> got = a, want = a;
        run(table, got.data());
        run(plain, want.data());
        CHECK(got == want);
      };
      same([&](const KernelTable& k, float* y) { k.add_scaled(y, 0.3f, b.data(), n); });
      same([&](const KernelTable& k, float* y) { k.scale_by(y, a.data(), 0.3f, b.data(), n); });
      same([&](const KernelTable& k, float* y) { k.sigmoid_gate(y, b.data(), n); });
      same([&](const KernelTable& k, float* y) { k.situ(y, b.data(), n, {4, 25}); });
      same([&](const KernelTable& k, float* y) { k.situ(y, b.data(), n, {4, 0}); });
      same([&](const KernelTable& k, float* y) { k.exp(y, b.data(), n); });
      same([&](const KernelTable& k, float* y) { k.kda_gates(y, b.data(), n, -1.5f, true, -5); });
      same([&](const KernelTable& k, float* y) { k.kda_gates(y, b.data(), n, -1.5f, false, 0); });
      CHECK(table.sum_squares(a.data(), n) == plain.sum_squares(a.data(), n));
      const float* taps[4] = {a.data(), b.data(), c.data(), b.data()};
      const auto conv = random_values(4 * size, 4);
      for (const std::int64_t n_tap : {3, 4}) {
        same([&](const KernelTable& k, float* y) { k.conv_silu(y, conv.data(), taps, n_tap, n); });
      }
    }
  });
}

TEST_CASE("the delta rule keeps the plain table's state, bit for bit, block by block of columns") {
  for_each_table([](const KernelTable& table) {
    for (const std::int64_t n : {128, 64, 48}) {
      CAPTURE(n);
      const std::int64_t n_tok = 5;
      const auto size = static_cast<std::size_t>(n * n_tok);
      const auto q = random_values(size, 1), k = random_values(size, 2), v = random_values(size, 3),
                 decay = random_values(size, 4, 0, 1), beta = random_values(5, 5, 0, 1);
      std::vector<float> want_o;
      std::vector<float> want_s;
      for (const KernelTable* t : {&plain_table(), &table}) {
        std::vector<float> s = random_values(static_cast<std::size_t>(n * n), 6), o(size);
        DeltaJob d;
        d.s = s.data();
        d.head_dim = d.q_stride = d.k_stride = d.v_stride = d.decay_stride = d.o_stride = n;
        d.n_tok = n_tok;
        d.q = q.data();
        d.k = k.data();
        d.v = v.data();
        d.decay = decay.data();
        d.beta = beta.data();
        d.beta_stride = 1;
        d.scale = 0.125f;
        d.o = o.data();
        for (std::int64_t j = 0; j < n; j += kDeltaBlock) {
          t->delta_columns(d, j, std::min(j + kDeltaBlock, n));
        }
        if (t == &plain_table()) {
          want_o = o;
          want_s = s;
        }
        CHECK(o == want_o);
        CHECK(s == want_s);
      }
    }
  });
}

TEST_CASE("16-bit floats are widened exactly, special values too") {
  std::vector<std::uint16_t> all(65536);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  for_each_table([&](const KernelTable& table) {
    const auto n = static_cast<std::int64_t>(all.size());
    std::vector<float> got(all.size()), want(all.size());
    for (const auto widen : {&KernelTable::half_to_float, &KernelTable::bf16_to_float}) {
      (table.*widen)(got.data(), all.data(), n);
      (plain_table().*widen)(want.data(), all.data(), n);
      for (std::size_t i = 0; i < all.size(); ++i) {
        if (std::isnan(want[i])) {
          CHECK(std::isnan(got[i]));
        } else if (std::memcmp(&got[i], &want[i], 4) != 0) {
          FAIL_CHECK("value " << i);
        }
      }
    }
  });
}

TEST_CASE("a weighted sum of rows equals the plain one up to the fusing of its steps") {
  for_each_table([](const KernelTable& table) {
    for (const std::int64_t n : {5, 64, 128, 512, 531}) {
      const std::int64_t n_row = 9, stride = n + 3;
      const auto rows = random_values(static_cast<std::size_t>(n_row * stride), 1);
      const auto p = random_values(static_cast<std::size_t>(n_row), 2, 0, 1);
      std::vector<float> got(static_cast<std::size_t>(n), 0.5f), want = got;
      table.add_rows(got.data(), p.data(), rows.data(), stride, n_row, n);
      plain_table().add_rows(want.data(), p.data(), rows.data(), stride, n_row, n);
      for (std::size_t i = 0; i < got.size(); ++i) {
        CHECK(std::abs(got[i] - want[i]) <= 9 * 0x1p-24f * 5);
      }
    }
  });
}

TEST_CASE("NaN in an activation reaches every output of its token and no other") {
  for_each_table([](const KernelTable& table) {
    const Band b{BlockType::kQ8_0, 0, 1024, 7, random_blocks(BlockType::kQ8_0, kStored * 7, 3)};
    auto x = random_values(5 * 1024, 1);
    x[2 * 1024 + 77] = std::numeric_limits<float>::quiet_NaN();
    const auto y = multiply(table, job_of(b), x, 5);
    for (std::size_t i = 0; i < y.size(); ++i) CHECK(std::isnan(y[i]) == (i / 7 == 2));
  });
}

TEST_CASE("the tables are plain first, and each has its name") {
  const auto all = usable_tables();
  REQUIRE(!all.empty());
  CHECK(all.front() == &plain_table());
  CHECK(&best_table() == all.back());
  for (const KernelTable* t : all) MESSAGE(std::string(t->name));
}

}  // namespace k3::cpu
