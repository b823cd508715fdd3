#include "rank/engine.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <map>
#include <stdexcept>
#include <utility>

#include "loader/parts.h"
#include "rank/fault.h"
#include "rank/plan.h"
#include "rank/prepare.h"
#include "rank/protocol.h"
#include "rank/report.h"
#include "rank/session.h"
#include "rank/shard.h"

namespace k3 {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point t) {
  return std::chrono::duration<double>(Clock::now() - t).count();
}

std::atomic<bool> g_stop_requested{false};
static_assert(std::atomic<bool>::is_always_lock_free, "set from a signal handler");

}  // namespace

struct Engine::Impl {
  Impl(const RunConfig& asked, Comm& w, Backend& b, const ProgressFn& progress)
      : world(w), backend(b) {
    const auto begin = Clock::now();
    // Files may be slow to open for one rank and not for another.
    constexpr double kStart_s = 60;
    const double limit_s = asked.time_limit_s;
    world.set_time_limit(limit_s > 0 ? std::max(limit_s, kStart_s) : 0);
    prepared = prepare(asked, world, backend);
    world.set_time_limit(limit_s);
    const ShardOptions options = shard_options(prepared.config);
    // A rank that still reads its band is slow, not lost: it says so after every tensor and every piece of one.
    std::uint64_t loaded = 0, to_load = 0, n_piece = 0;
    backend.on_load_piece([&] {
      world.pulse(loaded + ++n_piece, to_load);
      if (progress && to_load > 0)
        progress({Progress::Phase::kLoad, loaded, to_load, seconds_since(begin)});
    });
    auto report_load = [&](std::uint64_t done, std::uint64_t total) {
      loaded = done;
      to_load = total;
      world.pulse(loaded + n_piece, to_load);
      if (progress) progress({Progress::Phase::kLoad, done, total, seconds_since(begin)});
    };
    // Loaded on every rank, or on none. The shard's first act is to form its group, before anything can fail.
    together_at_length(world, [&] {
      shard = std::make_unique<Shard>(*prepared.plan, *prepared.source, backend, world, options,
                                      report_load, prepared.warnings);
      backend.synchronize();
    });
    backend.on_load_piece({});
    load_s = seconds_since(begin);
    // Weights of the file stay mapped on the CPU: its free memory tells nothing of them.
    const std::uint64_t free = backend.free_bytes();
    if (prepared.config.backend != "cpu" && free < prepared.free_bytes)
      taken_bytes = prepared.free_bytes - free;
  }

  // ---- both sides of the protocol ---------------------------------------------------------------------------------
  // A step of at most chunk_tok ids; afterwards rank 0 has every rank's answers where it wanted any.
  void run(const Command& command, std::span<const std::int32_t> ids,
           std::span<const CommandPart> parts) {
    const CommandPart alone = part_of(command, ids);
    if (parts.empty()) parts = {&alone, 1};
    switch (command.kind) {
      case Command::Kind::kExtend:
      case Command::Kind::kStep:
        shard->extend(parts, ids);
        break;
      case Command::Kind::kReset:
        return shard->reset(command.slot);
      case Command::Kind::kClear:
        return shard->clear(command.slot);
      case Command::Kind::kFork:
        return shard->fork(command.slot, command.to_slot);
      case Command::Kind::kSave:
        saved[command.saved] = shard->save(command.slot);
        return;
      case Command::Kind::kRestore:
        return shard->restore(command.slot, saved.at(command.saved));
      case Command::Kind::kForget:
        saved.erase(command.saved);
        return;
      case Command::Kind::kStore:
        return store_session(session_place(command.slot), session_path, session_ids);
      case Command::Kind::kLoad:
        session_ids = load_session(session_place(command.slot), session_path);
        return;
      case Command::Kind::kFabricate:
        return shard->fabricate(command.slot, command.length, command.seed);
      case Command::Kind::kChoices:
        return shard->use_choices(command.use, book);
      case Command::Kind::kReport:
        return gather_reports();
      default:
        break;
    }
    switch (command.want) {
      case Command::Want::kNothing:
        return;
      case Command::Want::kCandidates:
        return answer_candidates(command.kind == Command::Kind::kMore
                                     ? shard->more_candidates(parts)
                                     : shard->candidates(parts));
      case Command::Want::kLastLogits:
        return answer_logits(shard->last_n_tok() - command.n_row);
    }
  }

  SessionPlace session_place(int slot) {
    return {world, *prepared.plan, *shard, prepared.fingerprint, slot};
  }

  // The part that a command about one slot amounts to.
  static CommandPart part_of(const Command& command, std::span<const std::int32_t> ids) {
    CommandPart p;
    p.slot = command.slot;
    p.n_ids = static_cast<std::int32_t>(ids.size());
    p.generated = command.generated;
    p.wants_token = command.want == Command::Want::kCandidates ? command.wants_token : 0;
    p.repetition = command.repetition;
    p.presence = command.presence;
    p.query = command.query;
    return p;
  }

  void answer_candidates(std::vector<CandidateResult> candidates) {
    Answer a = answer_head();
    a.candidates = std::move(candidates);
    a.first_nonfinite = shard->take_nonfinite();
    collect(Point::kCandidates, a);
  }

  // Rows from `begin` to the step's end, a few at a time: no rank holds a chunk's whole logits.
  void answer_logits(std::int64_t begin) {
    const std::int64_t piece = shard_options(prepared.config).logit_rows;
    for (std::int64_t row = begin; row < shard->last_n_tok(); row += piece) {
      const std::int64_t n = std::min(piece, shard->last_n_tok() - row);
      Answer a = answer_head();
      a.logits = shard->logits({row, n});
      a.first_nonfinite = shard->take_nonfinite();
      collect(Point::kLogits, a);
      if (world.rank() == 0) join_logits(n);
    }
  }

  Answer answer_head() const {
    Answer a;
    a.stop_requested = g_stop_requested.load() ? 1 : 0;
    return a;
  }

  void collect(Point point, const Answer& mine) {
    answers.clear();
    for (const auto& bytes : world.gather_bytes(point, to_bytes(mine), 0))
      answers.push_back(answer_from_bytes(bytes));
    for (const Answer& a : answers) {
      stop = stop || a.stop_requested != 0;
      first_nonfinite.resize(a.first_nonfinite.size(), Forward::kAllFinite);
      for (std::size_t i = 0; i < first_nonfinite.size(); ++i)
        first_nonfinite[i] = std::min(first_nonfinite[i], a.first_nonfinite[i]);
    }
  }

  // Rank 0: puts the vocabulary bands of n rows side by side.
  void join_logits(std::int64_t n) {
    const std::int64_t n_vocab = prepared.plan->config().n_vocab;
    rows.resize(static_cast<std::size_t>(n * n_vocab));
    for (int r = 0; r < world.size(); ++r) {
      const std::vector<float>& part = answers[static_cast<std::size_t>(r)].logits;
      if (part.empty()) continue;
      const Band band = prepared.plan->vocab_out(r);
      for (std::int64_t i = 0; i < n; ++i) {
        std::copy_n(part.begin() + i * band.size(), band.size(),
                    rows.begin() + i * n_vocab + band.begin);
      }
    }
    n_rows = n;
    if (on_rows) on_rows();
  }

  void gather_reports() {
    RankReport r = own_report();
    reports.clear();
    for (const auto& bytes : world.gather_bytes(Point::kResidency, to_bytes(r), 0)) {
      reports.push_back(report_from_bytes(bytes));
    }
  }

  RankReport own_report() {
    RankReport r;
    r.rank = world.rank();
    r.device = backend.describe();
    for (const PlannedTensor& t : prepared.plan->tensors())
      r.plan_bytes += prepared.plan->band_bytes(t, world.rank());
    r.weight_bytes = shard->weights().device_bytes() + shard->weights().mapped_bytes();
    r.state_bytes = shard->state_bytes();
    r.work_bytes = shard->work_bytes();
    r.mapped_bytes = shard->weights().mapped_bytes();
    r.priced_bytes = prepared.cost.total();
    r.taken_bytes = taken_bytes;
    r.load_s = load_s;
    if (book != nullptr) r.choices = std::exchange(book->counts, {});
    describe_process(r);
    for (std::size_t p = 0; p < static_cast<std::size_t>(Point::kCount); ++p) {
      PointStats s = world.stats(static_cast<Point>(p));
      const PointStats& g = shard->group().stats(static_cast<Point>(p));
      s.calls += g.calls;
      s.bytes += g.bytes;
      s.seconds += g.seconds;
      r.points.push_back(s);
    }
    return r;
  }

  // ---- rank 0 -------------------------------------------------------------------------------------------------------
  void drive(const Command& command, std::span<const std::int32_t> ids,
             std::span<const CommandPart> parts = {}) {
    in_step = true;
    first_nonfinite.clear();
    const auto begin = Clock::now();
    send_command(world, command, ids, parts);
    run(command, ids, parts);
    if (Timeline* t = shard->timeline()) t->stop();
    in_step = false;
    if (command.kind == Command::Kind::kExtend || command.kind == Command::Kind::kStep) {
      timings.push_back({static_cast<std::int64_t>(ids.size()), seconds_since(begin)});
    }
    if (command.kind == Command::Kind::kStep || first_nonfinite.empty()) return;
    if (first_nonfinite[0] != Forward::kAllFinite)
      throw NonFiniteError(nonfinite_text(spoil(command.slot, first_nonfinite[0]), command.slot));
  }

  // The slot's sequence cannot go on.
  Decision spoil(int slot, std::int32_t layer) {
    spoilt.resize(static_cast<std::size_t>(prepared.config.n_slot));
    spoilt[static_cast<std::size_t>(slot)] = true;
    Decision d;
    d.kind = Decision::Kind::kNotFinite;
    d.layer = layer == Forward::kAllFinite ? -1 : layer;
    return d;
  }
  bool is_spoilt(int slot) const {
    return !spoilt.empty() && spoilt[static_cast<std::size_t>(slot)];
  }
  // Before another sequence takes the slot.
  void cleanse(int slot) {
    if (!is_spoilt(slot)) return;
    Command c;
    c.kind = Command::Kind::kClear;
    c.slot = slot;
    drive(c, {});
    spoilt[static_cast<std::size_t>(slot)] = false;
  }

  std::string nonfinite_text(const Decision& d, int slot) const {
    if (d.layer < 0) return "no token has a finite logit";
    return "a NaN or an infinity first appears in " +
           (d.layer == prepared.plan->config().n_layer
                ? std::string("the logits (output head)")
                : "the output of layer " + std::to_string(d.layer)) +
           ", by position " + std::to_string(shard->length(slot) - 1);
  }

  void check_slot(int slot) const {
    if (slot >= 0 && slot < prepared.config.n_slot) return;
    throw std::invalid_argument("slot " + std::to_string(slot) + ": there are " +
                                std::to_string(prepared.config.n_slot));
  }

  void check_finite(int slot) const {
    if (is_spoilt(slot))
      throw std::invalid_argument("slot " + std::to_string(slot) +
                                  ": its sequence holds values that are not finite");
  }

  void keep_command(Command::Kind kind, int slot, std::uint64_t number) {
    check_slot(slot);
    if (kind == Command::Kind::kSave) check_finite(slot);
    if (kind == Command::Kind::kRestore && saved.contains(number)) cleanse(slot);
    if (kind != Command::Kind::kSave && !saved.contains(number))
      throw std::invalid_argument("no sequence is kept as " + std::to_string(number));
    Command c;
    c.kind = kind;
    c.slot = slot;
    c.saved = number;
    drive(c, {});
  }

  void check_ids(int slot, std::span<const std::int32_t> ids) const {
    check_slot(slot);
    check_finite(slot);
    if (ids.empty()) throw std::invalid_argument("no token ids: a prompt needs at least one");
    const std::int64_t n_vocab = prepared.plan->config().n_vocab;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] >= 0 && ids[i] < n_vocab) continue;
      throw std::invalid_argument("token id " + std::to_string(ids[i]) + " at position " +
                                  std::to_string(i) + ": the vocabulary has " +
                                  std::to_string(n_vocab) + " tokens");
    }
    const std::int64_t length = shard->length(slot) + static_cast<std::int64_t>(ids.size());
    if (length > prepared.config.n_ctx) {
      throw std::invalid_argument("--ctx " + std::to_string(prepared.config.n_ctx) +
                                  ": the sequence needs " + std::to_string(length) + " positions");
    }
  }

  // Where the backend's sums depend on the number of tokens, --reproducible runs each by itself.
  bool one_by_one() const { return prepared.config.reproducible && !backend.token_independent(); }

  // One pass for all parts, then as many rounds of candidates as the hardest draw takes.
  std::vector<Decision> step(std::span<const StepPart> parts) {
    std::vector<Decision> decisions(parts.size());
    std::vector<std::int32_t> ids;
    std::vector<CommandPart> asked;
    std::vector<std::size_t> drawing;  // parts, by row of the logits searched
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const StepPart& p = parts[i];
      CommandPart& c = asked.emplace_back();
      c.slot = p.slot;
      c.n_ids = static_cast<std::int32_t>(p.ids.size());
      c.generated = p.generated ? 1 : 0;
      c.wants_token = p.wants_token ? 1 : 0;
      c.repetition = p.sampler.repetition_penalty;
      c.presence = p.sampler.presence_penalty;
      c.query = first_query(p.sampler, p.draw);
      ids.insert(ids.end(), p.ids.begin(), p.ids.end());
      if (p.wants_token) drawing.push_back(i);
    }
    if (parts.empty()) return decisions;
    Command command;
    command.kind = Command::Kind::kStep;
    command.slot = parts[0].slot;
    command.want = Command::Want::kCandidates;
    drive(command, ids, asked);
    std::vector<CommandPart> open;
    const std::vector<std::int32_t> layers = first_nonfinite;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (layers.at(i) != Forward::kAllFinite) decisions[i] = spoil(parts[i].slot, layers[i]);
    }
    for (std::size_t row = 0; row < drawing.size(); ++row) {
      open.push_back(asked[drawing[row]]);
      open.back().row = static_cast<std::int32_t>(row);
    }
    command.kind = Command::Kind::kMore;
    while (!open.empty()) {
      std::vector<CommandPart> still;
      for (std::size_t i = 0; i < open.size(); ++i) {
        std::vector<CandidateResult> results;
        for (const Answer& a : answers) results.push_back(a.candidates.at(i));
        const std::size_t part = drawing[static_cast<std::size_t>(open[i].row)];
        Decision& d = decisions[part];
        if (d.kind == Decision::Kind::kNotFinite) continue;
        d = decide(parts[part].sampler, open[i].query, results);
        if (d.kind == Decision::Kind::kNotFinite) d = spoil(parts[part].slot, Forward::kAllFinite);
        if (d.kind != Decision::Kind::kNeedMore) continue;
        still.push_back(open[i]);
        still.back().query = d.next;
      }
      open = std::move(still);
      if (!open.empty()) drive(command, {}, open);
    }
    return decisions;
  }

  // Runs ids in chunks. What the command wants it wants of the last of them: candidates of one, logits of n_row, which may lie
  // in several chunks.
  void extend(Command command, std::span<const std::int32_t> ids, const ProgressFn& progress) {
    const auto chunk = static_cast<std::size_t>(one_by_one() ? 1 : prepared.config.chunk_tok);
    const Command::Want wanted = command.want;
    const std::size_t n_row = wanted == Command::Want::kLastLogits
                                  ? std::min(static_cast<std::size_t>(command.n_row), ids.size())
                                  : 1;
    const auto begin = Clock::now();
    for (std::size_t at = 0; at < ids.size(); at += chunk) {
      const std::size_t n = std::min(chunk, ids.size() - at);
      const std::size_t rest = ids.size() - at - n;
      command.want = rest < n_row ? wanted : Command::Want::kNothing;
      command.n_row = static_cast<std::int64_t>(rest < n_row ? std::min(n, n_row - rest) : 0);
      drive(command, ids.subspan(at, n));
      if (progress) progress({Progress::Phase::kPrefill, at + n, ids.size(), seconds_since(begin)});
    }
  }

  // One part by itself, in chunks; its decision where it wants one.
  Decision extend(const StepPart& p, const ProgressFn& progress) {
    Command c;
    c.kind = Command::Kind::kExtend;
    c.want = Command::Want::kCandidates;
    c.wants_token = p.wants_token ? 1 : 0;
    c.slot = p.slot;
    c.generated = p.generated ? 1 : 0;
    c.repetition = p.sampler.repetition_penalty;
    c.presence = p.sampler.presence_penalty;
    c.query = first_query(p.sampler, p.draw);
    extend(c, p.ids, progress);
    while (p.wants_token) {
      std::vector<CandidateResult> results;
      for (const Answer& a : answers) results.push_back(a.candidates.at(0));
      const Decision d = decide(p.sampler, c.query, results);
      if (d.kind == Decision::Kind::kToken) return d;
      if (d.kind == Decision::Kind::kNotFinite)
        throw NonFiniteError(nonfinite_text(spoil(p.slot, Forward::kAllFinite), p.slot));
      c.kind = Command::Kind::kMore;
      c.query = d.next;
      drive(c, {});
    }
    return {};
  }

  Comm& world;
  Backend& backend;
  Prepared prepared;
  std::unique_ptr<Shard> shard;
  double load_s = 0;
  std::uint64_t taken_bytes = 0;
  std::map<std::uint64_t, std::vector<std::byte>> saved;  // this rank's part of sequences kept
  std::uint64_t n_saved = 0;                              // rank 0: numbers given out
  std::string session_path;                               // rank 0: what kStore and kLoad are about
  std::vector<std::int32_t> session_ids;                  // likewise
  ChoiceBook* book = nullptr;
  std::vector<Answer> answers;
  std::vector<float> rows;
  std::int64_t n_rows = 0;
  std::function<void()> on_rows;
  std::vector<RankReport> reports;
  std::vector<StepTiming> timings;
  std::vector<std::int32_t> first_nonfinite;  // rank 0: by part, of the command that just ran
  std::vector<bool> spoilt;  // rank 0: slots whose sequence is not finite; empty: none
  bool stop = false;
  bool stopped = false;
  bool in_step = false;
  int exceptions = std::uncaught_exceptions();
};

Engine::Engine(const RunConfig& config, Comm& world, Backend& backend, const ProgressFn& progress)
    : impl_(std::make_unique<Impl>(config, world, backend, progress)) {}

Engine::~Engine() {
  if (impl_->world.rank() != 0 || impl_->stopped || impl_->in_step) return;
  try {
    stop(std::uncaught_exceptions() > impl_->exceptions ? kExitInternal : kExitOk);
  } catch (...) {
    // The job is ending with an error already; that one is the one to tell.
  }
}

const RunConfig& Engine::config() const { return impl_->prepared.config; }
const ModelConfig& Engine::model() const { return impl_->prepared.plan->config(); }
const ModelFile& Engine::file() const { return *impl_->prepared.file; }
const Plan& Engine::plan() const { return *impl_->prepared.plan; }
const std::vector<std::string>& Engine::warnings() const { return impl_->prepared.warnings; }
const std::vector<StepTiming>& Engine::timings() const { return impl_->timings; }
void Engine::clear_timings() { impl_->timings.clear(); }

void Engine::keep_choices(ChoiceBook& book) { impl_->book = &book; }

int Engine::serve() {
  std::vector<CommandPart> parts;
  for (std::vector<std::int32_t> ids;;) {
    const Command command = receive_command(impl_->world, ids, parts);
    if (command.kind == Command::Kind::kStop) return command.exit_code;
    impl_->run(command, ids, parts);
  }
}

void Engine::reset(int slot) {
  impl_->cleanse(slot);
  Command c;
  c.kind = Command::Kind::kReset;
  c.slot = slot;
  impl_->drive(c, {});
}

void Engine::fabricate(int slot, std::int64_t length, std::uint64_t seed) {
  if (length < 0 || length >= impl_->prepared.config.n_ctx) {
    throw std::invalid_argument("--ctx " + std::to_string(impl_->prepared.config.n_ctx) +
                                ": no room for a token after " + std::to_string(length) +
                                " positions");
  }
  impl_->cleanse(slot);
  Command c;
  c.kind = Command::Kind::kFabricate;
  c.slot = slot;
  c.length = length;
  c.seed = seed;
  impl_->drive(c, {});
}

void Engine::fork(int from, int to) {
  impl_->check_slot(from);
  impl_->check_slot(to);
  impl_->check_finite(from);
  if (from == to) return;
  impl_->cleanse(to);
  Command c;
  c.kind = Command::Kind::kFork;
  c.slot = from;
  c.to_slot = to;
  impl_->drive(c, {});
}

std::uint64_t Engine::save(int slot) {
  impl_->keep_command(Command::Kind::kSave, slot, ++impl_->n_saved);
  return impl_->n_saved;
}
void Engine::restore(std::uint64_t saved, int slot) {
  impl_->keep_command(Command::Kind::kRestore, slot, saved);
}
void Engine::forget(std::uint64_t saved) { impl_->keep_command(Command::Kind::kForget, 0, saved); }

void Engine::store(int slot, const std::string& path, std::span<const std::int32_t> ids) {
  impl_->check_slot(slot);
  impl_->session_path = path;
  impl_->session_ids.assign(ids.begin(), ids.end());
  Command c;
  c.kind = Command::Kind::kStore;
  c.slot = slot;
  impl_->drive(c, {});
}

std::vector<std::int32_t> Engine::load(int slot, const std::string& path) {
  impl_->check_slot(slot);
  impl_->session_path = path;
  Command c;
  c.kind = Command::Kind::kLoad;
  c.slot = slot;
  impl_->drive(c, {});
  return impl_->session_ids;
}

std::int64_t Engine::length(int slot) const { return impl_->shard->length(slot); }

Decision Engine::extend(int slot, std::span<const std::int32_t> ids, const SamplerOptions& sampler,
                        std::uint64_t draw, bool generated, const ProgressFn& progress) {
  validate(sampler);
  impl_->check_ids(slot, ids);
  StepPart part;
  part.slot = slot;
  part.ids = ids;
  part.generated = generated;
  part.sampler = sampler;
  part.draw = draw;
  return impl_->extend(part, progress);
}

std::vector<Decision> Engine::step(std::span<const StepPart> parts) {
  std::int64_t n_tok = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    validate(parts[i].sampler);
    impl_->check_ids(parts[i].slot, parts[i].ids);
    n_tok += static_cast<std::int64_t>(parts[i].ids.size());
    for (std::size_t j = 0; j < i; ++j) {
      if (parts[i].slot == parts[j].slot)
        throw std::invalid_argument("slot " + std::to_string(parts[i].slot) + " twice in a step");
    }
  }
  if (n_tok > impl_->prepared.config.chunk_tok) {
    throw std::invalid_argument("a step of " + std::to_string(n_tok) + " tokens: at most " +
                                std::to_string(impl_->prepared.config.chunk_tok));
  }
  if (!impl_->one_by_one()) return impl_->step(parts);
  std::vector<Decision> decisions;
  for (const StepPart& p : parts) {
    try {
      decisions.push_back(impl_->extend(p, {}));
    } catch (const NonFiniteError&) {
      decisions.push_back(impl_->spoil(p.slot, impl_->first_nonfinite.at(0)));
    }
  }
  return decisions;
}

std::string Engine::nonfinite_text(const Decision& decision, int slot) const {
  return impl_->nonfinite_text(decision, slot);
}

void Engine::logits(int slot, std::span<const std::int32_t> ids, bool last_only,
                    const std::function<void(std::span<const float>, std::int64_t)>& sink,
                    const ProgressFn& progress) {
  last_logits(slot, ids, last_only ? 1 : std::ssize(ids), sink, progress);
}

void Engine::last_logits(int slot, std::span<const std::int32_t> ids, std::int64_t n_row,
                         const std::function<void(std::span<const float>, std::int64_t)>& sink,
                         const ProgressFn& progress) {
  impl_->check_ids(slot, ids);
  Command c;
  c.kind = Command::Kind::kExtend;
  c.slot = slot;
  c.want = Command::Want::kLastLogits;
  c.n_row = n_row;
  impl_->on_rows = [&] { sink(impl_->rows, impl_->n_rows); };
  // Let go also when a step or the sink throws: it refers to this call's arguments.
  const std::unique_ptr<Impl, void (*)(Impl*)> guard(impl_.get(),
                                                     [](Impl* i) { i->on_rows = nullptr; });
  impl_->extend(c, ids, progress);
}

void Engine::use_choices(ChoiceUse use) {
  Command c;
  c.kind = Command::Kind::kChoices;
  c.use = use;
  impl_->drive(c, {});
}

void Engine::trace(bool on) { impl_->shard->trace(on); }
std::vector<TimeSpan> Engine::take_trace() {
  Timeline* t = impl_->shard->timeline();
  return t != nullptr ? t->take() : std::vector<TimeSpan>();
}

std::vector<RankReport> Engine::reports() {
  Command c;
  c.kind = Command::Kind::kReport;
  impl_->drive(c, {});
  return impl_->reports;
}

bool Engine::stop_requested() const { return impl_->stop || g_stop_requested.load(); }
void Engine::request_stop() noexcept { g_stop_requested.store(true); }

void Engine::stop(int exit_code) {
  Command c;
  c.kind = Command::Kind::kStop;
  c.exit_code = exit_code;
  impl_->stopped = true;
  send_command(impl_->world, c, {});
}

}  // namespace k3
