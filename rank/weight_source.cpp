#include "rank/weight_source.h"

#include <stdexcept>

#include "kernels/cpu/dequant.h"
#include "rank/synth.h"

namespace k3 {
namespace {

HostBox host_box(const PlannedTensor& t, const Box& box, const std::byte* base) {
  HostBox h;
  h.type = t.type;
  h.dims = t.dims;
  for (std::size_t a = 0; a < 3; ++a) {
    h.begin[a] = box.axis[a].begin;
    h.end[a] = box.axis[a].end;
  }
  h.base = base;
  return h;
}

// The stored bytes a box spans in one matrix, first to last; whole rows.
struct Span {
  std::uint64_t begin, end;
};
Span matrix_span(const PlannedTensor& t, const Box& box, std::int64_t mat) {
  const auto row =
      static_cast<std::uint64_t>(block_bytes(t.type, static_cast<std::uint64_t>(t.dims[0])));
  const auto rows = static_cast<std::uint64_t>(t.dims[1]);
  const auto m = static_cast<std::uint64_t>(mat);
  return {(m * rows + static_cast<std::uint64_t>(box.axis[1].begin)) * row,
          (m * rows + static_cast<std::uint64_t>(box.axis[1].end)) * row};
}

// Asks for the band's bytes ahead of their use. Where a row is many pages and a column band takes few of them, row by row:
// asking for whole rows would read what other ranks hold.
void read_ahead(const PlannedTensor& t, const Box& box, const ModelFile& file,
                const TensorInfo& info) {
  constexpr std::uint64_t kPage = 4096;
  const BlockTraits& tr = traits(t.type);
  const auto row = block_bytes(t.type, static_cast<std::uint64_t>(t.dims[0]));
  const auto begin = static_cast<std::uint64_t>(box.axis[0].begin / tr.elems * tr.bytes);
  const auto end =
      static_cast<std::uint64_t>((box.axis[0].end + tr.elems - 1) / tr.elems * tr.bytes);
  const bool by_row = end - begin + 2 * kPage < row;
  for (std::int64_t m = box.axis[2].begin; m < box.axis[2].end; ++m) {
    const Span span = matrix_span(t, box, m);
    if (!by_row) {
      file.will_need(info, span.begin, span.end);
      continue;
    }
    for (std::uint64_t at = span.begin; at < span.end; at += row) {
      file.will_need(info, at + begin, at + end);
    }
  }
}

SynthTensor recipe_of(const PlannedTensor& t, std::uint64_t seed) {
  TensorDecl decl;
  decl.name = t.name;
  decl.type = t.type;
  decl.dims.assign(t.dims.begin(), t.dims.end());
  return synth_tensor(t.role, decl, seed);
}

}  // namespace

// ---- a file -----------------------------------------------------------------------------------------------------------

const TensorInfo& FileWeights::stored(const PlannedTensor& t, bool second) const {
  const std::string& name = second ? t.name2 : t.name;
  const TensorInfo* info = file_.find(name);
  if (info == nullptr) throw std::logic_error("planned tensor '" + name + "' is not in the file");
  return *info;
}

std::string FileWeights::where(const PlannedTensor& t, bool second) const {
  return file_.where(stored(t, second));
}

// The pages are let go after.
std::vector<float> FileWeights::flat(const PlannedTensor& t, bool second, std::int64_t begin,
                                     std::int64_t end) const {
  const TensorInfo& info = stored(t, second);
  const BlockTraits& tr = traits(info.type);
  std::vector<float> out(static_cast<std::size_t>(end - begin));
  dequantize_range(info.type, file_.data(info), begin, end - begin, out.data());
  const auto b0 = static_cast<std::uint64_t>(begin / tr.elems * tr.bytes);
  const auto b1 = static_cast<std::uint64_t>((end + tr.elems - 1) / tr.elems * tr.bytes);
  file_.release(info, b0, b1);
  return out;
}

PlacedWeight FileWeights::place(const PlannedTensor& t, const Box& box, Backend& backend,
                                std::vector<std::unique_ptr<DeviceBuffer>>& storage) const {
  const TensorInfo& info = stored(t, false);
  if (box.elems() < info.n_elem()) file_.map_singly(info);
  read_ahead(t, box, file_, info);
  const std::size_t before = storage.size();
  PlacedWeight out;
  HostBox host = host_box(t, box, file_.data(info));
  const auto row =
      static_cast<std::uint64_t>(block_bytes(t.type, static_cast<std::uint64_t>(t.dims[0])));
  host.copied = [&](std::int64_t mat, std::int64_t row_begin, std::int64_t row_end) {
    const std::int64_t first = mat * t.dims[1];
    file_.release(info, static_cast<std::uint64_t>(first + row_begin) * row,
                  static_cast<std::uint64_t>(first + row_end) * row);
  };
  out.weight = backend.load(host, storage);
  const bool in_place = storage.size() == before;
  std::uint64_t kept = 0;  // end of the last strip
  for (std::int64_t m = box.axis[2].begin; m < box.axis[2].end; ++m) {
    const Span span = matrix_span(t, box, m);
    if (!in_place) {
      file_.release(info, span.begin, span.end);
      continue;
    }
    out.mapped_bytes += span.end - span.begin;
    // A page fault maps its neighbours too, here those of other ranks: so the strip is brought in whole, and what lies
    // between it and the one before is let go. No later use faults again.
    file_.populate(info, span.begin, span.end);
    file_.release(info, kept, span.begin);
    kept = span.end;
  }
  if (in_place) file_.release(info, kept, info.bytes);
  return out;
}

std::size_t FileWeights::placed_bytes(const PlannedTensor& t, const Box& box,
                                      const Backend& backend) const {
  return backend.loaded_bytes(host_box(t, box, file_.data(stored(t, false))));
}

// ---- a seed -----------------------------------------------------------------------------------------------------------

std::string SyntheticWeights::where(const PlannedTensor& t, bool) const {
  return "synthetic weights: " + t.name;
}

std::vector<float> SyntheticWeights::flat(const PlannedTensor& t, bool, std::int64_t begin,
                                          std::int64_t end) const {
  const SynthTensor recipe = recipe_of(t, seed_);
  const BlockTraits& tr = traits(t.type);
  const std::int64_t b0 = begin / tr.elems, b1 = (end + tr.elems - 1) / tr.elems;
  std::vector<std::byte> blocks(static_cast<std::size_t>((b1 - b0) * tr.bytes));
  auto* to = reinterpret_cast<std::uint8_t*>(blocks.data());
  for (std::int64_t b = b0; b < b1; ++b, to += tr.bytes) {
    synth_block(recipe, static_cast<std::uint64_t>(b), to, tr.bytes);
  }
  std::vector<float> out(static_cast<std::size_t>(end - begin));
  dequantize_range(t.type, blocks.data(), begin - b0 * tr.elems, end - begin, out.data());
  return out;
}

PlacedWeight SyntheticWeights::place(const PlannedTensor& t, const Box& box, Backend& backend,
                                     std::vector<std::unique_ptr<DeviceBuffer>>& storage) const {
  return {backend.synthesize(host_box(t, box, nullptr), recipe_of(t, seed_), storage), 0};
}

std::size_t SyntheticWeights::placed_bytes(const PlannedTensor& t, const Box& box,
                                           const Backend& backend) const {
  return backend.loaded_bytes(host_box(t, box, nullptr));
}

}  // namespace k3
