// The driver of the layer program: runs this rank's phases and does the speaking between them.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include <cstdint>

#include "comm/comm.h"
#include "rank/layer.h"

namespace k3 {

// Consecutive tokens of a step.
struct RowRange {
  std::int64_t begin = 0;
  std::int64_t count = 0;
};

class Forward {
 public:
  // `world`: all ranks, for hand-offs between stages. `group`: the tp ranks of this rank's stage. All outlive this object.
  Forward(Backend& backend, const Plan& plan, int rank, const Weights& weights, State& state,
          Work& work, Comm& world, Comm& group);

  // Embedding to last layer for the tokens of `batch`. Collective. Throws std::logic_error when the ranks spoke more or
  // less often than the plan says. Steps of one token are recorded once and repeated, where the backend has graphs and the
  // communicators can be recorded: `batch` then names the same memory each time.
  void run(const BatchView& batch);

  // Last stage only: logits of this rank's vocabulary band for some tokens of the last run(), at most as many as Work has
  // logit rows, in the order of `runs`. [tokens, vocab_out band]
  View<float> head(const BatchView& batch, std::span<const RowRange> runs);

  // By row of the steps since the last call: the lowest layer whose output held a NaN or an infinity (n_layer: the logits);
  // kAllFinite where all were finite. Waits.
  static constexpr std::int32_t kAllFinite = 0x7fffffff;
  std::vector<std::int32_t> take_nonfinite();

  void set_probe(Probe* probe) { probe_ = probe; }
  // What sees the experts that tokens choose, from now on; null: nothing does.
  void set_choices(const ChoiceTap* choices) {
    choices_ = choices;
    recording_.reset();  // it names the memory of the one before
  }
  // Marks every phase and every Point from now on; null: none.
  void set_timeline(Timeline* timeline) { timeline_ = timeline; }

 private:
  // A recorded step: valid for one place of the batch's arrays; and the calls that one run of it makes.
  struct Recording {
    std::unique_ptr<Replay> replay;
    BatchView batch;
    std::vector<PointStats> group, world;
  };
  void run_once(const BatchView& batch);
  bool recordable(const BatchView& batch) const;
  void record(const BatchView& batch);
  StepContext context(const BatchView& batch);
  void head_input(const StepContext& c, RowRange rows, View<float> y);
  void speak(const Phase& phase);
  void mark(const char* name, int layer) {
    if (timeline_ != nullptr) timeline_->mark(name, layer);
  }
  void receive_stage(std::int64_t n_tok);
  void send_stage(std::int64_t n_tok);
  void check_counts(const std::vector<std::uint64_t>& before) const;
  std::vector<std::uint64_t> counts() const;

  Backend& backend_;
  const Plan& plan_;
  int rank_;
  const Weights& weights_;
  State& state_;
  Work& work_;
  Comm& world_;
  Comm& group_;
  Probe* probe_ = nullptr;
  const ChoiceTap* choices_ = nullptr;
  Timeline* timeline_ = nullptr;
  std::vector<Phase> program_;
  std::unique_ptr<DeviceBuffer> first_nonfinite_;
  std::optional<Recording> recording_;
};

}  // namespace k3
