// Random sequences that join and leave shared steps, and the same sequences alone: for tests of Engine::step.
#pragma once

#include <algorithm>
#include <filesystem>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm/thread_comm.h"
#include "rank/engine.h"

namespace k3::stories {

inline void require(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

inline constexpr std::int64_t kContext = 64, kStepTok = 160;
inline constexpr int kSlots = 64;

using MakeBackend = std::function<std::unique_ptr<Backend>(const RunConfig&)>;

// Runs `body` on rank 0 of an engine of kSlots slots over layout.world() ranks of one process. `change`: of the options.
inline void with_engine(const Layout& layout, const std::string& model,
                        const std::function<void(Engine&)>& body,
                        const std::function<void(RunConfig&)>& change = {},
                        const MakeBackend& make = {}) {
  run_ranks(layout.world(), [&](Comm& world) {
    RunConfig c;
    c.model = std::filesystem::path(K3_TEST_DATA) / model;
    c.layout = layout;
    c.n_ctx = kContext;
    c.n_slot = kSlots;
    c.chunk_tok = kStepTok;
    c.reproducible = true;
    if (change) change(c);
    const auto backend = make ? make(c) : make_cpu_backend(1);
    Engine engine(c, world, *backend);
    if (world.rank() != 0) {
      engine.serve();
      return;
    }
    body(engine);
    engine.stop();
  });
}

inline Layout grid(int tp, int pp, ShardPolicy policy = ShardPolicy::kFull) {
  Layout l;
  l.tp = tp;
  l.pp = pp;
  l.policy = policy;
  return l;
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

inline Story story(std::uint32_t seed) {
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
inline StepPart part_of(Story& s, std::size_t most) {
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

inline std::vector<Decision> alone(Engine& e, Story s, int slot = 0) {
  s.drawn.clear();
  e.reset(slot);
  s.drawn.push_back(e.extend(slot, s.prompt, s.sampler, 0, false));
  while (!s.done())
    s.drawn.push_back(
        e.extend(slot, std::span(&s.drawn.back().id, 1), s.sampler, s.drawn.size(), true));
  return s.drawn;
}

// lse sums over the whole vocabulary: equal bits there leave no logit room to differ unseen by much.
inline bool same(const Decision& a, const Decision& b) {
  return a.id == b.id && a.logit == b.logit && a.margin == b.margin && a.lse == b.lse &&
         a.logprob == b.logprob;
}

inline bool same(const std::vector<Decision>& a, const std::vector<Decision>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const Decision& x, const Decision& y) { return same(x, y); });
}

// Plays all stories through shared steps; who joins, who takes part in a step, in what order and in what chunks is random.
// Gives the largest number of parts of a step.
inline std::size_t play(Engine& e, std::vector<Story>& stories, std::uint32_t seed) {
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

// n stories through shared steps, and then each alone. Throws std::runtime_error where one answers otherwise.
inline void check_stories(Engine& e, std::uint32_t n, std::uint32_t seed) {
  std::vector<Story> stories;
  for (std::uint32_t i = 0; i < n; ++i) stories.push_back(story(seed + i));
  require(play(e, stories, seed) > 1, "no step was shared");
  for (const Story& s : stories) {
    require(same(s.drawn, alone(e, s)), "a prompt of " + std::to_string(s.prompt.size()) +
                                            " ids in slot " + std::to_string(s.slot) +
                                            " is answered otherwise than alone");
  }
}

}  // namespace k3::stories
