#include "rank/expert_choices.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace k3 {
namespace {

// Far enough apart that a probability, which lies in [0, 1], changes neither the choice nor its order.
constexpr float kStep = 4;

}  // namespace

void ChoiceBook::keep(std::int64_t first, std::int64_t width, std::span<const std::int32_t> ids) {
  const auto at = static_cast<std::size_t>(first * width);
  if (at > ids_.size())
    throw std::logic_error("choices of positions before " + std::to_string(first) +
                           " were not kept");
  ids_.resize(std::max(ids_.size(), at + ids.size()));
  std::copy(ids.begin(), ids.end(), ids_.begin() + static_cast<std::ptrdiff_t>(at));
}

std::span<const std::int32_t> ChoiceBook::at(std::int64_t first, std::int64_t n,
                                             std::int64_t width) const {
  const auto begin = static_cast<std::size_t>(first * width),
             size = static_cast<std::size_t>(n * width);
  if (begin + size > ids_.size())
    throw std::logic_error("no choices are kept of position " + std::to_string(first + n - 1));
  return std::span(ids_).subspan(begin, size);
}

ChoiceTap::ChoiceTap(Backend& backend, const Plan& plan, int rank, std::int64_t max_tok,
                     ChoiceUse use, ChoiceBook& book)
    : backend_(backend),
      use_(use),
      book_(book),
      first_layer_(static_cast<int>(plan.layers(rank).begin)),
      n_used_(plan.config().n_expert_used),
      n_expert_(plan.config().n_expert),
      max_tok_(max_tok) {
  const Band layers = plan.layers(rank);
  for (std::int64_t il = layers.begin; il < layers.end; ++il) {
    const bool dense = plan.config().layers[static_cast<std::size_t>(il)].is_dense;
    moe_.push_back(dense ? -1 : n_moe_++);
  }
  d_ids_ = backend.allocate(static_cast<std::size_t>(width() * max_tok) * sizeof(std::int32_t));
  if (use == ChoiceUse::kForce) {
    d_wanted_ =
        backend.allocate(static_cast<std::size_t>(width() * max_tok) * sizeof(std::int32_t));
    d_weights_ = backend.allocate(static_cast<std::size_t>(n_used_ * max_tok) * sizeof(float));
    d_biases_ =
        backend.allocate(static_cast<std::size_t>(n_moe_ * max_tok * n_expert_) * sizeof(float));
  }
}

void ChoiceTap::begin(std::int64_t first, std::int64_t n_tok) {
  if (n_tok > max_tok_) throw std::logic_error("choices: more tokens than there is room for");
  first_ = first;
  n_tok_ = n_tok;
  if (use_ != ChoiceUse::kForce) return;
  const std::span<const std::int32_t> kept = book_.at(first, n_tok, width());
  biases_.assign(static_cast<std::size_t>(n_moe_ * n_tok * n_expert_), -kStep);
  for (std::int64_t t = 0; t < n_tok; ++t) {
    for (std::int64_t m = 0; m < n_moe_; ++m) {
      for (std::int64_t j = 0; j < n_used_; ++j) {
        const std::int32_t e = kept[static_cast<std::size_t>((t * n_moe_ + m) * n_used_ + j)];
        biases_[static_cast<std::size_t>((m * n_tok + t) * n_expert_ + e)] =
            kStep * static_cast<float>(n_used_ - j);
      }
    }
  }
  backend_.upload(d_biases_->data(), biases_.data(), biases_.size() * sizeof(float));
}

void ChoiceTap::apply(ExpertStep& step, int layer) const {
  const std::int64_t at = moe_[index(layer)] * n_tok_;
  const auto place = [&](const DeviceBuffer& ids) {
    return View<std::int32_t>(reinterpret_cast<std::int32_t*>(ids.data()) + at * n_used_, n_tok_,
                              n_used_);
  };
  step.ids = place(*d_ids_);
  if (use_ != ChoiceUse::kForce) return;
  const View<float> unused(reinterpret_cast<float*>(d_weights_->data()), n_tok_, n_used_);
  backend_.route(place(*d_wanted_), unused, step.logits, step.bias, step.bias_stride,
                 step.normalise, step.scale);
  step.bias = reinterpret_cast<const float*>(d_biases_->data()) + at * n_expert_;
  step.bias_stride = n_expert_;
}

void ChoiceTap::end() {
  const std::vector<std::int32_t> taken = take_ids(*d_ids_);
  if (use_ == ChoiceUse::kRecord) return book_.keep(first_, width(), taken);
  const std::span<const std::int32_t> kept = book_.at(first_, n_tok_, width());
  if (use_ == ChoiceUse::kCompare) return count(kept, taken);
  if (!std::equal(kept.begin(), kept.end(), taken.begin()))
    throw std::logic_error("a token did not take the experts it was held to, at positions " +
                           std::to_string(first_) + " to " + std::to_string(first_ + n_tok_ - 1));
  count(kept, take_ids(*d_wanted_));
}

// As books have them: token by token.
std::vector<std::int32_t> ChoiceTap::take_ids(const DeviceBuffer& from) const {
  std::vector<std::int32_t> by_layer(static_cast<std::size_t>(width() * n_tok_));
  backend_.download(by_layer.data(), from.data(), by_layer.size() * sizeof(std::int32_t));
  std::vector<std::int32_t> by_token(by_layer.size());
  for (std::int64_t m = 0; m < n_moe_; ++m) {
    for (std::int64_t t = 0; t < n_tok_; ++t) {
      std::copy_n(by_layer.begin() + (m * n_tok_ + t) * n_used_, n_used_,
                  by_token.begin() + (t * n_moe_ + m) * n_used_);
    }
  }
  return by_token;
}

void ChoiceTap::count(std::span<const std::int32_t> kept, std::span<const std::int32_t> now) {
  if (book_.counts.empty()) {
    for (std::size_t i = 0; i < moe_.size(); ++i) {
      if (moe_[i] >= 0) book_.counts.emplace_back().layer = first_layer_ + static_cast<int>(i);
    }
  }
  const auto n_used = static_cast<std::size_t>(n_used_);
  for (std::size_t place = 0; place * n_used < kept.size(); ++place) {
    const auto before = kept.subspan(place * n_used, n_used);
    const auto chosen = now.subspan(place * n_used, n_used);
    const std::int64_t changed = std::count_if(chosen.begin(), chosen.end(), [&](std::int32_t e) {
      return std::find(before.begin(), before.end(), e) == before.end();
    });
    ChoiceCounts& c = book_.counts[place % static_cast<std::size_t>(n_moe_)];
    c.choices += n_used_;
    c.changed += changed;
    c.tokens += 1;
    c.tokens_moved += changed > 0;
  }
}

}  // namespace k3
