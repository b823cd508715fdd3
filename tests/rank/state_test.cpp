// Sequences that are forked, kept, brought back and started anew answer as ones that ran alone.
#include "rank/state.h"

#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "comm/thread_comm.h"
#include "rank/engine.h"

namespace k3 {
namespace {

constexpr std::int64_t kContext = 64;

// Runs `body` on rank 0 of an engine of three slots.
void with_engine(int ranks, CacheType cache, const std::function<void(Engine&)>& body,
                 bool kv_shard = false, std::int64_t n_ctx = kContext) {
  run_ranks(ranks, [&](Comm& world) {
    RunConfig c;
    c.model = std::string(K3_TEST_DATA) + "/models/k3-deep-f32.gguf";
    c.layout.tp = ranks;
    c.layout.kv_shard = kv_shard;
    c.n_ctx = n_ctx;
    c.n_slot = 3;
    c.cache = cache;
    const auto backend = make_cpu_backend(1);
    Engine engine(c, world, *backend);
    if (world.rank() != 0) {
      engine.serve();
      return;
    }
    body(engine);
    engine.stop();
  });
}

std::vector<std::int32_t> ids(int n, int seed) {
  std::vector<std::int32_t> out;
  for (int i = 0; i < n; ++i) out.push_back((i * 37 + seed * 101 + i * i * seed) % 200 + 3);
  return out;
}

// Logits of the last position after `more` was appended to the slot's sequence.
std::vector<float> last_logits(Engine& e, int slot, const std::vector<std::int32_t>& more) {
  std::vector<float> out;
  e.logits(slot, more, true, [&](std::span<const float> rows, std::int64_t) {
    out.assign(rows.begin(), rows.end());
  });
  return out;
}

std::vector<float> fresh(Engine& e, int slot, const std::vector<std::int32_t>& prompt,
                         const std::vector<std::int32_t>& more) {
  e.reset(slot);
  last_logits(e, slot, prompt);
  return last_logits(e, slot, more);
}

template <class F>
void on_layouts(const F& body) {
  for (const int ranks : {1, 3}) {
    for (const CacheType cache : {CacheType::kF32, CacheType::kF16}) {
      CAPTURE(ranks);
      with_engine(ranks, cache, body);
    }
  }
}

TEST_CASE("a fork and its origin go on as two fresh runs would") {
  on_layouts([](Engine& e) {
    const auto prompt = ids(11, 1), left = ids(5, 2), right = ids(7, 3);
    const auto expected_left = fresh(e, 2, prompt, left),
               expected_right = fresh(e, 2, prompt, right);
    REQUIRE(expected_left != expected_right);
    e.reset(0);
    last_logits(e, 0, prompt);
    e.fork(0, 1);
    CHECK(e.length(1) == 11);
    CHECK(last_logits(e, 0, left) == expected_left);
    CHECK(last_logits(e, 1, right) == expected_right);
  });
}

TEST_CASE("a sequence that was kept comes back in any slot, as often as wanted") {
  on_layouts([](Engine& e) {
    const auto prompt = ids(9, 4), more = ids(6, 5);
    const auto expected = fresh(e, 0, prompt, more);
    e.reset(0);
    last_logits(e, 0, prompt);
    const std::uint64_t kept = e.save(0);
    last_logits(e, 0, ids(20, 6));  // what it was taken from goes on, and is overwritten
    for (const int slot : {0, 2, 2}) {
      last_logits(e, slot, ids(3, 7));
      e.restore(kept, slot);
      CHECK(e.length(slot) == 9);
      CHECK(last_logits(e, slot, more) == expected);
    }
    e.forget(kept);
    CHECK_THROWS_AS(e.restore(kept, 0), std::invalid_argument);
  });
}

TEST_CASE("where the cache's rows are cut over ranks each keeps and forks its share") {
  // Blocks of 64 rows: the prompt ends in the second rank's, the rest of it crosses into the third's and the first's again.
  const auto prompt = ids(100, 4), more = ids(120, 5);
  const auto fork_and_restore = [&](Engine& e) {
    const auto expected = fresh(e, 0, prompt, more);
    e.reset(0);
    last_logits(e, 0, prompt);
    e.fork(0, 1);
    const std::uint64_t kept = e.save(0);
    last_logits(e, 0, ids(150, 6));
    CHECK(last_logits(e, 1, more) == expected);
    e.restore(kept, 2);
    CHECK(last_logits(e, 2, more) == expected);
  };
  for (const CacheType cache : {CacheType::kF32, CacheType::kF16})
    with_engine(3, cache, fork_and_restore, true, 256);
}

TEST_CASE(
    "ranks that share the cache's rows hold as many bytes each, for a share of the positions") {
  std::vector<RankReport> whole, cut;
  with_engine(
      3, CacheType::kF32, [&](Engine& e) { whole = e.reports(); }, false, 3 * 128);
  with_engine(
      3, CacheType::kF32, [&](Engine& e) { cut = e.reports(); }, true, 3 * 128);
  REQUIRE(cut.size() == 3);
  for (std::size_t r = 0; r < 3; ++r) {
    CHECK(cut[r].state_bytes - cut[0].state_bytes == whole[r].state_bytes - whole[0].state_bytes);
    CHECK(cut[r].state_bytes < whole[r].state_bytes);
  }
}

TEST_CASE("a kept sequence remembers its tokens for the penalties") {
  with_engine(1, CacheType::kF32, [](Engine& e) {
    SamplerOptions strict;
    strict.temp = 0;
    strict.repetition_penalty = 100;  // what was seen is hardly drawn again
    const auto prompt = ids(9, 4);
    e.reset(0);
    const Decision first = e.extend(0, prompt, strict, 0, false);
    const std::uint64_t kept = e.save(0);
    e.restore(kept, 1);
    e.fork(1, 2);
    const Decision original = e.extend(0, std::span(&first.id, 1), strict, 1, true);
    CHECK(e.extend(1, std::span(&first.id, 1), strict, 1, true).id == original.id);
    CHECK(e.extend(2, std::span(&first.id, 1), strict, 1, true).id == original.id);
  });
}

TEST_CASE("a new sequence starts from zero state, whatever its slot held before") {
  on_layouts([](Engine& e) {
    const auto prompt = ids(8, 8), more = ids(4, 9);
    const auto expected = fresh(e, 0, prompt, more);
    e.reset(0);
    last_logits(e, 0, ids(40, 10));
    CHECK(fresh(e, 0, prompt, more) == expected);
    e.fabricate(1, 30, 1);
    CHECK(fresh(e, 1, prompt, more) == expected);
    e.fork(0, 1);
    CHECK(fresh(e, 1, prompt, more) == expected);
  });
}

TEST_CASE("slots and numbers that do not exist are refused before anything runs") {
  with_engine(1, CacheType::kF32, [](Engine& e) {
    CHECK_THROWS_AS(e.fork(0, 3), std::invalid_argument);
    CHECK_THROWS_AS(e.fork(-1, 0), std::invalid_argument);
    CHECK_THROWS_AS(e.save(3), std::invalid_argument);
    CHECK_THROWS_AS(e.restore(1, 0), std::invalid_argument);
    CHECK_THROWS_AS(e.forget(1), std::invalid_argument);
    CHECK(e.length(0) == 0);
  });
}

}  // namespace
}  // namespace k3
