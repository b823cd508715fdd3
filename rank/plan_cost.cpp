// What a plan costs: bytes and collectives; and the proof that its bands tile.
#include <algorithm>
#include <stdexcept>

#include "rank/plan.h"

namespace k3 {
namespace {

struct Blocks {
  std::uint64_t touched = 0;  // by the band
  std::uint64_t shared = 0;   // of these, not wholly in the band
};

// Blocks of a row of n_col elements under a band of its columns. A block of padding that ends the row is nobody else's.
Blocks blocks_of(const Band& columns, std::int64_t n_col, std::int64_t elems) {
  if (columns.empty()) return {};
  const std::int64_t first = columns.begin / elems;
  const std::int64_t last = (columns.end - 1) / elems;
  const bool cut_first = columns.begin % elems != 0;
  const bool cut_last = columns.end % elems != 0 && columns.end < n_col;
  const bool one = first == last;
  return {static_cast<std::uint64_t>(last - first + 1),
          one ? static_cast<std::uint64_t>(cut_first || cut_last)
              : static_cast<std::uint64_t>(cut_first) + static_cast<std::uint64_t>(cut_last)};
}

bool overlap(const Band& a, const Band& b) { return a.begin < b.end && b.begin < a.end; }

bool overlap(const Box& a, const Box& b) {
  return !a.empty() && !b.empty() && overlap(a.axis[0], b.axis[0]) &&
         overlap(a.axis[1], b.axis[1]) && overlap(a.axis[2], b.axis[2]);
}

[[noreturn]] void untiled(const PlannedTensor& t, int rank, const std::string& what) {
  throw std::logic_error(t.name + ": rank " + std::to_string(rank) + ": " + what);
}

}  // namespace

std::uint64_t Plan::stored_bytes(const PlannedTensor& t) const {
  const auto n = static_cast<std::uint64_t>(t.dims[0] * t.dims[1] * t.dims[2]);
  return block_bytes(t.type, n) + (t.name2.empty() ? 0 : block_bytes(t.type2, n));
}

std::uint64_t Plan::cost(const PlannedTensor& t, int rank, bool premium) const {
  const Box b = box(t, rank);
  const auto rows = static_cast<std::uint64_t>(b.axis[1].size() * b.axis[2].size());
  const auto of = [&](BlockType type) {
    const Blocks n = blocks_of(b.axis[0], t.n_col, traits(type).elems);
    return (premium ? n.shared : n.touched) * static_cast<std::uint64_t>(traits(type).bytes) * rows;
  };
  return of(t.type) + (t.name2.empty() ? 0 : of(t.type2));
}

std::uint64_t Plan::band_bytes(const PlannedTensor& t, int rank) const {
  return cost(t, rank, false);
}

std::uint64_t Plan::premium_bytes(const PlannedTensor& t, int rank) const {
  return cost(t, rank, true);
}

ByteRuns Plan::byte_runs(const PlannedTensor& t, int rank, bool second) const {
  const Box b = box(t, rank);
  if (b.empty()) return {};
  const BlockTraits& tr = traits(second ? t.type2 : t.type);
  const auto bytes_to = [&](std::int64_t column, bool up) {
    const std::int64_t block = column / tr.elems + (up && column % tr.elems != 0);
    return static_cast<std::uint64_t>(block * tr.bytes);
  };
  ByteRuns r;
  const std::uint64_t row = bytes_to(t.dims[0], true);
  const std::uint64_t matrix = row * static_cast<std::uint64_t>(t.dims[1]);
  r.begin = static_cast<std::uint64_t>(b.axis[2].begin) * matrix +
            static_cast<std::uint64_t>(b.axis[1].begin) * row + bytes_to(b.axis[0].begin, false);
  r.bytes = bytes_to(b.axis[0].end, true) - bytes_to(b.axis[0].begin, false);
  r.n_run = static_cast<std::uint64_t>(b.axis[1].size());
  r.stride = row;
  r.n_matrix = static_cast<std::uint64_t>(b.axis[2].size());
  r.matrix_stride = matrix;
  // What lies end to end is one run.
  if (r.bytes == r.stride) {
    r.bytes *= r.n_run;
    r.n_run = 1;
    r.stride = r.bytes;
    if (r.bytes == r.matrix_stride) {
      r.bytes *= r.n_matrix;
      r.n_matrix = 1;
      r.stride = r.matrix_stride = r.bytes;
    }
  }
  return r;
}

CollectiveCounts Plan::collectives(int rank) const {
  CollectiveCounts n{};
  const auto at = [&](Point p) -> std::uint32_t& { return n[static_cast<std::size_t>(p)]; };
  const int stage = layout_.stage(rank);
  if (layout_.pp > 1) {
    at(Point::kStageHandOff) =
        static_cast<std::uint32_t>(stage > 0) + static_cast<std::uint32_t>(stage < layout_.pp - 1);
  }
  if (layout_.tp == 1) return n;
  const bool full = layout_.policy == ShardPolicy::kFull;
  if (full && stage == 0) at(Point::kEmbed) = 1;
  const Band b = layers(rank);
  for (auto il = static_cast<int>(b.begin); il < b.end; ++il) {
    at(Point::kMoeLatent) += !is_dense(il);
    if (!full) continue;
    const bool cuts_rows =
        layout_.cuts_rows() && config_.layers[static_cast<std::size_t>(il)].is_mla;
    at(Point::kMlaQuery) += cuts_rows;
    at(Point::kMlaParts) += cuts_rows;
    at(Point::kAttnOut) += 1;
    at(Point::kRouterLatent) += !is_dense(il);
    at(Point::kFfnOut) += 1;
  }
  return n;
}

void Plan::check_tiling() const {
  std::int64_t n_layer = 0;
  for (int stage = 0; stage < layout_.pp; ++stage) {
    const Band b = layers(stage * layout_.tp);
    if (b.begin != n_layer) throw std::logic_error("stages leave out or repeat a layer");
    n_layer = b.end;
  }
  if (n_layer != config_.n_layer) throw std::logic_error("stages leave out the last layers");
  for (const PlannedTensor& t : tensors_) check_tiling(t);
}

// Boxes that do not overlap and together have as many elements as the tensor tile it.
void Plan::check_tiling(const PlannedTensor& t) const {
  int first = 0;
  while (first < layout_.world() && !holds(t, first)) first += layout_.tp;
  const std::int64_t whole = t.n_col * t.dims[1] * t.dims[2];
  std::int64_t sum = 0;
  std::vector<Box> boxes;
  for (int rank = 0; rank < layout_.world(); ++rank) {
    const Box b = box(t, rank);
    if (rank / layout_.tp != first / layout_.tp) {
      if (!b.empty()) untiled(t, rank, "held outside its stage");
      continue;
    }
    const std::array<std::int64_t, 3> end{t.n_col, t.dims[1], t.dims[2]};
    for (std::size_t i = 0; i < end.size(); ++i) {
      if (b.axis[i].begin < 0 || b.axis[i].end > end[i]) untiled(t, rank, "band past the end");
    }
    if (t.cut == Cut::kReplicate) {
      if (b.elems() != whole) untiled(t, rank, "replicated, but not whole");
      continue;
    }
    for (const Box& other : boxes) {
      if (overlap(b, other)) untiled(t, rank, "overlaps another rank");
    }
    if (!b.empty()) {
      boxes.push_back(b);
      sum += b.elems();
    }
  }
  if (t.cut != Cut::kReplicate && sum != whole) {
    untiled(t, first,
            "ranks own " + std::to_string(sum) + " of " + std::to_string(whole) + " elements");
  }
}

}  // namespace k3
