// Choices of experts recorded, forced and counted, through a whole engine.
#include <doctest/doctest.h>

#include <functional>
#include <mutex>
#include <vector>

#include "comm/thread_comm.h"
#include "rank/engine.h"

namespace k3 {
namespace {

const std::vector<std::int32_t> kIds{1, 40, 7, 7, 33, 25, 19, 3, 88, 41, 2, 76};

// All rows of logits, the first five ids in a chunk and the rest one by one.
std::vector<float> rows_of(Engine& engine) {
  std::vector<float> rows;
  const auto keep = [&](std::span<const float> r, std::int64_t) {
    rows.insert(rows.end(), r.begin(), r.end());
  };
  const std::span all(kIds);
  engine.reset(0);
  engine.last_logits(0, all.first(5), 5, keep);
  for (std::size_t i = 5; i < all.size(); ++i) engine.logits(0, all.subspan(i, 1), true, keep);
  return rows;
}

// One run over `ranks` ranks of tiny weights of this seed, each rank with its own of `books`.
std::vector<float> run(int ranks, std::uint64_t seed, ChoiceUse use, std::vector<ChoiceBook>& books,
                       ChoiceCounts* counts = nullptr) {
  std::vector<float> rows;
  run_ranks(ranks, [&](Comm& world) {
    RunConfig c;
    c.synthetic = "tiny,layers=4";
    c.synthetic_seed = seed;
    c.layout.tp = ranks;
    c.n_ctx = 64;
    const auto backend = make_cpu_backend(1);
    Engine engine(c, world, *backend);
    engine.keep_choices(books[static_cast<std::size_t>(world.rank())]);
    if (world.rank() != 0) {
      engine.serve();
      return;
    }
    engine.use_choices(use);
    rows = rows_of(engine);
    const std::vector<RankReport> reports = engine.reports();
    for (const ChoiceCounts& c : reports[0].choices)
      if (counts != nullptr) *counts += c;
    engine.stop();
  });
  return rows;
}

}  // namespace

TEST_CASE("a run held to its own choices gives the same bits, and comparing finds none changed") {
  for (const int ranks : {1, 2}) {
    std::vector<ChoiceBook> books(static_cast<std::size_t>(ranks));
    const std::vector<float> free = run(ranks, 1, ChoiceUse::kNone, books);
    CHECK(free == run(ranks, 1, ChoiceUse::kRecord, books));
    ChoiceCounts counts, held;
    CHECK(free == run(ranks, 1, ChoiceUse::kForce, books, &held));
    CHECK(held.choices > 0);
    CHECK(held.changed == 0);
    CHECK(free == run(ranks, 1, ChoiceUse::kCompare, books, &counts));
    CHECK(counts.tokens > 0);
    CHECK(counts.tokens % static_cast<std::int64_t>(kIds.size()) == 0);
    CHECK(counts.changed == 0);
  }
}

TEST_CASE("a run held to another model's choices takes them, and is another run") {
  std::vector<ChoiceBook> books(1);
  run(1, 2, ChoiceUse::kRecord, books);
  const std::vector<float> free = run(1, 1, ChoiceUse::kNone, books);
  ChoiceCounts counts, held;
  // Throws where a choice is not taken.
  CHECK(free != run(1, 1, ChoiceUse::kForce, books, &held));
  CHECK(held.changed > 0);
  CHECK(held.changed < held.choices);
  run(1, 1, ChoiceUse::kCompare, books, &counts);
  CHECK(held.choices == counts.choices);
  CHECK(counts.changed > 0);
  CHECK(counts.changed <= counts.choices);
  CHECK(counts.tokens_moved <= counts.tokens);
}

}  // namespace k3
