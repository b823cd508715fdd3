// Attention over the latent cache: how it is cut over ranks and joined again, on every backend, and which kernel serves it.
#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include "kernels/cuda/mla_choice.h"
#include "support/backends.h"
#include "support/random_blocks.h"

namespace k3 {

using test::random_values;

TEST_CASE(
    "every position is kept by one rank, in order and without gaps, and shares differ by a block "
    "at most") {
  for (const std::int64_t n_part : {1, 2, 3, 8}) {
    for (const std::int64_t block : {1, 3, 64}) {
      std::vector<std::int64_t> rows(static_cast<std::size_t>(n_part), 0);
      for (std::int64_t pos = 0; pos < 1000; ++pos) {
        int keepers = 0;
        for (std::int64_t p = 0; p < n_part; ++p) {
          const RowShard shard{p, n_part, block};
          std::int64_t& n = rows[static_cast<std::size_t>(p)];
          REQUIRE(shard.rows(pos) == n);
          if (shard.keeps(pos)) {
            ++keepers;
            ++n;
          }
        }
        REQUIRE(keepers == 1);
        REQUIRE(rows.front() - rows.back() <= block);
      }
    }
  }
}

TEST_CASE(
    "the parts of ranks that share the rows join to the attention of one rank with all rows") {
  for_each_backend([](Backend& b) {
    const std::int64_t heads = 3, latent = 16, rope = 4, width = latent + rope, n_ctx = 24,
                       n_tok = 6, block = 2;
    // Slot 1 at positions 0 .. 4, slot 0 at its first; its one row leaves most ranks without any.
    const std::vector<std::int32_t> pos{0, 1, 2, 3, 4, 0}, slot{1, 1, 1, 1, 1, 0};
    Matrix<std::int32_t> d_pos(b, 1, n_tok, pos), d_slot(b, 1, n_tok, slot);
    BatchView batch;
    batch.n_tok = n_tok;
    batch.pos = d_pos.data();
    batch.slot = d_slot.data();
    Matrix<float> c(b, n_tok, width, random_values(n_tok * width, 1)),
        norm(b, 1, latent, random_values(latent, 2)),
        q(b, n_tok, heads * width, random_values(n_tok * heads * width, 3)),
        want(b, n_tok, heads * latent), got(b, n_tok, heads * latent);
    Matrix<float> rows(b, 2 * n_ctx, width);
    const auto cache = [&](Matrix<float>& m, RowShard shard) {
      return MlaCache{
          reinterpret_cast<std::byte*>(m.data()), CacheType::kF32, n_ctx, latent, rope, shard};
    };
    b.mla_append(c, norm.data(), 1e-5f, cache(rows, {}), batch);
    b.mla_attend(want, q, heads, 0.7f, cache(rows, {}), batch);
    for (const std::int64_t n_part : {1, 2, 3, 8}) {
      const std::int64_t one = heads * (latent + 2);
      Matrix<float> parts(b, n_part * n_tok, one);
      for (std::int64_t p = 0; p < n_part; ++p) {
        Matrix<float> some(b, 2 * n_ctx, width);
        const MlaCache shard = cache(some, {p, n_part, block});
        b.mla_append(c, norm.data(), 1e-5f, shard, batch);
        b.mla_attend_part(parts.view().slice(p * n_tok, n_tok), q, heads, 0.7f, shard, batch);
      }
      b.mla_combine(got, parts, n_part, heads);
      const std::vector<float> x = got.get(), y = want.get(), all = parts.get();
      for (std::size_t i = 0; i < x.size(); ++i) REQUIRE(std::abs(x[i] - y[i]) < 1e-6);
      if (n_part == 8) {  // rank 7 keeps positions 14, 15, ...: none of these
        const std::size_t last = static_cast<std::size_t>((7 * n_tok) * one);
        CHECK(all[last] == -std::numeric_limits<float>::infinity());
        CHECK(all[last + 1] == 0);
        CHECK(all[last + 2] == 0);
      }
      if (n_part > 1) {  // a mean of the parts is not the answer: they weigh differently
        double wrong = 0;
        for (std::int64_t i = 0; i < latent; ++i) {
          const auto at = static_cast<std::size_t>(4 * one + 2 + i);
          const float first = all[at] / all[static_cast<std::size_t>(4 * one + 1)];
          wrong = std::max<double>(
              wrong, std::abs(first - y[static_cast<std::size_t>(4 * heads * latent + i)]));
        }
        CHECK(wrong > 1e-3);
      }
    }
  });
}

TEST_CASE(
    "attention over a cache of which a rank keeps a part is refused, not done over that part") {
  for_each_backend([](Backend& b) {
    Matrix<std::int32_t> zero(b, 1, 1, {0});
    BatchView batch;
    batch.n_tok = 1;
    batch.pos = batch.slot = zero.data();
    Matrix<float> rows(b, 8, 5), q(b, 1, 5), ctx(b, 1, 4);
    const MlaCache cache{
        reinterpret_cast<std::byte*>(rows.data()), CacheType::kF32, 8, 4, 1, {0, 2, 2}};
    CHECK_THROWS_WITH_AS(b.mla_attend(ctx, q, 1, 1.0f, cache, batch),
                         doctest::Contains("mla_attend_part"), std::invalid_argument);
  });
}

TEST_CASE(
    "tensor cores serve K3's rows in f16 and bf16 for few tokens, the exact kernel all else") {
  const cuda::MlaShape k3{CacheType::kF16, 512, 64, 12, 1, 90, true, true};
  using cuda::choose_mla;
  CHECK(choose_mla(Precision::kFast, k3) == cuda::MlaChoice{true, 16, 1, 12, false, false});
  CHECK(!choose_mla(Precision::kExact, k3).tensor_cores);
  for (const auto& change : std::vector<std::function<void(cuda::MlaShape&)>>{
           [](auto& s) { s.type = CacheType::kF32; }, [](auto& s) { s.kv_latent = 256; },
           [](auto& s) { s.rope = 0; }, [](auto& s) { s.n_head = 129; },
           [](auto& s) { s.n_tok = 65; }, [](auto& s) { s.cc = 80; },
           [](auto& s) { s.has_sm90a = false; }, [](auto& s) { s.aligned = false; }}) {
    cuda::MlaShape other = k3;
    change(other);
    CHECK(!choose_mla(Precision::kFast, other).tensor_cores);
  }
  for (const CacheType type : {CacheType::kF16, CacheType::kBF16}) {
    for (std::int64_t n = 1; n <= 128; ++n) {
      cuda::MlaShape s = k3;
      s.type = type;
      s.n_head = n;
      const cuda::MlaChoice c = choose_mla(Precision::kFast, s);
      REQUIRE(c.tensor_cores);
      REQUIRE(c.group_heads <= c.tile_heads);
      REQUIRE(c.group_heads * c.n_group >= n);
      REQUIRE(c.group_heads * (c.n_group - 1) < n);
      REQUIRE(c.pair == (c.n_group == 2));
      REQUIRE(c.split_q == (type == CacheType::kBF16));
    }
  }
}

}  // namespace k3
