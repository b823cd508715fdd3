#include "apps/eval_greedy.h"

#include <algorithm>
#include <cmath>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "apps/eval_command.h"
#include "apps/launch_main.h"
#include "apps/local_main.h"
#include "loader/parts.h"
#include "rank/fault.h"
#include "rank/tokenizer.h"

namespace k3 {
namespace {

constexpr const char* kAbout =
    R"(How often a run chooses the token that a reference chose, both greedily.

Two files (--run, --ref; one process, no model) hold texts that were written freely: each is compared
until it first differs, for what comes then follows different words. A model run here is forced along
the reference's text, token by token, and asked at every step what it would have chosen, so every step
counts; the first difference is where it would have parted, running freely. The reference is a file
(--ref), or another model's text made here first (--ref-model, --ids, -n).

A file is a log of k3run (--log, --temp 0), which holds one text and its prompt, or ids between
blanks, a text on each line; then --ids-file holds as many lines of prompts.

Prints one JSON object:
  run, ref, forced             what was compared, and whether along the reference's text
  sequences, positions         texts, and their tokens
  steps, equal, share          steps made after the same text, and those with the same choice
  wilson95                     the interval in which the true share lies with 95 % (Wilson's score)
  until_divergence             share of all positions before their text's first difference
  sequences_equal              texts without a difference, with sequences_wilson95
  first_divergence             of each text, the position from 0, or null
  divergences                  the first of them: tokens, and by how many logits the run preferred its own
)";

constexpr const char* kExamples =
    R"(  k3run --prompt 'Once upon a time' --temp 0 --log one.h5
  mpirun -n 2 k3run --prompt 'Once upon a time' --temp 0 --log two.h5
  k3eval greedy-agreement --run two.h5 --ref one.h5
  mpirun -n 4 k3eval greedy-agreement --model K3-UD-IQ1_S.gguf --ref lossless.h5
  mpirun -n 2 k3eval greedy-agreement --model a.gguf --ref-model b.gguf --ids-file prompts.ids -n 64
)";

nlohmann::ordered_json to_json(const Interval& i) { return {i.low, i.high}; }

void print_result(const std::string& run, const std::string& ref, bool forced,
                  const GreedyAgreement& a) {
  nlohmann::ordered_json j;
  j["run"] = run;
  j["ref"] = ref;
  j["forced"] = forced;
  j["sequences"] = a.n_sequence();
  j["positions"] = a.n_position();
  j["steps"] = a.n_step();
  j["equal"] = a.n_equal();
  j["share"] = a.share();
  j["wilson95"] = to_json(a.interval());
  j["until_divergence"] = a.until_divergence();
  j["sequences_equal"] = a.n_sequence_equal();
  j["sequences_wilson95"] = to_json(wilson_interval(a.n_sequence_equal(), a.n_sequence()));
  j["first_divergence"] = nlohmann::ordered_json::array();
  for (const auto& at : a.first_divergence()) {
    j["first_divergence"].push_back(at ? nlohmann::ordered_json(*at) : nullptr);
  }
  j["divergences"] = nlohmann::ordered_json::array();
  for (const Divergence& d : a.divergences()) {
    nlohmann::ordered_json one = {
        {"sequence", d.sequence}, {"position", d.position}, {"ref", d.reference}, {"run", d.run}};
    if (!std::isnan(d.margin)) one["margin"] = d.margin;
    j["divergences"].push_back(std::move(one));
  }
  write_out(j.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

void add_options(Options& o, GreedyRequest& r) {
  add_model_options(o, r.config);
  o.group("Input");
  o.text("--ref", "FILE", r.ref, "The reference: a log of k3run, or ids, a text on each line.");
  o.text("--run", "FILE", r.run, "A file to compare with it, instead of running a model.");
  o.text("--ref-model", "FILE", r.ref_model, "A model that makes the reference here.");
  o.text("--ids-file", "FILE", r.ids_file,
         "Prompts as ids, one on each line, where the reference does not hold them.");
  o.text("--ids", "IDS", r.ids_text, "One prompt on the command line: --ids '1 2 3'.");
  o.number("-n,--predict", "N", r.config.n_predict,
           "Tokens of the reference's text at most; only with --ref-model.");
  add_sequence_options(o, r.config, "as many as the longest text needs");
  add_world_options(o, r.config);
  add_log_options(o, r.config);
}

void warn(const std::vector<std::string>& lines) {
  for (const std::string& line : lines) print_line("warning: " + line);
}

void check_files(const Options& o) {
  for (const char* option : {"--model", "--ref-model", "--ids", "--ids-file", "--predict"}) {
    if (o.given(option)) {
      throw std::invalid_argument(fmt::format("{}: not with --run, which needs no model", option));
    }
  }
}

std::vector<StoredText> read_prompts(const GreedyRequest& r, const Options& o) {
  if (o.given("--ids") && o.given("--ids-file")) {
    throw std::invalid_argument("--ids and --ids-file: give one of the two");
  }
  std::vector<std::string> ignored;
  if (o.given("--ids-file")) return read_stored_texts(r.ids_file, ignored);
  if (o.given("--ids")) return {{{}, parse_ids(r.ids_text, "--ids")}};
  return {};
}

// The texts to be forced along, or for --ref-model their prompts.
void gather_texts(GreedyRequest& r, const Options& o) {
  const std::vector<StoredText> prompts = read_prompts(r, o);
  if (!r.ref_model.empty()) {
    if (prompts.empty()) throw std::invalid_argument("--ref-model: needs --ids or --ids-file");
    for (const StoredText& p : prompts) r.texts.push_back({p.ids, {}});
    return;
  }
  std::vector<std::string> warnings;
  r.texts = read_stored_texts(r.ref, warnings);
  warn(warnings);
  if (!prompts.empty() && prompts.size() != r.texts.size()) {
    throw std::invalid_argument(fmt::format("{}: {} texts, but there are {} prompts", r.ref,
                                            r.texts.size(), prompts.size()));
  }
  for (std::size_t i = 0; i < r.texts.size(); ++i) {
    if (!prompts.empty() && !r.texts[i].prompt.empty()) {
      throw std::invalid_argument(r.ref +
                                  ": holds its prompt; --ids and --ids-file do not go with it");
    }
    if (!prompts.empty()) r.texts[i].prompt = prompts[i].ids;
    if (r.texts[i].prompt.empty()) {
      throw std::invalid_argument(r.ref + ": holds no prompt, expected --ids or --ids-file");
    }
  }
}

// What can be told from the headers, of one of the two models.
void check_model(GreedyRequest& r, const RunConfig& config, const std::string& ref) {
  OpenOptions open;
  open.ignore_split_count = config.ignore_split_count;
  const ModelFile file = ModelFile::open(config.model, open);
  std::vector<std::string> inputs = part_paths(file);
  inputs.insert(inputs.end(), {r.ids_file, r.ref});
  refuse_to_replace("--log", config.log, inputs);
  std::vector<std::string> dialects;  // the engine reports them
  const ModelConfig model =
      read_model_config(file.metadata(), file.tensors(), config.model, dialects);
  for (const StoredText& t : r.texts) {
    check_ids(t.prompt, model.n_vocab, r.ids_file.empty() ? ref : r.ids_file);
    check_ids(t.ids, model.n_vocab, ref);
    const std::int64_t n =
        std::ssize(t.prompt) + (t.ids.empty() ? config.n_predict : std::ssize(t.ids)) - 1;
    const std::int64_t limit =
        config.n_ctx == 0 ? model.n_ctx : std::min(config.n_ctx, model.n_ctx);
    if (n > limit) {
      throw std::invalid_argument(
          fmt::format("{}: a text of {} positions, {} is {}", ref, n,
                      config.n_ctx > 0 ? "--ctx" : config.model + "'s limit", limit));
    }
  }
}

std::int64_t longest(const GreedyRequest& r) {
  std::int64_t n = 1;
  for (const StoredText& t : r.texts) {
    n = std::max(n,
                 std::ssize(t.prompt) + (t.ids.empty() ? r.config.n_predict : std::ssize(t.ids)));
  }
  return n;
}

void stop_if_asked(const Engine& engine, std::size_t done, std::size_t all) {
  if (!stop_asked() && !engine.stop_requested()) return;
  throw Interrupted(fmt::format("stopped on request after {} of {} texts", done, all));
}

}  // namespace

bool prepare_greedy(GreedyRequest& r, const std::vector<std::string>& args) {
  Options o({"k3eval greedy-agreement",
             "k3eval greedy-agreement --run FILE --ref FILE\n"
             "k3eval greedy-agreement [--model FILE] --ref FILE [options]\n"
             "k3eval greedy-agreement [--model FILE] --ref-model FILE --ids-file FILE [options]",
             kAbout, kExamples});
  add_options(o, r);
  switch (o.parse(args)) {
    case Options::Outcome::kHelp:
      write_out(o.help());
      return false;
    case Options::Outcome::kVersion:
      write_out(full_version_text("k3eval"));
      return false;
    case Options::Outcome::kRun:
      break;
  }
  if (r.ref.empty() == r.ref_model.empty()) {
    throw std::invalid_argument("--ref and --ref-model: give one of the two");
  }
  if (!r.run.empty()) {
    check_files(o);
    std::vector<std::string> warnings;
    r.run_texts = read_stored_texts(r.run, warnings);
    r.texts = read_stored_texts(r.ref, warnings);
    warn(warnings);
    return true;
  }
  if (o.given("--predict") && r.ref_model.empty()) {
    throw std::invalid_argument("--predict: only with --ref-model; a stored text has its length");
  }
  if (!o.given("--model")) r.config.model = default_model();
  if (!r.ref_model.empty() && r.config.n_predict < 1) {
    throw std::invalid_argument("--predict 0: a text needs a token at least");
  }
  gather_texts(r, o);
  r.config.sampler.temp = 0;
  if (r.config.n_ctx == 0) r.config.n_ctx = longest(r);
  check(r.config);
  check_model(r, r.config, r.ref.empty() ? r.ref_model : r.ref);
  if (r.ref_model.empty()) return true;
  r.other = r.config;
  r.other->model = r.ref_model;
  check_model(r, *r.other, r.ref_model);
  return true;
}

void greedy_of_files(const GreedyRequest& r) {
  if (r.run_texts.size() != r.texts.size()) {
    throw std::invalid_argument(fmt::format("{}: {} texts, but {} holds {}", r.run,
                                            r.run_texts.size(), r.ref, r.texts.size()));
  }
  GreedyAgreement a(false);
  for (std::size_t i = 0; i < r.texts.size(); ++i) {
    const StoredText &run = r.run_texts[i], &ref = r.texts[i];
    if (!run.prompt.empty() && !ref.prompt.empty() && run.prompt != ref.prompt) {
      throw std::invalid_argument(fmt::format("{}: not the prompt of {}", r.run, r.ref));
    }
    a.begin_sequence();
    for (std::size_t k = 0; k < std::min(run.ids.size(), ref.ids.size()); ++k) {
      a.add(ref.ids[k], run.ids[k]);
    }
    if (run.ids.size() != ref.ids.size()) {
      print_line(fmt::format("warning: text {}: {} and {} tokens, the shorter counts", i,
                             run.ids.size(), ref.ids.size()));
    }
  }
  print_result(r.run, r.ref, false, a);
}

void greedy_reference(GreedyRequest& r, Engine& engine) {
  const Tokenizer tokenizer(read_vocab(engine.file().metadata(), engine.config().model));
  for (std::size_t i = 0; i < r.texts.size(); ++i) {
    stop_if_asked(engine, i, r.texts.size());
    StoredText& t = r.texts[i];
    engine.reset(0);
    Decision d = engine.extend(0, t.prompt, engine.config().sampler, 0, false);
    for (std::uint64_t draw = 1;; ++draw) {
      t.ids.push_back(d.id);
      if (tokenizer.is_stop(d.id) || std::ssize(t.ids) == engine.config().n_predict) break;
      stop_if_asked(engine, i, r.texts.size());
      d = engine.extend(0, std::span(&d.id, 1), engine.config().sampler, draw, true);
    }
  }
}

void greedy_of_run(GreedyRequest& r, Engine& engine, RunLog* log) {
  GreedyAgreement a(true);
  const auto n_vocab = static_cast<std::size_t>(engine.model().n_vocab);
  std::size_t n_logged = 0;
  for (std::size_t i = 0; i < r.texts.size(); ++i) {
    stop_if_asked(engine, i, r.texts.size());
    const StoredText& t = r.texts[i];
    a.begin_sequence();
    engine.reset(0);
    // All but the prompt's last id: nobody asks what comes after those.
    const auto prompt = std::span(t.prompt).first(t.prompt.size() - 1);
    if (!prompt.empty()) engine.extend(0, prompt, engine.config().sampler, 0, false);
    std::vector<std::int32_t> forced{t.prompt.back()};
    forced.insert(forced.end(), t.ids.begin(), t.ids.end() - 1);
    std::size_t at = 0;
    engine.logits(0, forced, false, [&](std::span<const float> rows, std::int64_t n_row) {
      for (std::int64_t k = 0; k < n_row; ++k) {
        const auto row = rows.subspan(static_cast<std::size_t>(k) * n_vocab, n_vocab);
        const auto best =
            static_cast<std::int32_t>(std::max_element(row.begin(), row.end()) - row.begin());
        const std::int32_t ref = t.ids[at++];
        a.add(ref, best,
              static_cast<double>(row[static_cast<std::size_t>(best)]) -
                  static_cast<double>(row[static_cast<std::size_t>(ref)]));
      }
    });
    for (; log && n_logged < engine.timings().size(); ++n_logged) {
      log->step(RunLog::Phase::kPrefill, engine.timings()[n_logged]);
    }
  }
  print_result(r.config.model, r.ref.empty() ? r.ref_model : r.ref, true, a);
}

namespace {

class EvalGreedy : public EvalCommand {
 public:
  bool prepare(const std::vector<std::string>& args) override { return prepare_greedy(r_, args); }
  void run_files() override { greedy_of_files(r_); }
  const RunConfig& config() const override { return r_.config; }
  std::optional<RunConfig> other() const override { return r_.other; }
  void make_reference(Engine& engine) override { greedy_reference(r_, engine); }
  void run(Engine& engine, JobNotes& notes) override { greedy_of_run(r_, engine, notes.log.get()); }

 private:
  GreedyRequest r_;
};

}  // namespace

std::unique_ptr<EvalCommand> make_eval_greedy() { return std::make_unique<EvalGreedy>(); }

}  // namespace k3
