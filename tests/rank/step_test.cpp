// Sequences that share steps answer as ones that ran alone: bit for bit on CPU ranks, whatever else is in the step, in whatever
// order and chunks, whoever joined or left meanwhile.
#include <doctest/doctest.h>

#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "poked_model.h"
#include "stories.h"

namespace k3::stories {
namespace {

TEST_CASE("a sequence's tokens and logits do not depend on what shares its steps") {
  for (const int ranks : {1, 2, 3}) {
    CAPTURE(ranks);
    with_engine(grid(ranks, 1), "models/k3-deep-f32.gguf",
                [](Engine& e) { check_stories(e, 128, 1000); });
  }
}

TEST_CASE("nor over pipeline stages, nor over grids of stages and bands") {
  struct Case {
    Layout layout;
    const char* model;
  };
  // More stages than fit evenly, stages of bands, experts alone cut, blocks that a band cuts through.
  const Case cases[] = {{grid(1, 2), "models/k3-deep-f32.gguf"},
                        {grid(1, 3), "models/k3-deep-f32.gguf"},
                        {grid(2, 2), "models/k3-deep-f32.gguf"},
                        {grid(2, 2, ShardPolicy::kExpertsOnly), "models/k3-deep-f32.gguf"},
                        {grid(3, 2), "models/k3-q8-iq1s.gguf"}};
  for (const Case& one : cases) {
    CAPTURE(one.layout.tp);
    CAPTURE(one.layout.pp);
    with_engine(one.layout, one.model, [](Engine& e) { check_stories(e, 24, 3000); });
  }
}

TEST_CASE("all parts of a step run in one pass") {
  with_engine(grid(1, 1), "models/k3-tiny-f32.gguf", [](Engine& e) {
    const std::int32_t ids[] = {5, 6, 7};
    std::vector<StepPart> parts(kSlots);
    for (int i = 0; i < kSlots; ++i) {
      parts[static_cast<std::size_t>(i)].slot = i;
      parts[static_cast<std::size_t>(i)].ids = std::span(ids).first(i == 0 ? 3 : 1);
    }
    e.step(parts);
    REQUIRE(e.timings().size() == 1);
    CHECK(e.timings()[0].n_tok == kSlots + 2);
    CHECK(e.length(0) == 3);
    CHECK(e.length(kSlots - 1) == 1);
  });
}

TEST_CASE("a NaN ends the sequence that it is in, and none beside it, over bands and stages") {
  // An id whose embedding is a NaN: whoever reads it is lost.
  constexpr std::int32_t kPoison = 77;
  const ModelShape shape = named_shape("tiny");
  const PokedModel model(shape);
  model.poke("token_embd.weight", kPoison * shape.hidden, std::nanf(""));
  for (const Layout& layout : {grid(1, 1), grid(2, 1), grid(1, 2)}) {
    CAPTURE(layout.tp);
    CAPTURE(layout.pp);
    with_engine(layout, model.path(), [](Engine& e) {
      const std::vector<std::int32_t> good{5, 6, 7}, bad{5, kPoison, 7}, one{9};
      SamplerOptions greedy;
      greedy.temp = 0;
      const auto part = [&](int slot, const std::vector<std::int32_t>& ids, bool wants) {
        StepPart p;
        p.slot = slot;
        p.ids = ids;
        p.wants_token = wants;
        p.sampler = greedy;
        return p;
      };
      const Decision want = e.extend(3, good, greedy, 0, false),
                     then = e.extend(3, one, greedy, 1, true);
      const auto d =
          e.step(std::vector{part(0, good, true), part(1, bad, true), part(2, good, true),
                             part(4, bad, false), part(5, good, false)});
      CHECK(same(d[0], want));
      CHECK(same(d[2], want));
      for (const int lost : {1, 3}) {
        CHECK(d[static_cast<std::size_t>(lost)].kind == Decision::Kind::kNotFinite);
        CHECK(d[static_cast<std::size_t>(lost)].layer == 0);
      }
      CHECK(e.nonfinite_text(d[1], 1) ==
            "a NaN or an infinity first appears in the output of layer 0, by position 2");
      CHECK(d[4].kind == Decision::Kind::kToken);
      // The lost ones are refused, the others go on.
      CHECK_THROWS_AS(e.step(std::vector{part(0, one, true), part(1, one, true)}),
                      std::invalid_argument);
      CHECK_THROWS_AS(e.save(4), std::invalid_argument);
      CHECK_THROWS_AS(e.fork(1, 6), std::invalid_argument);
      CHECK(same(e.step(std::vector{part(0, one, true), part(2, one, true)})[1], then));
      // Their slots are as new for others: a prompt, a twin, a kept state.
      e.reset(1);
      CHECK(same(e.step(std::vector{part(1, good, true)})[0], want));
      e.fork(1, 4);
      CHECK(same(e.step(std::vector{part(4, one, true)})[0], then));
      const std::uint64_t kept = e.save(1);
      e.reset(6);
      CHECK_THROWS_WITH_AS(e.extend(6, bad, greedy, 0, false), doctest::Contains("layer 0"),
                           NonFiniteError);
      e.restore(kept, 6);
      CHECK(same(e.step(std::vector{part(6, one, true)})[0], then));
    });
  }
}

TEST_CASE("a step that cannot be run is refused before any of its parts runs") {
  with_engine(grid(1, 1), "models/k3-tiny-f32.gguf", [](Engine& e) {
    const std::vector<std::int32_t> few{5, 6}, many(kContext, 7), bad{1 << 30};
    const auto part = [](int slot, const std::vector<std::int32_t>& ids) {
      StepPart p;
      p.slot = slot;
      p.ids = ids;
      return p;
    };
    const auto refused = [&](std::vector<StepPart> parts) {
      CHECK_THROWS_AS(e.step(parts), std::invalid_argument);
    };
    refused({part(0, few), part(0, few)});
    refused({part(0, few), part(kSlots, few)});
    refused({part(0, few), part(1, {})});
    refused({part(0, few), part(1, bad)});
    refused({part(0, many), part(1, many), part(2, many)});
    e.step(std::vector{part(0, many)});
    refused({part(1, few), part(0, few)});  // no position left
    StepPart hot = part(1, few);
    hot.sampler.temp = -1;
    refused({part(2, few), hot});
    for (int s = 1; s < kSlots; ++s) CHECK(e.length(s) == 0);
    CHECK(e.step({}).empty());
  });
}

}  // namespace
}  // namespace k3::stories
