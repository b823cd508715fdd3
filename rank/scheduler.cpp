#include "rank/scheduler.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace k3 {
namespace {

// How much of its prompt a sequence reads in this step; 0: its piece does not fit any more.
std::int64_t prompt_part(const SlotWork& w, std::int64_t room, std::int64_t piece) {
  std::int64_t end = w.n_prompt;
  if (w.cut > w.n_read) end = std::min(end, w.cut);
  if (piece == 0) return std::min(end - w.n_read, room);
  end = std::min(end, (w.n_read / piece + 1) * piece);
  return end - w.n_read <= room ? end - w.n_read : 0;
}

}  // namespace

std::vector<PlannedPart> plan_step(std::span<const SlotWork> work, const StepLimits& limits) {
  const std::int64_t least = std::max<std::int64_t>(limits.piece_tok, 1) + std::ssize(work) - 1;
  if (limits.step_tok < least && !work.empty()) {
    throw std::invalid_argument("a step of " + std::to_string(limits.step_tok) +
                                " tokens: " + std::to_string(work.size()) +
                                " sequences need at least " + std::to_string(least));
  }
  std::vector<PlannedPart> parts;
  std::int64_t room = limits.step_tok;
  for (const SlotWork& w : work) {
    if (w.n_read < w.n_prompt) continue;
    parts.push_back({w.slot, -1, 1});
    --room;
  }
  for (const SlotWork& w : work) {
    if (w.n_read >= w.n_prompt || room == 0) continue;
    const std::int64_t n = prompt_part(w, room, limits.piece_tok);
    if (n == 0) continue;
    parts.push_back({w.slot, w.n_read, n});
    room -= n;
  }
  return parts;
}

std::size_t common_prefix(std::span<const std::int32_t> a, std::span<const std::int32_t> b) {
  const std::size_t n = std::min(a.size(), b.size());
  return static_cast<std::size_t>(
      std::mismatch(a.begin(), a.begin() + static_cast<std::ptrdiff_t>(n), b.begin()).first -
      a.begin());
}

std::int64_t choose_cut(std::span<const std::int32_t> ids,
                        std::span<const std::span<const std::int32_t>> waiting, std::int64_t least,
                        std::int64_t multiple) {
  std::vector<std::int64_t> shared;
  for (const auto& other : waiting) {
    const auto common = static_cast<std::int64_t>(common_prefix(ids, other));
    const std::int64_t most = std::min({common, std::ssize(ids) - 1, std::ssize(other) - 1});
    shared.push_back(most / multiple * multiple);
  }
  std::sort(shared.begin(), shared.end(), std::greater<>());
  std::int64_t best = 0, best_saved = 0;
  for (std::size_t i = 0; i < shared.size() && shared[i] >= std::max<std::int64_t>(least, 1); ++i) {
    const std::int64_t saved = shared[i] * static_cast<std::int64_t>(i + 1);
    if (saved > best_saved) {
      best_saved = saved;
      best = shared[i];
    }
  }
  return best;
}

std::optional<PrefixStore::Hit> PrefixStore::find(std::span<const std::int32_t> ids) {
  Entry* best = nullptr;
  for (Entry& e : entries_) {
    if (e.ids.size() < ids.size() && common_prefix(e.ids, ids) == e.ids.size() &&
        (!best || e.ids.size() > best->ids.size())) {
      best = &e;
    }
  }
  if (!best) return std::nullopt;
  best->used = ++clock_;
  return Hit{best->saved, std::ssize(best->ids)};
}

bool PrefixStore::has(std::span<const std::int32_t> ids) const {
  return std::any_of(entries_.begin(), entries_.end(), [&](const Entry& e) {
    return std::equal(e.ids.begin(), e.ids.end(), ids.begin(), ids.end());
  });
}

void PrefixStore::pin(std::span<const std::int32_t> ids, std::uint64_t saved) {
  entries_.push_back({{ids.begin(), ids.end()}, saved, ++clock_, true});
  ++n_pinned_;
}

std::vector<std::uint64_t> PrefixStore::add(std::span<const std::int32_t> ids,
                                            std::uint64_t saved) {
  entries_.push_back({{ids.begin(), ids.end()}, saved, ++clock_, false});
  std::vector<std::uint64_t> dropped;
  while (entries_.size() > capacity_ + n_pinned_) {
    const auto oldest =
        std::min_element(entries_.begin(), entries_.end(), [](const Entry& a, const Entry& b) {
          return a.pinned != b.pinned ? b.pinned : a.used < b.used;
        });
    dropped.push_back(oldest->saved);
    entries_.erase(oldest);
  }
  return dropped;
}

}  // namespace k3
