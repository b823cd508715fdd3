// What one rank holds and does: weights, state, activations and the forward pass of its part of the model. The engine
// tells it what to run; it knows nothing of who is driving.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/comm.h"
#include "rank/forward.h"
#include "rank/plan.h"
#include "rank/protocol.h"
#include "rank/state.h"
#include "rank/weights.h"

namespace k3 {

struct ShardOptions {
  StateShape state;
  std::int64_t chunk_tok = 256;  // tokens of a step at most
  std::int64_t logit_rows = 32;  // rows of logits computed at once at most
};

// Device bytes a shard takes, before anything is allocated.
struct ShardCost {
  std::uint64_t weights = 0;
  std::uint64_t state = 0;
  std::uint64_t per_position = 0;  // of state: bytes that one more position of every slot costs
  std::uint64_t work = 0;
  std::uint64_t total() const { return weights + state + work; }
};
ShardCost shard_cost(const Plan& plan, const WeightSource& source, const Backend& backend, int rank,
                     const ShardOptions& o);

class Shard {
 public:
  Shard(const Plan& plan, const WeightSource& source, Backend& backend, Comm& world,
        const ShardOptions& options, const LoadProgressFn& progress,
        std::vector<std::string>& warnings);

  // Appends each part's ids, which lie one part after another in `ids`, to its slot's sequence and runs all of them in one
  // pass. No slot twice, at most chunk_tok ids, all within the vocabulary and n_ctx. Collective.
  void extend(std::span<const CommandPart> parts, std::span<const std::int32_t> ids);
  // The same for one slot.
  void extend(int slot, std::span<const std::int32_t> ids, bool generated);
  void reset(int slot);
  // The same, and zeros in all that the slot's sequence left behind.
  void clear(int slot);
  // The sequence of slot `from` continues in both slots.
  void fork(int from, int to);
  // The slot's sequence as host bytes, this rank's part; restore() puts it into any slot.
  std::vector<std::byte> save(int slot) const;
  void restore(int slot, std::span<const std::byte> bytes);
  // The same layer by layer, in pieces that fit ranks of any layout (State); at the end of a restore the sequence itself: its
  // length and distinct ids.
  std::vector<std::byte> save_heads(int slot, int layer) const {
    return state_->save_heads(backend_, slot, layer);
  }
  std::vector<std::byte> save_rows(int slot, int layer) const {
    return state_->save_rows(backend_, slot, layer, length(slot));
  }
  void restore_heads(int slot, int layer, std::span<const std::byte> blob) {
    state_->restore_heads(backend_, slot, layer, blob);
  }
  void restore_rows(int slot, int layer, std::int64_t length, std::span<const std::byte> rows) {
    state_->restore_rows(backend_, slot, layer, length, rows);
  }
  void set_sequence(int slot, std::int64_t length, std::vector<std::int32_t> seen,
                    std::vector<std::int32_t> generated) {
    sequences_[static_cast<std::size_t>(slot)] = {length, std::move(seen), std::move(generated)};
  }
  const std::vector<std::int32_t>& seen(int slot) const {
    return sequences_[static_cast<std::size_t>(slot)].seen;
  }
  const std::vector<std::int32_t>& generated(int slot) const {
    return sequences_[static_cast<std::size_t>(slot)].generated;
  }
  // The slot's sequence becomes `length` positions of made-up state (State::fabricate).
  void fabricate(int slot, std::int64_t length, std::uint64_t seed);
  std::int64_t length(int slot) const { return sequences_[static_cast<std::size_t>(slot)].length; }

  // Last stage: logits of the last run's row ranges, as this rank's band. Elsewhere: nothing.
  std::vector<float> logits(RowRange rows);
  // Last stage: what may follow the last id of each part of the last step that wants a token: penalises and searches these
  // logits. Elsewhere: empty results.
  std::vector<CandidateResult> candidates(std::span<const CommandPart> parts);
  // The same rows again, those that the parts name, with other queries.
  std::vector<CandidateResult> more_candidates(std::span<const CommandPart> parts);
  // For each part of the last step: the lowest layer whose output was not finite, or Forward::kAllFinite. What there was before
  // and nobody asked for counts as well, where the last step had one part. Waits.
  std::vector<std::int32_t> take_nonfinite();
  std::int64_t last_n_tok() const { return batch_.n_tok; }

  // What becomes of the experts that tokens choose from now on; `book` outlives the shard, or the next call. While it is not
  // kNone a step holds tokens of one sequence.
  void use_choices(ChoiceUse use, ChoiceBook* book);

  // Where the device's time goes, from now on; with false no more.
  void trace(bool on);
  Timeline* timeline() { return timeline_.get(); }  // null: not traced

  Forward& forward() { return *forward_; }
  const Weights& weights() const { return *weights_; }
  const State& state() const { return *state_; }
  std::uint64_t state_bytes() const { return state_->bytes(); }
  std::uint64_t work_bytes() const { return work_->device_bytes(); }
  const Comm& group() const { return *group_; }

 private:
  struct Sequence {
    std::int64_t length = 0;
    std::vector<std::int32_t> seen;       // distinct ids of the sequence: the repetition penalty's
    std::vector<std::int32_t> generated;  // distinct ids that were drawn: the presence penalty's
  };
  void penalise(const Sequence& seq, View<float> row, const CommandPart& part);

  const Plan& plan_;
  Backend& backend_;
  int rank_;
  std::int64_t chunk_tok_;
  std::unique_ptr<Comm> group_;
  std::unique_ptr<Weights> weights_;
  std::unique_ptr<State> state_;
  std::unique_ptr<Work> work_;
  std::unique_ptr<Forward> forward_;
  std::unique_ptr<ChoiceTap> choices_;
  std::unique_ptr<Timeline> timeline_;
  std::unique_ptr<DeviceBuffer> batch_ids_;  // ids, pos, slot, seg_begin
  std::unique_ptr<DeviceBuffer> history_;
  BatchView batch_;
  std::vector<std::int32_t> part_tok_;  // of the last step's parts
  View<float> searched_;                // logits that candidates() searched
  std::vector<Sequence> sequences_;
};

}  // namespace k3
