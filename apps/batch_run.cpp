#include "apps/batch_run.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>

namespace k3 {
namespace {

constexpr std::int64_t kLeastPrefix = 16;  // shorter ones cost more to keep than to read again
constexpr int kIdle_ms = 100;      // how long to wait for a pipe before signals are looked at
constexpr int kLinesAtOnce = 256;  // read between two steps at most: bad lines cost time too

double seconds_between(std::chrono::steady_clock::time_point a,
                       std::chrono::steady_clock::time_point b) {
  return std::chrono::duration<double>(b - a).count();
}

}  // namespace

BatchRun::BatchRun(Engine& engine, const Tokenizer& tokenizer, LineReader& in, BatchOutput& out,
                   const BatchDefaults& defaults, const BatchOptions& options)
    : engine_(engine),
      tokenizer_(tokenizer),
      in_(in),
      out_(out),
      defaults_(defaults),
      options_(options),
      prefixes_(static_cast<std::size_t>(options.n_prefix)) {
  for (int slot = engine.config().n_slot; slot-- > 0;) free_slots_.push_back(slot);
  if (!options.session.empty()) {
    const std::vector<std::int32_t> ids = engine.load(0, options.session);
    prefixes_.pin(ids, engine.save(0));
  }
  stats_.n_before = out.done().count();
}

BatchPlace BatchRun::place() const {
  return {in_.bytes_read(), in_.bytes_total(), running_.size(), waiting_.size(),
          seconds_between(began_, Clock::now())};
}

void BatchRun::run(const std::function<bool()>& stopped, const std::function<void()>& show) {
  std::optional<Clock::time_point> stop_at;
  for (;;) {
    if (!stop_at && stopped()) {
      stop_at = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                   std::chrono::duration<double>(options_.grace_s));
    }
    if (stop_at && (running_.empty() || Clock::now() >= *stop_at)) break;
    if (!stop_at) {
      read_lines(running_.empty() && waiting_.empty());
      admit();
    }
    if (!running_.empty()) step();
    out_.commit();
    show();
    if (running_.empty() && waiting_.empty() && ended_) break;
  }
  out_.commit();
}

// As many prompts as may find their like among each other; of a long input the rest stays in the file.
void BatchRun::read_lines(bool may_wait) {
  const std::size_t window = 4 * static_cast<std::size_t>(engine_.config().n_slot);
  InputLine line;
  for (int n = 0; n < kLinesAtOnce && !ended_ && waiting_.size() < window; ++n) {
    switch (in_.next(line, may_wait ? kIdle_ms : 0)) {
      case LineReader::Outcome::kEnd:
        ended_ = true;
        return;
      case LineReader::Outcome::kNothingYet:
        return;
      case LineReader::Outcome::kLine:
        if (take_line(line)) may_wait = false;
    }
  }
}

// False: there is nothing to run for it.
bool BatchRun::take_line(const InputLine& line) {
  if (out_.done().has(line.number)) {
    if (out_.done().hash(line.number) == line.hash) return false;
    throw std::invalid_argument(
        fmt::format("{}: line {} is another than the one that the output answers: it cannot be "
                    "resumed with this input",
                    in_.name(), line.number));
  }
  BatchRequest request = read_batch_request(line, defaults_, tokenizer_);
  if (request.error) {
    ++stats_.n_failed;
    out_.add(error_line(request));
    return false;
  }
  waiting_.push_back({std::move(request), Clock::now()});
  return true;
}

// Another request is reading what this one begins with: it is quicker to wait for that.
bool BatchRun::waits_for_prefix(const BatchRequest& request) const {
  return std::any_of(running_.begin(), running_.end(), [&](const auto& r) {
    return r->cut > r->n_read && r->cut < std::ssize(request.ids) &&
           static_cast<std::int64_t>(common_prefix(request.ids, r->request.ids)) >= r->cut;
  });
}

void BatchRun::admit() {
  for (auto w = waiting_.begin(); w != waiting_.end() && !free_slots_.empty();) {
    if (waits_for_prefix(w->request)) {
      ++w;
      continue;
    }
    Waiting next = std::move(*w);
    w = waiting_.erase(w);
    const int slot = free_slots_.back();
    free_slots_.pop_back();
    start(std::move(next), slot);
  }
}

void BatchRun::start(Waiting&& waiting, int slot) {
  auto r = std::make_unique<Running>(std::move(waiting), tokenizer_);
  r->slot = slot;
  r->began = r->last = Clock::now();
  r->times.queue_s = seconds_between(r->read, r->began);
  const auto hit = prefixes_.find(r->request.ids);
  if (hit) {
    engine_.restore(hit->saved, slot);
    r->n_read = r->times.n_reused = hit->length;
  } else {
    engine_.reset(slot);
  }
  if (options_.n_prefix > 0) {
    std::vector<std::span<const std::int32_t>> others;
    for (const Waiting& w : waiting_) others.emplace_back(w.request.ids);
    const std::int64_t cut = choose_cut(r->request.ids, others, kLeastPrefix, 1);
    if (cut > r->n_read) r->cut = cut;
  }
  running_.push_back(std::move(r));
}

void BatchRun::step() {
  std::vector<SlotWork> work;
  for (const auto& r : running_) {
    work.push_back({r->slot, std::ssize(r->request.ids), r->n_read, r->cut});
  }
  const auto planned = plan_step(work, {engine_.config().chunk_tok, 0});
  std::vector<StepPart> parts;
  std::vector<Running*> owners;
  for (const PlannedPart& p : planned) {
    Running* r = std::find_if(running_.begin(), running_.end(), [&](const auto& x) {
                   return x->slot == p.slot;
                 })->get();
    StepPart part;
    part.slot = p.slot;
    part.generated = p.begin < 0;
    part.ids = part.generated
                   ? std::span<const std::int32_t>(&r->next, 1)
                   : std::span<const std::int32_t>(r->request.ids)
                         .subspan(static_cast<std::size_t>(p.begin), static_cast<std::size_t>(p.n));
    part.wants_token = part.generated || p.begin + p.n == std::ssize(r->request.ids);
    part.sampler = r->request.sampler;
    part.draw = r->draw;
    parts.push_back(part);
    owners.push_back(r);
  }
  const std::vector<Decision> decisions = engine_.step(parts);
  ++stats_.n_step;
  engine_.clear_timings();
  for (std::size_t i = 0; i < planned.size(); ++i) after_part(*owners[i], planned[i], decisions[i]);
}

void BatchRun::after_part(Running& r, const PlannedPart& part, const Decision& d) {
  if (d.kind == Decision::Kind::kNotFinite) {
    r.request.error = {"not_finite", engine_.nonfinite_text(d, r.slot)};
    ++stats_.n_failed;
    out_.add(error_line(r.request));
    return leave(r);
  }
  if (part.begin >= 0) {
    r.n_read += part.n;
    stats_.n_prompt_tok += part.n;
    if (r.n_read == r.cut) keep_prefix(r);
    if (r.n_read < std::ssize(r.request.ids)) return;
  }
  const Clock::time_point now = Clock::now();
  (r.draw == 0 ? r.times.ttft_s : r.times.later_s) += seconds_between(r.last, now);
  r.last = now;
  ++r.draw;
  ++stats_.n_token;
  r.next = d.id;
  if (!r.answer.push(d)) return finish(r);
  if (engine_.length(r.slot) >= engine_.config().n_ctx) {
    r.answer.cut_off();
    finish(r);
  }
}

void BatchRun::keep_prefix(Running& r) {
  const auto ids =
      std::span<const std::int32_t>(r.request.ids).first(static_cast<std::size_t>(r.cut));
  if (prefixes_.has(ids)) return;
  for (const std::uint64_t saved : prefixes_.add(ids, engine_.save(r.slot))) engine_.forget(saved);
}

void BatchRun::finish(Running& r) {
  out_.add(r.answer.line(r.times));
  ++stats_.n_answered;
  stats_.n_reused_tok += r.times.n_reused;
  const auto n_token = std::ssize(r.answer.ids());
  stats_.queue_s.add(r.times.queue_s);
  stats_.ttft_s.add(r.times.ttft_s);
  if (n_token > 1) stats_.tpot_s.add(r.times.later_s / static_cast<double>(n_token - 1));
  stats_.total_s.add(r.times.ttft_s + r.times.later_s);
  stats_.prompt_tok.add(static_cast<double>(r.request.ids.size()));
  stats_.tokens.add(static_cast<double>(n_token));
  leave(r);
}

void BatchRun::leave(Running& r) {
  free_slots_.push_back(r.slot);
  running_.remove_if([&](const auto& x) { return x.get() == &r; });
}

void log_stats(RunLog& log, const BatchStats& stats, double seconds) {
  const auto put = [&](const std::string& name, double value) { log.summary(name, value); };
  put("requests", static_cast<double>(stats.n_answered));
  put("failed_lines", static_cast<double>(stats.n_failed));
  put("lines_before", static_cast<double>(stats.n_before));
  put("steps", static_cast<double>(stats.n_step));
  put("prompt_tokens", static_cast<double>(stats.n_prompt_tok));
  put("reused_tokens", static_cast<double>(stats.n_reused_tok));
  put("generated_tokens", static_cast<double>(stats.n_token));
  put("batch_s", seconds);
  if (seconds > 0) {
    put("generated_tok_s", static_cast<double>(stats.n_token) / seconds);
    put("prompt_tok_s", static_cast<double>(stats.n_prompt_tok) / seconds);
    put("requests_s", static_cast<double>(stats.n_answered) / seconds);
  }
  const auto spread = [&](const std::string& name, const std::string& unit, const Percentiles& p,
                          double scale) {
    if (p.count() == 0) return;
    put(name + "_mean" + unit, scale * p.mean());
    for (const auto& [label, share] : {std::pair{"p50", 0.5}, {"p90", 0.9}, {"p99", 0.99}}) {
      put(name + "_" + label + unit, scale * p.at(share));
    }
  };
  spread("queue", "_ms", stats.queue_s, 1e3);
  spread("ttft", "_ms", stats.ttft_s, 1e3);
  spread("tpot", "_ms", stats.tpot_s, 1e3);
  spread("request", "_ms", stats.total_s, 1e3);
  spread("prompt", "_tokens", stats.prompt_tok, 1);
  spread("answer", "_tokens", stats.tokens, 1);
}

}  // namespace k3
