#include "apps/generation.h"

#include <chrono>

namespace k3 {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point t) {
  return std::chrono::duration<double>(Clock::now() - t).count();
}

struct StoppedInPrompt {};

}  // namespace

void Generator::log_steps(RunLog::Phase phase) {
  const std::vector<StepTiming>& all = engine_.timings();
  for (; n_logged_ < all.size(); ++n_logged_) {
    if (log_) log_->step(phase, all[n_logged_]);
  }
}

Generation Generator::run(std::span<const std::int32_t> prompt, const GenerationOptions& options,
                          const Sink& sink, const ProgressFn& progress,
                          const std::function<bool()>& stopped) {
  Generation out;
  std::uint64_t draw = options.first_draw;
  Clock::time_point before = Clock::now();
  Decision d;
  try {
    d = engine_.extend(0, prompt, engine_.config().sampler, draw++, false, [&](const Progress& p) {
      log_steps(RunLog::Phase::kPrefill);
      progress(p);
      if (p.done < p.total && stopped()) throw StoppedInPrompt{};
    });
  } catch (const StoppedInPrompt&) {
    out.ending = Generation::Ending::kStopped;
    return out;
  }
  log_steps(RunLog::Phase::kPrefill);
  out.prompt_read = true;
  for (;;) {
    const double seconds = seconds_since(before);
    before = Clock::now();
    (out.ids.empty() ? out.ttft_s : out.later_s) += seconds;
    out.ending = Generation::Ending::kLength;
    if (options.n_predict == 0) return out;
    out.ids.push_back(d.id);
    if (log_) log_->token(d, seconds);
    const bool ends = !options.ignore_eos && tokenizer_.is_stop(d.id);
    const bool goes_on = sink(d, ends);
    if (ends) {
      out.ending = Generation::Ending::kEndToken;
      return out;
    }
    if (!goes_on) {
      out.ending = Generation::Ending::kSink;
      return out;
    }
    if (std::ssize(out.ids) >= options.n_predict) return out;
    if (engine_.length(0) >= engine_.config().n_ctx) {
      out.ending = Generation::Ending::kContextFull;
      return out;
    }
    if (stopped()) {
      out.ending = Generation::Ending::kStopped;
      return out;
    }
    d = engine_.extend(0, std::span(&d.id, 1), engine_.config().sampler, draw++, true);
    log_steps(RunLog::Phase::kDecode);
  }
}

bool belongs_to_reply(const ReplyParser& parser, const Tokenizer& tokenizer, std::int32_t id,
                      bool ends) {
  if (!ends && !parser.done()) return true;
  return tokenizer.is_control(id) && tokenizer.bytes(id) == "<|end_of_msg|>";
}

FinishReason finish_reason(Generation::Ending ending) {
  switch (ending) {
    case Generation::Ending::kLength:
    case Generation::Ending::kContextFull:
      return FinishReason::kLength;
    case Generation::Ending::kStopped:
      return FinishReason::kInterrupted;
    case Generation::Ending::kEndToken:
    case Generation::Ending::kSink:
      break;
  }
  return FinishReason::kStop;
}

}  // namespace k3
