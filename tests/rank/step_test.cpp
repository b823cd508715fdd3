// Sequences that share steps answer as ones that ran alone: bit for bit on CPU ranks, whatever else is in the step, in whatever
// order and chunks, whoever joined or left meanwhile.
#include <doctest/doctest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "comm/thread_comm.h"
#include "rank/engine.h"

namespace k3 {
namespace {

constexpr std::int64_t kContext = 64, kStepTok = 160;
constexpr int kSlots = 64;

// Runs `body` on rank 0 of an engine of kSlots slots.
void with_engine(int ranks, const std::string& model, const std::function<void(Engine&)>& body) {
  run_ranks(ranks, [&](Comm& world) {
    RunConfig c;
    c.model = std::string(K3_TEST_DATA) + "/" + model;
    c.layout.tp = ranks;
    c.n_ctx = kContext;
    c.n_slot = kSlots;
    c.chunk_tok = kStepTok;
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

// One sequence: its prompt, how it is drawn from, and what came out.
struct Story {
  std::vector<std::int32_t> prompt;
  SamplerOptions sampler;
  std::size_t n_draw = 1;
  std::vector<Decision> drawn;

  int slot = -1;
  std::size_t read = 0;               // of the prompt
  std::vector<std::int32_t> pending;  // ids of the part under way
  bool done() const { return drawn.size() >= n_draw; }
};

Story story(std::uint32_t seed) {
  std::mt19937 rng(seed);
  Story s;
  const auto below = [&](std::uint32_t n) { return static_cast<int>(rng() % n); };
  for (int i = 1 + below(20); i > 0; --i) s.prompt.push_back(3 + below(200));
  s.n_draw = static_cast<std::size_t>(1 + below(5));
  s.sampler.seed = seed;
  s.sampler.temp = below(3) == 0 ? 0.0f : 0.5f + 0.1f * static_cast<float>(below(10));
  s.sampler.top_p = below(2) == 0 ? 1.0f : 0.95f;  // several rounds of candidates for some
  s.sampler.repetition_penalty = below(3) == 0 ? 1.5f : 1.0f;
  s.sampler.presence_penalty = below(3) == 0 ? 0.5f : 0.0f;
  return s;
}

// The next ids of the story, at most `most` of its prompt.
StepPart part_of(Story& s, std::size_t most) {
  StepPart p;
  p.slot = s.slot;
  p.sampler = s.sampler;
  p.draw = s.drawn.size();
  if (s.read < s.prompt.size()) {
    const std::size_t n = std::min(most, s.prompt.size() - s.read);
    const auto begin = s.prompt.begin() + static_cast<std::ptrdiff_t>(s.read);
    s.pending.assign(begin, begin + static_cast<std::ptrdiff_t>(n));
    s.read += n;
    p.wants_token = s.read == s.prompt.size();
  } else {
    s.pending.assign(1, s.drawn.back().id);
    p.generated = true;
  }
  p.ids = s.pending;
  return p;
}

std::vector<Decision> alone(Engine& e, Story s) {
  s.drawn.clear();
  e.reset(0);
  s.drawn.push_back(e.extend(0, s.prompt, s.sampler, 0, false));
  while (!s.done())
    s.drawn.push_back(
        e.extend(0, std::span(&s.drawn.back().id, 1), s.sampler, s.drawn.size(), true));
  return s.drawn;
}

// lse sums over the whole vocabulary: equal bits there leave no logit room to differ unseen by much.
bool same(const Decision& a, const Decision& b) {
  return a.id == b.id && a.logit == b.logit && a.margin == b.margin && a.lse == b.lse &&
         a.logprob == b.logprob;
}

bool same(const std::vector<Decision>& a, const std::vector<Decision>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const Decision& x, const Decision& y) { return same(x, y); });
}

// Plays all stories through shared steps; who joins, who takes part in a step, in what order and in what chunks is random.
// Gives the largest number of parts of a step.
std::size_t play(Engine& e, std::vector<Story>& stories, std::uint32_t seed) {
  std::mt19937 rng(seed);
  std::vector<int> slots;
  for (int s = 0; s < kSlots; ++s) slots.push_back(s);
  std::vector<Story*> active;
  std::size_t next = 0, widest = 0;
  while (next < stories.size() || !active.empty()) {
    while (next < stories.size() && !slots.empty() && rng() % 4 != 0) {
      Story& s = stories[next++];
      std::swap(slots[rng() % slots.size()], slots.back());
      s.slot = slots.back();
      slots.pop_back();
      e.reset(s.slot);
      active.push_back(&s);
    }
    std::shuffle(active.begin(), active.end(), rng);
    std::vector<StepPart> parts;
    std::vector<Story*> who;
    std::int64_t room = kStepTok;
    for (Story* s : active) {
      if (rng() % 8 == 0 || room == 0) continue;
      parts.push_back(
          part_of(*s, std::min<std::size_t>(1 + rng() % 9, static_cast<std::size_t>(room))));
      room -= static_cast<std::int64_t>(parts.back().ids.size());
      who.push_back(s);
    }
    widest = std::max(widest, parts.size());
    const std::vector<Decision> decisions = e.step(parts);
    for (std::size_t i = 0; i < who.size(); ++i) {
      if (parts[i].wants_token) who[i]->drawn.push_back(decisions[i]);
    }
    std::erase_if(active, [&](Story* s) {
      if (s->done()) slots.push_back(s->slot);
      return s->done();
    });
  }
  return widest;
}

void check_stories(Engine& e, std::uint32_t n, std::uint32_t seed) {
  std::vector<Story> stories;
  for (std::uint32_t i = 0; i < n; ++i) stories.push_back(story(seed + i));
  const std::size_t widest = play(e, stories, seed);
  CHECK(widest > 1);
  for (const Story& s : stories) {
    INFO("prompt of ", s.prompt.size(), " ids, slot ", s.slot);
    REQUIRE(same(s.drawn, alone(e, s)));
  }
}

TEST_CASE("a sequence's tokens and logits do not depend on what shares its steps") {
  for (const int ranks : {1, 2, 3}) {
    CAPTURE(ranks);
    with_engine(ranks, "models/k3-deep-f32.gguf", [](Engine& e) { check_stories(e, 128, 1000); });
  }
}

TEST_CASE("hundreds of joins and leaves on k3-nano leave no stale state") {
  with_engine(1, "k3-nano/k3-nano.gguf", [](Engine& e) {
    const Story one = [] {
      Story s = story(1);
      s.prompt.resize(1);
      return s;
    }();
    const auto fresh = alone(e, one);
    check_stories(e, 300, 5000);
    CHECK(same(alone(e, one), fresh));
  });
}

TEST_CASE("all parts of a step run in one pass") {
  with_engine(1, "models/k3-tiny-f32.gguf", [](Engine& e) {
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
  with_engine(1, "models/k3-tiny-f32.gguf", [](Engine& e) {
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
}  // namespace k3
