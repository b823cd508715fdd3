#include "rank/weights.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

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

void check_finite(const std::vector<float>& values, const std::string& where, std::int64_t begin) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (std::isfinite(values[i])) continue;
    throw std::invalid_argument(
        where + ": element " + std::to_string(begin + static_cast<std::int64_t>(i)) + " is " +
        (std::isnan(values[i]) ? "NaN" : "infinite") + ", expected a finite number");
  }
}

}  // namespace

std::uint64_t weight_bytes(const Plan& plan, const WeightSource& source, const Backend& backend,
                           int rank) {
  std::uint64_t sum = 0;
  for (const PlannedTensor& t : plan.tensors()) {
    const Box box = plan.box(t, rank);
    if (box.empty()) continue;
    if (is_vector(t.role) || is_conv(t.role)) {
      sum += static_cast<std::uint64_t>(box.elems()) * sizeof(float);
    } else {
      sum += source.placed_bytes(t, box, backend);
    }
  }
  return sum;
}

Weights::Weights(const Plan& plan, const WeightSource& source, Backend& backend, int rank,
                 const LoadProgressFn& progress, std::vector<std::string>& warnings)
    : n_layer_(static_cast<std::size_t>(plan.config().n_layer)) {
  slots_.resize(static_cast<std::size_t>(Role::kCount) * (n_layer_ + 1));
  conv_.resize(n_layer_, nullptr);
  std::uint64_t total = 0, done = 0;
  for (const PlannedTensor& t : plan.tensors()) total += plan.band_bytes(t, rank);
  for (const PlannedTensor& t : plan.tensors()) {
    const Box box = plan.box(t, rank);
    if (is_conv(t.role)) {
      if (t.role == Role::kKdaConvQ && !box.empty())
        load_conv(plan, source, backend, rank, t.layer);
    } else if (is_vector(t.role)) {
      if (!box.empty()) load_vector(t, box, source, backend, warnings);
    } else {
      load_matrix(t, box, source, backend);
    }
    done += plan.band_bytes(t, rank);
    if (progress) progress(done, total);
  }
}

void Weights::load_vector(const PlannedTensor& t, const Box& box, const WeightSource& source,
                          Backend& backend, std::vector<std::string>& warnings) {
  const std::int64_t begin = box.axis[0].begin, end = box.axis[0].end;
  std::vector<float> values = source.flat(t, false, begin, end);
  check_finite(values, source.where(t, false), begin);
  if (t.transform == Transform::kProduct) {
    const std::vector<float> factor = source.flat(t, true, begin, end);
    check_finite(factor, source.where(t, true), begin);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] *= factor[i];
  }
  if (t.transform == Transform::kNegAbs) {
    if (std::any_of(values.begin(), values.end(), [](float v) { return v > 0; })) {
      warnings.push_back(source.where(t, false) +
                         ": positive values, read as exp(A_log) and negated");
    }
    for (float& v : values) v = -std::abs(v);
  }
  Slot& s = slot(t.role, t.layer);
  s.present = true;
  s.vec = upload(backend, values);
}

void Weights::load_matrix(const PlannedTensor& t, const Box& box, const WeightSource& source,
                          Backend& backend) {
  Slot& s = slot(t.role, t.layer);
  s.present = true;
  if (box.empty()) {  // keeps its shape, so that ops see an empty band and not a wrong one
    s.matrix.type = t.type;
    s.matrix.n_in = box.axis[0].size();
    s.matrix.n_out = box.axis[1].size();
    s.matrix.n_mat = box.axis[2].size();
    return;
  }
  const std::size_t before = storage_.size();
  const PlacedWeight placed = source.place(t, box, backend, storage_);
  s.matrix = placed.weight;
  mapped_bytes_ += placed.mapped_bytes;
  for (std::size_t i = before; i < storage_.size(); ++i) device_bytes_ += storage_[i]->bytes();
}

void Weights::load_conv(const Plan& plan, const WeightSource& source, Backend& backend, int rank,
                        int layer) {
  std::vector<float> taps;
  for (const Role role : {Role::kKdaConvQ, Role::kKdaConvK, Role::kKdaConvV}) {
    const PlannedTensor* t = plan.find(role, layer);
    const Box box = plan.box(*t, rank);
    const std::int64_t begin = box.axis[1].begin * t->dims[0], end = box.axis[1].end * t->dims[0];
    const std::vector<float> part = source.flat(*t, false, begin, end);
    check_finite(part, source.where(*t, false), begin);
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
