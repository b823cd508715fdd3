// Who shares a step, and what of a prompt is kept for others.
#include "rank/scheduler.h"

#include <doctest/doctest.h>

#include <map>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

namespace k3 {
namespace {

using Ids = std::vector<std::int32_t>;

Ids counting(int n, std::int32_t from = 0) {
  Ids ids(static_cast<std::size_t>(n));
  std::iota(ids.begin(), ids.end(), from);
  return ids;
}

Ids joined(Ids a, const Ids& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

TEST_CASE("every sequence that generates gets its token, and prompts share the rest in order") {
  const std::vector<SlotWork> work = {{.slot = 0, .n_prompt = 30, .n_read = 10},
                                      {.slot = 1, .n_prompt = 5, .n_read = 5},
                                      {.slot = 2, .n_prompt = 9, .n_read = 0},
                                      {.slot = 3, .n_prompt = 7, .n_read = 7}};
  CHECK(plan_step(work, {.step_tok = 25}) ==
        std::vector<PlannedPart>{{1, -1, 1}, {3, -1, 1}, {0, 10, 20}, {2, 0, 3}});
  CHECK(plan_step(work, {.step_tok = 4}) ==
        std::vector<PlannedPart>{{1, -1, 1}, {3, -1, 1}, {0, 10, 2}});
  CHECK_THROWS_AS(plan_step(work, {.step_tok = 3}), std::invalid_argument);
  CHECK(plan_step({}, {.step_tok = 1}).empty());
}

TEST_CASE("a prompt halts where its state is to be kept, once") {
  SlotWork w{.slot = 4, .n_prompt = 100, .n_read = 0, .cut = 40};
  CHECK(plan_step({&w, 1}, {.step_tok = 64}) == std::vector<PlannedPart>{{4, 0, 40}});
  w.n_read = 40;
  CHECK(plan_step({&w, 1}, {.step_tok = 64}) == std::vector<PlannedPart>{{4, 40, 60}});
}

TEST_CASE("with pieces, a prompt is cut at the same places whatever else runs") {
  std::mt19937 rng(7);
  for (int trial = 0; trial < 50; ++trial) {
    std::vector<SlotWork> work;
    for (int slot = 0; slot < 6; ++slot) {
      const auto n = static_cast<std::int64_t>(1 + rng() % 90);
      work.push_back({slot, n, rng() % 3 == 0 ? n : 0});
    }
    std::map<int, std::int64_t> read;
    const StepLimits limits{.step_tok = static_cast<std::int64_t>(21 + rng() % 40),
                            .piece_tok = 16};
    for (int step = 0; step < 200; ++step) {
      const auto parts = plan_step(work, limits);
      REQUIRE(!parts.empty());
      std::int64_t sum = 0;
      for (const PlannedPart& p : parts) {
        sum += p.n;
        if (p.begin < 0) continue;
        SlotWork& w = work[static_cast<std::size_t>(p.slot)];
        CHECK(p.begin == w.n_read);
        CHECK(p.begin % 16 == 0);
        CHECK(p.n == std::min<std::int64_t>(16, w.n_prompt - p.begin));
        w.n_read += p.n;
      }
      CHECK(sum <= limits.step_tok);
    }
    for (const SlotWork& w : work) CHECK(w.n_read == w.n_prompt);
  }
}

TEST_CASE("the state that is kept is the one that saves most tokens") {
  const Ids system = counting(50), user = joined(system, counting(20, 100));
  const Ids a = joined(system, {7}), b = joined(system, {8}), c = joined(user, {9});
  const std::vector<std::span<const std::int32_t>> three = {a, b, c};
  // 50 tokens for each of three beat 70 for one of them.
  CHECK(choose_cut(joined(user, {1}), three, 16, 1) == 50);
  const std::vector<std::span<const std::int32_t>> one = {c};
  CHECK(choose_cut(joined(user, {1}), one, 16, 1) == 70);
  CHECK(choose_cut(joined(user, {1}), one, 16, 64) == 64);
  CHECK(choose_cut(joined(user, {1}), one, 71, 1) == 0);
  CHECK(choose_cut(joined(user, {1}), {}, 16, 1) == 0);
  // The last token of a prompt must be read by its own request: its logits are the answer's first.
  const std::vector<std::span<const std::int32_t>> alike = {user};
  CHECK(choose_cut(user, alike, 16, 1) == 69);
}

TEST_CASE("the longest kept beginning is found, never all of a prompt") {
  PrefixStore store(2);
  CHECK(store.add(counting(10), 1).empty());
  CHECK(store.add(counting(20), 2).empty());
  CHECK(store.find(counting(15))->saved == 1);
  CHECK(store.find(counting(21))->saved == 2);
  CHECK(store.find(counting(21))->length == 20);
  CHECK(store.find(counting(20))->length == 10);
  CHECK_FALSE(store.find(counting(10)).has_value());
  CHECK_FALSE(store.find(counting(15, 1)).has_value());
  CHECK(store.has(counting(10)));
  CHECK_FALSE(store.has(counting(9)));
}

TEST_CASE("of kept states the one unused longest goes") {
  PrefixStore store(2);
  store.add(counting(10), 1);
  store.add(counting(20, 5), 2);
  store.find(counting(12));
  CHECK(store.add(counting(30, 9), 3) == std::vector<std::uint64_t>{2});
  CHECK(store.size() == 2);
  CHECK(store.find(counting(12))->saved == 1);
}

TEST_CASE("a state that is pinned stays, beside as many others as there is room for") {
  PrefixStore store(1);
  store.pin(counting(10), 1);
  CHECK(store.add(counting(20, 5), 2).empty());
  CHECK(store.add(counting(20, 6), 3) == std::vector<std::uint64_t>{2});
  CHECK(store.find(counting(12))->saved == 1);
  CHECK(store.size() == 2);
  PrefixStore none(0);
  none.pin(counting(10), 1);
  CHECK(none.add(counting(20), 2) == std::vector<std::uint64_t>{2});
  CHECK(none.find(counting(30))->length == 10);
}

}  // namespace
}  // namespace k3
