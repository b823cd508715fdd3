// A long life of one engine: sequences join (with a prompt, by a fork, from a kept state), share steps and leave, thousands of
// times. Every sequence must answer as it does alone; after every leave a new one-token prompt in the slot just left must have
// the logits of a fresh engine, bit for bit; and what the process holds must not grow.
//   churn <model> <joins> <tp> [seed]
// Prints one line of what it did; exit 1 where a rule is broken.
#include <malloc.h>

#include <cstdio>
#include <cstring>
#include <exception>
#include <map>

#include "stories.h"

namespace k3::stories {
namespace {

using Rows = std::vector<float>;

Rows logits_of(Engine& e, int slot, std::int32_t id) {
  Rows rows;
  e.reset(slot);
  e.logits(slot, {&id, 1}, true,
           [&](std::span<const float> r, std::int64_t) { rows.assign(r.begin(), r.end()); });
  return rows;
}

bool same_bits(const Rows& a, const Rows& b) {
  return a.size() == b.size() && !a.empty() &&
         std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Bytes that the process has asked for and not given back, without the engine's own list of steps, which is meant to grow.
std::int64_t held_bytes(const Engine& e) {
  const struct mallinfo2 m = mallinfo2();
  return static_cast<std::int64_t>(m.uordblks + m.hblkhd) -
         static_cast<std::int64_t>(e.timings().capacity() * sizeof(StepTiming));
}

class Churn {
 public:
  Churn(Engine& e, std::map<std::int32_t, Rows> fresh, std::uint32_t seed)
      : e_(e), fresh_(std::move(fresh)), rng_(seed) {
    for (int s = 0; s < kSlots; ++s) free_.push_back(s);
  }

  // Runs until `joins` more sequences have come and everybody has left.
  void run(std::uint32_t joins) {
    const std::uint32_t end = n_join_ + joins;
    while (n_join_ < end || !active_.empty()) {
      while (n_join_ < end && !free_.empty() && rng_() % 4 != 0) join();
      step();
      leave();
    }
    for (const auto& [saved, story] : kept_) e_.forget(saved);
    kept_.clear();
  }

  std::uint32_t n_join_ = 0, n_fork_ = 0, n_restore_ = 0, n_probe_ = 0, n_checked_ = 0;
  std::size_t widest_ = 0;

 private:
  int take_slot() {
    std::swap(free_[rng_() % free_.size()], free_.back());
    const int slot = free_.back();
    free_.pop_back();
    return slot;
  }

  // A tenth each: as the twin of a running sequence, from a kept state; else with a prompt of its own.
  void join() {
    const int slot = take_slot();
    const auto how = rng_() % 10;
    Story s;
    if (how == 0 && !active_.empty()) {
      s = active_[rng_() % active_.size()];
      e_.fork(s.slot, slot);
      ++n_fork_;
    } else if (how == 1 && !kept_.empty()) {
      auto k = kept_.begin();
      std::advance(k, rng_() % kept_.size());
      s = k->second;
      e_.restore(k->first, slot);
      ++n_restore_;
    } else {
      s = story(static_cast<std::uint32_t>(rng_()));
      e_.reset(slot);
    }
    s.slot = slot;
    active_.push_back(std::move(s));
    ++n_join_;
  }

  void step() {
    std::shuffle(active_.begin(), active_.end(), rng_);
    std::vector<StepPart> parts;
    std::vector<std::size_t> who;
    auto room = static_cast<std::size_t>(kStepTok);
    for (std::size_t i = 0; i < active_.size() && room > 0; ++i) {
      if (rng_() % 8 == 0) continue;
      parts.push_back(part_of(active_[i], std::min<std::size_t>(1 + rng_() % 9, room)));
      room -= parts.back().ids.size();
      who.push_back(i);
    }
    widest_ = std::max(widest_, parts.size());
    const std::vector<Decision> decisions = e_.step(parts);
    for (std::size_t i = 0; i < who.size(); ++i) {
      if (parts[i].wants_token) active_[who[i]].drawn.push_back(decisions[i]);
    }
    if (active_.empty() || rng_() % 16 != 0) return;
    const Story& s = active_[rng_() % active_.size()];
    if (!s.done()) keep(s);
  }

  void keep(const Story& s) {
    if (kept_.size() == 8) {
      e_.forget(kept_.begin()->first);
      kept_.erase(kept_.begin());
    }
    kept_[e_.save(s.slot)] = s;
  }

  void leave() {
    for (std::size_t i = 0; i < active_.size();) {
      if (!active_[i].done()) {
        ++i;
        continue;
      }
      const Story s = std::move(active_[i]);
      active_.erase(active_.begin() + static_cast<std::ptrdiff_t>(i));
      check(s);
      free_.push_back(s.slot);
    }
  }

  void check(const Story& s) {
    auto f = fresh_.begin();
    std::advance(f, rng_() % fresh_.size());
    require(same_bits(logits_of(e_, s.slot, f->first), f->second),
            "slot " + std::to_string(s.slot) + " after " + std::to_string(n_join_) + " joins: id " +
                std::to_string(f->first) + " has other logits than in a fresh engine");
    ++n_probe_;
    if (free_.empty()) return;  // nowhere to be alone in
    require(same(s.drawn, alone(e_, s, free_.front())),
            "a sequence of slot " + std::to_string(s.slot) + " after " + std::to_string(n_join_) +
                " joins answers otherwise than alone");
    ++n_checked_;
  }

  Engine& e_;
  std::map<std::int32_t, Rows> fresh_;
  std::mt19937 rng_;
  std::vector<int> free_;
  std::vector<Story> active_;
  std::map<std::uint64_t, Story> kept_;  // stories as they were when their states were kept
};

// The largest step that there can be, so that every buffer has the size that it keeps.
void fill(Engine& e) {
  const std::vector<std::int32_t> ids(kStepTok / kSlots, 7),
      more(kStepTok / kSlots + kStepTok % kSlots, 7);
  std::vector<StepPart> parts(kSlots);
  for (int s = 0; s < kSlots; ++s) {
    StepPart& p = parts[static_cast<std::size_t>(s)];
    e.reset(s);
    p.slot = s;
    p.ids = s == 0 ? more : ids;
    p.sampler.temp = 2;
    p.sampler.repetition_penalty = 1.5f;
  }
  e.step(parts);
}

void churn(const std::string& model, std::uint32_t joins, int tp, std::uint32_t seed) {
  const std::int32_t ids[] = {3, 5, 8, 13, 21, 34, 55, 89};
  std::map<std::int32_t, Rows> fresh;
  for (const std::int32_t id : ids) {  // each in an engine that has done nothing else
    with_engine(grid(tp, 1), model, [&](Engine& e) { fresh[id] = logits_of(e, 0, id); });
  }
  with_engine(grid(tp, 1), model, [&](Engine& e) {
    Churn c(e, fresh, seed);
    fill(e);
    c.run(joins / 2);
    const std::int64_t before = held_bytes(e);
    const auto state = e.reports()[0].state_bytes;
    c.run(joins - joins / 2);
    const std::int64_t grown = held_bytes(e) - before;
    require(e.reports()[0].state_bytes == state, "the state has grown");
    require(grown < 64 * 1024, "memory held grew by " + std::to_string(grown) + " bytes over " +
                                   std::to_string(joins - joins / 2) + " joins");
    std::printf(
        "%u joins (%u by fork, %u from kept states), %zu steps, up to %zu sequences in one; %u "
        "one-token "
        "prompts with the bits of a fresh engine, %u sequences with those of a run alone; memory "
        "held "
        "grew by %lld bytes over the second half\n",
        c.n_join_, c.n_fork_, c.n_restore_, e.timings().size(), c.widest_, c.n_probe_, c.n_checked_,
        static_cast<long long>(grown));
    require(c.n_probe_ == c.n_join_ && c.widest_ > 1 && c.n_checked_ > 0, "too little was checked");
  });
}

}  // namespace
}  // namespace k3::stories

int main(int argc, char** argv) {
  try {
    if (argc < 4) throw std::runtime_error("usage: churn <model> <joins> <tp> [seed]");
    k3::stories::churn(argv[1], static_cast<std::uint32_t>(std::stoul(argv[2])), std::stoi(argv[3]),
                       argc > 4 ? static_cast<std::uint32_t>(std::stoul(argv[4])) : 1);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "churn: %s\n", e.what());
    return 1;
  }
}
