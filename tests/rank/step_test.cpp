// Sequences that share steps answer as ones that ran alone: bit for bit on CPU ranks, whatever else is in the step, in whatever
// order and chunks, whoever joined or left meanwhile.
#include <doctest/doctest.h>

#include <stdexcept>
#include <string>
#include <vector>

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
