#include "rank/forward.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace k3 {

Forward::Forward(Backend& backend, const Plan& plan, int rank, const Weights& weights, State& state,
                 Work& work, Comm& world, Comm& group)
    : backend_(backend),
      plan_(plan),
      rank_(rank),
      weights_(weights),
      state_(state),
      work_(work),
      world_(world),
      group_(group),
      program_(layer_program(plan, rank)),
      first_nonfinite_(backend.allocate_shared(static_cast<std::size_t>(work.max_tok()) *
                                               sizeof(std::int32_t))) {
  take_nonfinite();  // it holds zeros
}

StepContext Forward::context(const BatchView& batch) {
  return {backend_, plan_,   rank_, weights_,
          state_,   work_,   batch, reinterpret_cast<std::int32_t*>(first_nonfinite_->data()),
          probe_,   choices_};
}

void Forward::run(const BatchView& batch) {
  if (!recordable(batch)) return run_once(batch);
  const bool same = recording_ && recording_->batch.ids == batch.ids &&
                    recording_->batch.pos == batch.pos && recording_->batch.slot == batch.slot &&
                    recording_->batch.seg_begin == batch.seg_begin;
  if (same) {
    work_.shape(batch.n_tok);
    group_.count_replay(recording_->group);
    world_.count_replay(recording_->world);
  } else {
    record(batch);  // makes the calls, which count themselves
  }
  recording_->replay->run();
  group_.replayed(backend_.stream());
  if (plan_.layout().pp > 1) world_.replayed(backend_.stream());
}

bool Forward::recordable(const BatchView& batch) const {
  return batch.n_tok == 1 && probe_ == nullptr && timeline_ == nullptr && backend_.has_graphs() &&
         group_.capturable() && (plan_.layout().pp == 1 || world_.capturable());
}

void Forward::record(const BatchView& batch) {
  const auto stats = [](const Comm& comm) {
    std::vector<PointStats> all;
    for (std::size_t p = 0; p < static_cast<std::size_t>(Point::kCount); ++p)
      all.push_back(comm.stats(static_cast<Point>(p)));
    return all;
  };
  Recording r;
  r.batch = batch;
  const std::vector<PointStats> group = stats(group_), world = stats(world_);
  r.replay = backend_.capture([&] { run_once(batch); });
  r.group = stats(group_);
  r.world = stats(world_);
  for (std::size_t p = 0; p < group.size(); ++p) {
    for (auto [now, before] :
         {std::pair(&r.group[p], &group[p]), std::pair(&r.world[p], &world[p])}) {
      now->calls -= before->calls;
      now->bytes -= before->bytes;
    }
  }
  recording_ = std::move(r);
}

void Forward::run_once(const BatchView& batch) {
  const std::vector<std::uint64_t> before = counts();
  work_.shape(batch.n_tok);
  StepContext c = context(batch);
  if (!plan_.has_embedding(rank_)) {
    mark(point_name(Point::kStageHandOff), -1);
    receive_stage(batch.n_tok);
  }
  for (const Phase& phase : program_) {
    mark(phase.name, phase.layer);
    phase.run(c, phase.layer);
    if (phase.point != Point::kCount) mark(point_name(phase.point), phase.layer);
    speak(phase);
  }
  if (!plan_.has_head(rank_)) {
    mark(point_name(Point::kStageHandOff), -1);
    send_stage(batch.n_tok);
  }
  check_counts(before);
}

void Forward::speak(const Phase& phase) {
  group_.set_place(phase.layer >= 0 ? Place{"layer", phase.layer} : Place{});
  auto sum = [&](View<float> v) {
    group_.sum(phase.point, v.data, static_cast<std::size_t>(v.rows * v.cols), backend_.stream());
  };
  const auto gather = [&](View<float> mine, View<float> all, const auto& width) {
    std::vector<std::size_t> widths;
    const int first = plan_.layout().stage(rank_) * plan_.layout().tp;
    for (int r = first; r < first + plan_.layout().tp; ++r)
      widths.push_back(static_cast<std::size_t>(width(r)));
    group_.gather_rows(phase.point, mine.data, all.data, static_cast<std::size_t>(mine.rows),
                       widths, backend_.stream());
  };
  switch (phase.point) {
    case Point::kCount:
      return;
    case Point::kEmbed:
      return sum(work_.x);
    case Point::kAttnOut:
    case Point::kFfnOut:
      return sum(work_.a);
    case Point::kMoeLatent:
      return sum(work_.m);
    case Point::kMlaQuery:
      return gather(work_.q_abs, work_.q_all, [&](int r) {
        return plan_.heads(r, phase.layer).size() * plan_.config().cache_row();
      });
    case Point::kMlaParts: {
      // Parts lie one after the other, not side by side: one long row a rank.
      const std::int64_t size = work_.part.rows * work_.part.cols;
      const View<float> mine(work_.part.data, 1, size);
      return gather(mine, work_.parts, [&](int) { return size; });
    }
    case Point::kRouterLatent:
      return gather(work_.packed, work_.gathered, [&](int r) {
        return plan_.router_rows(r, phase.layer).size() + plan_.latent_rows(r, phase.layer).size();
      });
    default:
      throw std::logic_error(std::string("no phase speaks at ") + point_name(phase.point));
  }
}

// x and every banked stream travel in one message, to the rank of the same place in the next stage.
void Forward::receive_stage(std::int64_t n_tok) {
  world_.set_place({"layer", static_cast<int>(plan_.layers(rank_).begin)});
  const std::int64_t streams = 1 + plan_.config().bank_before(plan_.layers(rank_).begin);
  world_.recv(Point::kStageHandOff, work_.x.data,
              static_cast<std::size_t>(streams * n_tok * work_.x.cols), rank_ - plan_.layout().tp,
              backend_.stream());
  world_.set_place({});
}

void Forward::send_stage(std::int64_t n_tok) {
  world_.set_place({"layer", static_cast<int>(plan_.layers(rank_).end)});
  const std::int64_t streams = 1 + plan_.config().bank_before(plan_.layers(rank_).end);
  world_.send(Point::kStageHandOff, work_.x.data,
              static_cast<std::size_t>(streams * n_tok * work_.x.cols), rank_ + plan_.layout().tp,
              backend_.stream());
  world_.set_place({});
}

View<float> Forward::head(const BatchView& batch, std::span<const RowRange> runs) {
  if (!plan_.has_head(rank_)) throw std::logic_error("head() on a stage without one");
  mark("head", -1);
  const auto n_layer = static_cast<std::int32_t>(plan_.config().n_layer);
  StepContext c = context(batch);
  std::int64_t n = 0;
  for (const RowRange& rows : runs) {
    if (n + rows.count > work_.logits.rows)
      throw std::logic_error("head(): more rows than Work has");
    head_input(c, rows, work_.head_in.slice(n, rows.count));
    n += rows.count;
  }
  const View<float> y = work_.head_in.slice(0, n), out = work_.logits.slice(0, n);
  c.see("result_norm", -1, y);
  const MatmulJob job{out, y, &weights_.matrix(Role::kOutput)};
  backend_.matmul({&job, 1});
  n = 0;
  for (const RowRange& rows : runs) {
    backend_.note_nonfinite(out.slice(n, rows.count), n_layer, c.first_nonfinite + rows.begin);
    n += rows.count;
  }
  c.see("result_output", -1, out);
  return out;
}

// The stream of some tokens, mixed and normed for the output matrix.
void Forward::head_input(const StepContext& c, RowRange rows, View<float> y) {
  const ModelConfig& m = plan_.config();
  float* probs = probe_ != nullptr ? work_.probs.data : nullptr;
  MixStep mix;
  mix.y = y;
  mix.x = work_.x.slice(rows.begin, rows.count);
  mix.bank = work_.bank + rows.begin * m.hidden;
  mix.n_bank = m.bank_before(m.n_layer);
  mix.bank_stride = work_.bank_stride;
  mix.score_w = weights_.vec(Role::kOutputResScore);
  mix.norm_w = weights_.vec(Role::kOutputNorm);
  mix.eps = m.rms_eps;
  if (probe_ != nullptr || !backend_.fused_mix(mix)) {
    backend_.mix_norm(mix.y, mix.x, mix.bank, mix.n_bank, mix.bank_stride, mix.score_w, mix.norm_w,
                      mix.eps, probs);
  }
  if (probs != nullptr)
    c.see("res_probs_output", -1, View<const float>(probs, rows.count, mix.n_bank + 1));
}

std::vector<std::int32_t> Forward::take_nonfinite() {
  backend_.synchronize();
  auto* first = reinterpret_cast<std::int32_t*>(first_nonfinite_->data());
  const std::vector<std::int32_t> taken(first, first + work_.max_tok());
  std::fill_n(first, work_.max_tok(), kAllFinite);
  return taken;
}

std::vector<std::uint64_t> Forward::counts() const {
  std::vector<std::uint64_t> n(static_cast<std::size_t>(Point::kCount));
  for (std::size_t p = 0; p < n.size(); ++p) {
    n[p] = group_.stats(static_cast<Point>(p)).calls;
    if (static_cast<Point>(p) == Point::kStageHandOff)
      n[p] += world_.stats(Point::kStageHandOff).calls;
  }
  return n;
}

// A missing or doubled collective stays fluent; the count is what gives it away.
void Forward::check_counts(const std::vector<std::uint64_t>& before) const {
  const CollectiveCounts expected = plan_.collectives(rank_);
  const std::vector<std::uint64_t> after = counts();
  for (std::size_t p = 0; p < after.size(); ++p) {
    if (after[p] - before[p] == expected[p]) continue;
    throw std::logic_error(std::string("step spoke ") + std::to_string(after[p] - before[p]) +
                           " times at " + point_name(static_cast<Point>(p)) + ", the plan says " +
                           std::to_string(expected[p]));
  }
}

}  // namespace k3
