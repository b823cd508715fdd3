#include "apps/eval_input.h"

#include <algorithm>
#include <exception>
#include <stdexcept>

#include <fmt/core.h>

#include "apps/launch_main.h"
#include "apps/local_main.h"
#include "loader/parts.h"
#include "rank/bench_math.h"
#include "rank/fault.h"
#include "rank/synth.h"

namespace k3 {

void add_input_options(Options& o, EvalInput& r) {
  add_model_options(o, r.config);
  o.text("--synthetic", "SHAPE", r.config.synthetic,
         "Instead of a file: weights of this shape, made on the devices, as k3bench has them.");
  o.group("Input");
  o.text("--ids-file", "FILE", r.ids_file,
         "Token ids, separated by blanks or line ends; -: standard input.");
  o.text("--ids", "IDS", r.ids_text, "The same on the command line: --ids '1 2 3'.");
}

void add_machine_options(Options& o, RunConfig& config, const std::string& ctx_default) {
  add_sequence_options(o, config, ctx_default);
  add_world_options(o, config);
  add_log_options(o, config);
}

bool parse_or_page(Options& o, const std::vector<std::string>& args) {
  const Options::Outcome outcome = o.parse(args);
  if (outcome == Options::Outcome::kHelp) write_out(o.help());
  if (outcome == Options::Outcome::kVersion) write_out(full_version_text("k3eval"));
  return outcome == Options::Outcome::kRun;
}

void read_ids(EvalInput& r, const Options& o, const std::string& output,
              const std::string& other_input) {
  const bool given = o.given("--ids") || o.given("--ids-file");
  if (o.given("--ids") == o.given("--ids-file") && (given || !r.n_seeded)) {
    throw std::invalid_argument("--ids and --ids-file: give one of the two");
  }
  const bool inline_ids = o.given("--ids");
  const std::string where = !given              ? "seeded ids"
                            : inline_ids        ? "--ids"
                            : r.ids_file == "-" ? "standard input"
                                                : r.ids_file;
  if (given) r.ids = parse_ids(inline_ids ? r.ids_text : read_text(r.ids_file), where);
  const bool synthetic = o.given("--synthetic");
  if (synthetic && o.given("--model"))
    throw std::invalid_argument("--model and --synthetic: give one of the two");
  if (!synthetic && !o.given("--model")) r.config.model = default_model();
  OpenOptions open;
  open.ignore_split_count = r.config.ignore_split_count;
  const ModelFile file = synthetic ? synthetic_outline(r.config.synthetic, r.config.synthetic_seed)
                                   : ModelFile::open(r.config.model, open);
  std::vector<std::string> inputs = part_paths(file);
  inputs.insert(inputs.end(), {r.ids_file, other_input});
  refuse_to_replace("--out", output, inputs);
  refuse_to_replace("--log", r.config.log, inputs);
  std::vector<std::string> dialects;  // the engine reports them
  const ModelConfig model =
      read_model_config(file.metadata(), file.tensors(), r.config.model, dialects);
  if (!given) {
    const std::int64_t room =
        r.config.n_ctx > 0 ? std::min(r.config.n_ctx, model.n_ctx) : model.n_ctx;
    r.ids = seeded_ids(r.n_seeded(room), model.n_vocab, r.config.synthetic_seed);
  }
  check_ids(r.ids, model.n_vocab, where);
  r.n_vocab = model.n_vocab;
  const auto n = static_cast<std::int64_t>(r.ids.size());
  if (r.config.n_ctx == 0) r.config.n_ctx = n;
  const std::int64_t limit = std::min(r.config.n_ctx, model.n_ctx);
  if (n > limit) {
    throw std::invalid_argument(
        fmt::format("{}: {} ids, {} is {}", where, n,
                    r.config.n_ctx < model.n_ctx ? "--ctx" : "the model's limit", limit));
  }
}

void log_new_steps(JobNotes& notes, const Engine& engine, std::size_t& n_logged) {
  for (; notes.log && n_logged < engine.timings().size(); ++n_logged) {
    notes.log->step(RunLog::Phase::kPrefill, engine.timings()[n_logged]);
  }
}

void run_ids(std::span<const std::int32_t> ids, Engine& engine, JobNotes& notes,
             const RowSink& sink) {
  // Between two pieces of a step the other ranks wait in the middle of it: an error of the sink is kept until the step
  // has ended and is thrown from there.
  std::exception_ptr trouble;
  std::size_t n_logged = 0;
  engine.reset(0);
  engine.logits(
      0, ids, false,
      [&](std::span<const float> rows, std::int64_t n_row) {
        if (trouble) return;
        try {
          sink(rows, n_row);
        } catch (...) {
          trouble = std::current_exception();
        }
      },
      [&](const Progress& p) {
        notes.show(p);
        log_new_steps(notes, engine, n_logged);
        if (trouble) std::rethrow_exception(trouble);
        if (stop_asked() && p.done < p.total) {
          throw Interrupted(
              fmt::format("stopped on request after {} of {} tokens", p.done, p.total));
        }
      });
}

}  // namespace k3
