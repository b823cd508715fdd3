#include "rank/shard.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace k3 {
namespace {

void add_distinct(std::vector<std::int32_t>& seen, std::span<const std::int32_t> ids) {
  for (const std::int32_t id : ids) {
    const auto at = std::lower_bound(seen.begin(), seen.end(), id);
    if (at == seen.end() || *at != id) seen.insert(at, id);
  }
}

}  // namespace

ShardCost shard_cost(const Plan& plan, const WeightSource& source, const Backend& backend, int rank,
                     const ShardOptions& o) {
  ShardCost c;
  c.weights = weight_bytes(plan, source, backend, rank);
  c.state = state_bytes(plan, rank, o.state);
  c.per_position = state_bytes_per_position(plan, rank, o.state);
  c.work = Work::bytes(plan, rank, o.chunk_tok, o.logit_rows);
  return c;
}

Shard::Shard(const Plan& plan, const WeightSource& source, Backend& backend, Comm& world,
             const ShardOptions& options, const LoadProgressFn& progress,
             std::vector<std::string>& warnings)
    : plan_(plan),
      backend_(backend),
      rank_(world.rank()),
      chunk_tok_(options.chunk_tok),
      group_(world.split(plan.layout().stage(world.rank()), plan.layout().tp_rank(world.rank()))),
      sequences_(static_cast<std::size_t>(options.state.n_slot)) {
  // A failure here must not leave the others waiting: the caller agrees after construction, and nothing below speaks.
  weights_ = std::make_unique<Weights>(plan, source, backend, rank_, progress, warnings);
  state_ = std::make_unique<State>(backend, plan, rank_, options.state);
  work_ = std::make_unique<Work>(backend, plan, rank_, options.chunk_tok, options.logit_rows);
  forward_ =
      std::make_unique<Forward>(backend, plan, rank_, *weights_, *state_, *work_, world, *group_);
  batch_ids_ =
      backend.allocate(static_cast<std::size_t>(4 * options.chunk_tok + 1) * sizeof(std::int32_t));
  history_ =
      backend.allocate(static_cast<std::size_t>(plan.config().n_vocab) * sizeof(std::int32_t));
}

void Shard::extend(std::span<const CommandPart> parts, std::span<const std::int32_t> ids) {
  if (timeline_) timeline_->mark("inputs", -1);
  const std::size_t n = ids.size();
  std::vector<std::int32_t> host(ids.begin(), ids.end()), slots, begins;
  for (const CommandPart& p : parts) {
    begins.push_back(static_cast<std::int32_t>(slots.size()));
    const std::int64_t length = this->length(p.slot);
    for (std::int32_t t = 0; t < p.n_ids; ++t)
      host.push_back(static_cast<std::int32_t>(length + t));
    slots.insert(slots.end(), static_cast<std::size_t>(p.n_ids), p.slot);
  }
  begins.push_back(static_cast<std::int32_t>(slots.size()));
  if (slots.size() != n) throw std::logic_error("the parts of a step do not add up to its ids");
  host.insert(host.end(), slots.begin(), slots.end());
  host.insert(host.end(), begins.begin(), begins.end());
  backend_.upload(batch_ids_->data(), host.data(), host.size() * sizeof(std::int32_t));
  const auto* at = reinterpret_cast<const std::int32_t*>(batch_ids_->data());
  batch_ = {static_cast<std::int64_t>(n),
            static_cast<std::int64_t>(parts.size()),
            at,
            at + n,
            at + 2 * n,
            at + 3 * n};
  if (choices_) {
    if (parts.size() != 1) throw std::logic_error("expert choices: a step of several sequences");
    choices_->begin(length(parts[0].slot), static_cast<std::int64_t>(n));
  }
  part_tok_.clear();
  for (const CommandPart& p : parts) part_tok_.push_back(p.n_ids);
  forward_->run(batch_);
  if (choices_) choices_->end();
  for (const CommandPart& p : parts) {
    Sequence& seq = sequences_[static_cast<std::size_t>(p.slot)];
    const auto mine = ids.first(static_cast<std::size_t>(p.n_ids));
    ids = ids.subspan(mine.size());
    seq.length += p.n_ids;
    add_distinct(seq.seen, mine);
    if (p.generated != 0) add_distinct(seq.generated, mine);
  }
}

void Shard::extend(int slot, std::span<const std::int32_t> ids, bool generated) {
  CommandPart part;
  part.slot = slot;
  part.n_ids = static_cast<std::int32_t>(ids.size());
  part.generated = generated ? 1 : 0;
  extend({&part, 1}, ids);
}

void Shard::use_choices(ChoiceUse use, ChoiceBook* book) {
  forward_->set_choices(nullptr);
  choices_.reset();
  if (use == ChoiceUse::kNone) return;
  if (book == nullptr) throw std::logic_error("choices: no book to keep them in");
  choices_ = std::make_unique<ChoiceTap>(backend_, plan_, rank_, chunk_tok_, use, *book);
  forward_->set_choices(choices_.get());
}

void Shard::trace(bool on) {
  timeline_ = on ? backend_.timeline() : nullptr;
  forward_->set_timeline(timeline_.get());
}

void Shard::reset(int slot) { sequences_[static_cast<std::size_t>(slot)] = {}; }

void Shard::clear(int slot) {
  state_->clear(backend_, slot);
  reset(slot);
}

std::vector<std::int32_t> Shard::take_nonfinite() {
  const std::vector<std::int32_t> rows = forward_->take_nonfinite();
  if (part_tok_.size() <= 1) return {*std::min_element(rows.begin(), rows.end())};
  std::vector<std::int32_t> parts;
  auto at = rows.begin();
  for (const std::int32_t n : part_tok_) {
    parts.push_back(*std::min_element(at, at + n));
    at += n;
  }
  return parts;
}

void Shard::fork(int from, int to) {
  const Sequence& seq = sequences_[static_cast<std::size_t>(from)];
  state_->fork(backend_, from, to, seq.length);
  sequences_[static_cast<std::size_t>(to)] = seq;
}

// [length, number of seen, number of generated | seen | generated | state]
std::vector<std::byte> Shard::save(int slot) const {
  const Sequence& seq = sequences_[static_cast<std::size_t>(slot)];
  const std::int64_t head[] = {seq.length, static_cast<std::int64_t>(seq.seen.size()),
                               static_cast<std::int64_t>(seq.generated.size())};
  std::vector<std::byte> out;
  const auto put = [&](std::span<const std::byte> bytes) {
    out.insert(out.end(), bytes.begin(), bytes.end());
  };
  put(std::as_bytes(std::span(head)));
  put(std::as_bytes(std::span(seq.seen)));
  put(std::as_bytes(std::span(seq.generated)));
  put(state_->save(backend_, slot, seq.length));
  return out;
}

void Shard::restore(int slot, std::span<const std::byte> bytes) {
  const auto take = [&](void* to, std::size_t n) {
    if (n > bytes.size()) throw std::invalid_argument("a saved sequence is cut short");
    if (n > 0) std::memcpy(to, bytes.data(), n);
    bytes = bytes.subspan(n);
  };
  std::int64_t head[3] = {};
  take(head, sizeof head);
  Sequence seq;
  seq.length = head[0];
  for (std::vector<std::int32_t>* ids : {&seq.seen, &seq.generated}) {
    const auto n = static_cast<std::size_t>(head[ids == &seq.seen ? 1 : 2]);
    if (n > bytes.size() / sizeof(std::int32_t))
      throw std::invalid_argument("a saved sequence is cut short");
    ids->resize(n);
    take(ids->data(), n * sizeof(std::int32_t));
  }
  state_->restore(backend_, slot, seq.length, bytes);
  sequences_[static_cast<std::size_t>(slot)] = std::move(seq);
}

void Shard::fabricate(int slot, std::int64_t length, std::uint64_t seed) {
  state_->fabricate(backend_, slot, length, seed);
  reset(slot);
  sequences_[static_cast<std::size_t>(slot)].length = length;
}

std::vector<float> Shard::logits(RowRange rows) {
  if (!plan_.has_head(rank_)) return {};
  const View<float> out = forward_->head(batch_, {&rows, 1});
  std::vector<float> host(static_cast<std::size_t>(out.rows * out.cols));
  backend_.download(host.data(), out.data, host.size() * sizeof(float));
  return host;
}

std::vector<CandidateResult> Shard::candidates(std::span<const CommandPart> parts) {
  std::vector<RowRange> runs;
  std::vector<CommandPart> wanting;
  std::int64_t end = 0;
  for (const CommandPart& p : parts) {
    end += p.n_ids;
    if (p.wants_token == 0) continue;
    if (!runs.empty() && runs.back().begin + runs.back().count == end - 1) {
      ++runs.back().count;
    } else {
      runs.push_back({end - 1, 1});
    }
    wanting.push_back(p);
    wanting.back().row = static_cast<std::int32_t>(wanting.size()) - 1;
  }
  if (plan_.has_head(rank_) && !wanting.empty()) {
    searched_ = forward_->head(batch_, runs);
    for (const CommandPart& p : wanting)
      penalise(sequences_[static_cast<std::size_t>(p.slot)], searched_.slice(p.row, 1), p);
  }
  return more_candidates(wanting);
}

std::vector<CandidateResult> Shard::more_candidates(std::span<const CommandPart> parts) {
  if (!plan_.has_head(rank_)) {
    CandidateResult none;
    none.max_logit = -std::numeric_limits<float>::infinity();
    return {parts.size(), none};
  }
  if (timeline_) timeline_->mark("candidates", -1);
  std::vector<CandidateResult> results;
  for (const CommandPart& p : parts) {
    results.push_back(
        backend_.candidates(searched_.slice(p.row, 1), plan_.vocab_out(rank_).begin, p.query));
  }
  return results;
}

void Shard::penalise(const Sequence& seq, View<float> row, const CommandPart& part) {
  const std::int64_t begin = plan_.vocab_out(rank_).begin;
  auto apply = [&](const std::vector<std::int32_t>& ids, float repetition, float presence) {
    if (ids.empty()) return;
    backend_.upload(history_->data(), ids.data(), ids.size() * sizeof(std::int32_t));
    backend_.penalise(row, begin, reinterpret_cast<const std::int32_t*>(history_->data()),
                      static_cast<std::int64_t>(ids.size()), repetition, presence);
  };
  if (part.repetition != 1.0f) apply(seq.seen, part.repetition, 0.0f);
  if (part.presence != 0.0f) apply(seq.generated, 1.0f, part.presence);
}

}  // namespace k3
