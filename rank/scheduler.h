// Who runs next, on rank 0: which tokens of which sequences share a step, and what of a prompt is worth keeping for others.
// Pure: numbers in, a plan out; Engine::step carries it out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace k3 {

// A sequence in a slot. n_read < n_prompt: its prompt is being read; else it waits for one token to be appended.
struct SlotWork {
  int slot = 0;
  std::int64_t n_prompt = 0;
  std::int64_t n_read = 0;
  std::int64_t cut =
      0;  // a part of the prompt ends here (its state is to be kept); no more than n_read: no such place
};

struct StepLimits {
  std::int64_t step_tok = 0;  // tokens in a step, of all parts together
  std::int64_t piece_tok =
      0;  // not 0: prompts are read in pieces that end at multiples of this, whatever else runs
};

struct PlannedPart {
  int slot = 0;
  std::int64_t begin = 0;  // of the prompt; -1: one generated token
  std::int64_t n = 1;
  bool operator==(const PlannedPart&) const = default;
};

// One step. Every sequence that generates gets its token, so nobody's text halts for another's prompt; what is left of the
// limit goes to prompts in the order given. Never empty when `work` is not. Throws std::invalid_argument where
// step_tok has no room for a token of each and a piece.
std::vector<PlannedPart> plan_step(std::span<const SlotWork> work, const StepLimits& limits);

std::size_t common_prefix(std::span<const std::int32_t> a, std::span<const std::int32_t> b);

// Where in `ids` a state should be kept, so that `waiting` prompts need to read the least: the length that saves most tokens
// over all of them, a multiple of `multiple` and at least `least`, shorter than each prompt it serves. 0: none.
std::int64_t choose_cut(std::span<const std::int32_t> ids,
                        std::span<const std::span<const std::int32_t>> waiting, std::int64_t least,
                        std::int64_t multiple);

// Kept states by the ids that led to them; the one unused longest goes first.
class PrefixStore {
 public:
  explicit PrefixStore(std::size_t capacity) : capacity_(capacity) {}

  struct Hit {
    std::uint64_t saved = 0;  // the number under which the state is kept
    std::int64_t length = 0;
  };
  // The longest that `ids` begins with and goes on after: the last id must still be read.
  std::optional<Hit> find(std::span<const std::int32_t> ids);
  bool has(std::span<const std::int32_t> ids) const;
  // Returns the numbers that are to be forgotten now.
  std::vector<std::uint64_t> add(std::span<const std::int32_t> ids, std::uint64_t saved);
  // One that stays, beside the others.
  void pin(std::span<const std::int32_t> ids, std::uint64_t saved);
  std::size_t size() const { return entries_.size(); }

 private:
  struct Entry {
    std::vector<std::int32_t> ids;
    std::uint64_t saved = 0;
    std::uint64_t used = 0;
    bool pinned = false;
  };
  std::size_t capacity_;
  std::size_t n_pinned_ = 0;
  std::uint64_t clock_ = 0;
  std::vector<Entry> entries_;
};

}  // namespace k3
