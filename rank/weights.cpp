#include "rank/weights.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "kernels/cpu/dequant.h"

namespace k3 {
namespace {

// Small tensors that the layer program wants as f32 arrays, whatever type they are stored in.
bool is_vector(Role role) {
  switch (role) {
    case Role::kOutputNorm:
    case Role::kOutputResScore:
    case Role::kAttnNorm:
    case Role::kFfnNorm:
    case Role::kAttnResScore:
    case Role::kFfnResScore:
    case Role::kKdaDt:
    case Role::kKdaA:
    case Role::kKdaNorm:
    case Role::kMlaQANorm:
    case Role::kMlaKvANorm:
    case Role::kRouterBias:
    case Role::kRoutedNorm:
      return true;
    default:
      return false;
  }
}

const TensorInfo& source(const ModelFile& file, const std::string& name) {
  const TensorInfo* t = file.find(name);
  if (t == nullptr) throw std::logic_error("planned tensor '" + name + "' is not in the file");
  return *t;
}

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

// Elements [begin, end) of a stored tensor seen as one flat run of rows, each row_elems long. The pages are let go after.
std::vector<float> read_flat(const ModelFile& file, const TensorInfo& t, std::int64_t begin,
                             std::int64_t end) {
  const BlockTraits& tr = traits(t.type);
  std::vector<float> out(static_cast<std::size_t>(end - begin));
  dequantize_range(t.type, file.data(t), begin, end - begin, out.data());
  const auto b0 = static_cast<std::uint64_t>(begin / tr.elems * tr.bytes);
  const auto b1 = static_cast<std::uint64_t>((end + tr.elems - 1) / tr.elems * tr.bytes);
  file.release(t, b0, b1);
  return out;
}

void check_finite(const std::vector<float>& values, const std::string& where, std::int64_t begin) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (std::isfinite(values[i])) continue;
    throw std::invalid_argument(
        where + ": element " + std::to_string(begin + static_cast<std::int64_t>(i)) + " is " +
        (std::isnan(values[i]) ? "NaN" : "infinite") + ", expected a finite number");
  }
}

// The stored bytes a box spans, first to last; whole rows.
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

}  // namespace

std::uint64_t weight_bytes(const Plan& plan, const ModelFile& file, const Backend& backend,
                           int rank) {
  std::uint64_t sum = 0;
  for (const PlannedTensor& t : plan.tensors()) {
    const Box box = plan.box(t, rank);
    if (box.empty()) continue;
    if (is_vector(t.role) || is_conv(t.role)) {
      sum += static_cast<std::uint64_t>(box.elems()) * sizeof(float);
    } else {
      sum += backend.loaded_bytes(host_box(t, box, file.data(source(file, t.name))));
    }
  }
  return sum;
}

Weights::Weights(const Plan& plan, const ModelFile& file, Backend& backend, int rank,
                 const LoadProgressFn& progress, std::vector<std::string>& warnings)
    : n_layer_(static_cast<std::size_t>(plan.config().n_layer)) {
  slots_.resize(static_cast<std::size_t>(Role::kCount) * (n_layer_ + 1));
  conv_.resize(n_layer_, nullptr);
  std::uint64_t total = 0, done = 0;
  for (const PlannedTensor& t : plan.tensors()) total += plan.band_bytes(t, rank);
  for (const PlannedTensor& t : plan.tensors()) {
    const Box box = plan.box(t, rank);
    if (is_conv(t.role)) {
      if (t.role == Role::kKdaConvQ && !box.empty()) load_conv(plan, file, backend, rank, t.layer);
    } else if (is_vector(t.role)) {
      if (!box.empty()) load_vector(t, box, file, backend, warnings);
    } else {
      load_matrix(t, box, file, backend);
    }
    done += plan.band_bytes(t, rank);
    if (progress) progress(done, total);
  }
}

void Weights::load_vector(const PlannedTensor& t, const Box& box, const ModelFile& file,
                          Backend& backend, std::vector<std::string>& warnings) {
  const TensorInfo& info = source(file, t.name);
  const std::int64_t begin = box.axis[0].begin, end = box.axis[0].end;
  std::vector<float> values = read_flat(file, info, begin, end);
  check_finite(values, file.where(info), begin);
  if (t.transform == Transform::kProduct) {
    const TensorInfo& second = source(file, t.name2);
    const std::vector<float> factor = read_flat(file, second, begin, end);
    check_finite(factor, file.where(second), begin);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] *= factor[i];
  }
  if (t.transform == Transform::kNegAbs) {
    if (std::any_of(values.begin(), values.end(), [](float v) { return v > 0; })) {
      warnings.push_back(file.where(info) + ": positive values, read as exp(A_log) and negated");
    }
    for (float& v : values) v = -std::abs(v);
  }
  Slot& s = slot(t.role, t.layer);
  s.present = true;
  s.vec = upload(backend, values);
}

void Weights::load_matrix(const PlannedTensor& t, const Box& box, const ModelFile& file,
                          Backend& backend) {
  const TensorInfo& info = source(file, t.name);
  Slot& s = slot(t.role, t.layer);
  s.present = true;
  if (box.empty()) {  // keeps its shape, so that ops see an empty band and not a wrong one
    s.matrix.type = t.type;
    s.matrix.n_in = box.axis[0].size();
    s.matrix.n_out = box.axis[1].size();
    s.matrix.n_mat = box.axis[2].size();
    return;
  }
  read_ahead(t, box, file, info);
  const HostBox host = host_box(t, box, file.data(info));
  const std::size_t before = storage_.size();
  s.matrix = backend.load(host, storage_);
  std::uint64_t allocated = 0;
  for (std::size_t i = before; i < storage_.size(); ++i) allocated += storage_[i]->bytes();
  device_bytes_ += allocated;
  for (std::int64_t m = box.axis[2].begin; m < box.axis[2].end; ++m) {
    const Span span = matrix_span(t, box, m);
    if (allocated > 0) {
      file.release(info, span.begin, span.end);
    } else {
      mapped_bytes_ += span.end - span.begin;
    }
  }
}

void Weights::load_conv(const Plan& plan, const ModelFile& file, Backend& backend, int rank,
                        int layer) {
  std::vector<float> taps;
  for (const Role role : {Role::kKdaConvQ, Role::kKdaConvK, Role::kKdaConvV}) {
    const PlannedTensor* t = plan.find(role, layer);
    const Box box = plan.box(*t, rank);
    const TensorInfo& info = source(file, t->name);
    const std::int64_t begin = box.axis[1].begin * t->dims[0], end = box.axis[1].end * t->dims[0];
    const std::vector<float> part = read_flat(file, info, begin, end);
    check_finite(part, file.where(info), begin);
    taps.insert(taps.end(), part.begin(), part.end());
  }
  conv_[static_cast<std::size_t>(layer)] = upload(backend, taps);
}

const float* Weights::upload(Backend& backend, const std::vector<float>& values) {
  storage_.push_back(backend.allocate(values.size() * sizeof(float)));
  backend.upload(storage_.back()->data(), values.data(), values.size() * sizeof(float));
  device_bytes_ += values.size() * sizeof(float);
  return reinterpret_cast<const float*>(storage_.back()->data());
}

Weights::Slot& Weights::slot(Role role, int layer) {
  return slots_[static_cast<std::size_t>(role) * (n_layer_ + 1) +
                (layer < 0 ? n_layer_ : static_cast<std::size_t>(layer))];
}
const Weights::Slot& Weights::slot(Role role, int layer) const {
  return const_cast<Weights*>(this)->slot(role, layer);
}

const Weight& Weights::matrix(Role role, int layer) const {
  const Slot& s = slot(role, layer);
  if (!s.present) throw std::logic_error(std::string("no ") + role_name(role) + " on this rank");
  return s.matrix;
}
const float* Weights::vec(Role role, int layer) const {
  const Slot& s = slot(role, layer);
  if (s.vec == nullptr)
    throw std::logic_error(std::string("no ") + role_name(role) + " on this rank");
  return s.vec;
}
bool Weights::has(Role role, int layer) const { return slot(role, layer).present; }
const float* Weights::conv(int layer) const { return conv_[static_cast<std::size_t>(layer)]; }

}  // namespace k3
