// k3eval ppl: perplexity of a text.
#include <stdexcept>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "apps/eval_command.h"
#include "apps/eval_input.h"
#include "apps/launch_main.h"
#include "apps/local_main.h"
#include "loader/parts.h"
#include "rank/fault.h"
#include "rank/perplexity.h"
#include "rank/tokenizer.h"

namespace k3 {
namespace {

constexpr const char* kPplAbout =
    R"(Perplexity of a text as llama-perplexity computes it: the text is cut into consecutive windows of
--window tokens (the rest is dropped), each evaluated from an empty state; predictions made at
positions window/2 to window-2 count. Nothing is added in front of the text. Prints one JSON object:
  ppl, error                   exp of the mean negative log likelihood, and its standard error
  mean_nll                     nats per token counted
  windows, tokens              how many were evaluated, and how many predictions counted
)";

constexpr const char* kPplExamples = R"(  k3eval ppl --file heldout.txt
  mpirun -n 4 k3eval ppl --model model.gguf --file book.txt --window 2048 --chunk 512
)";

class EvalPpl : public EvalCommand {
 public:
  bool prepare(const std::vector<std::string>& args) override {
    Options o(
        {"k3eval ppl", "k3eval ppl [--model FILE] --file FILE [options]", kPplAbout, kPplExamples});
    add_model_options(o, config_);
    o.group("Input");
    o.text("--file", "FILE", text_file_, "The text; -: standard input.");
    o.flag("--control-tokens", config_.control_tokens,
           "Recognise control tokens in the text; else they are ordinary characters.");
    o.number("--window", "N", window_, "Tokens in a window.");
    add_machine_options(o, config_, "--window");
    if (!parse_or_page(o, args)) return false;
    if (text_file_.empty()) throw std::invalid_argument("--file: not given");
    if (window_ < 4)
      throw std::invalid_argument(fmt::format("--window {}: must be at least 4", window_));
    if (!o.given("--model")) config_.model = default_model();
    if (config_.n_ctx == 0) config_.n_ctx = window_;
    check(config_);
    OpenOptions open;
    open.ignore_split_count = config_.ignore_split_count;
    const ModelFile file = ModelFile::open(config_.model, open);
    std::vector<std::string> inputs = part_paths(file);
    inputs.push_back(text_file_);
    refuse_to_replace("--log", config_.log, inputs);
    const Tokenizer tokenizer(read_vocab(file.metadata(), config_.model));
    ids_ = tokenizer.encode(read_text(text_file_), config_.control_tokens ? ControlText::kRecognised
                                                                          : ControlText::kAsText);
    if (static_cast<std::int64_t>(ids_.size()) < window_) {
      throw std::invalid_argument(
          fmt::format("{}: {} tokens, --window needs {}", text_file_, ids_.size(), window_));
    }
    return true;
  }

  const RunConfig& config() const override { return config_; }
  std::vector<std::int32_t> prompt() const override { return ids_; }

  void run(Engine& engine, JobNotes& notes) override {
    std::size_t n_logged = 0;
    const auto n_window = static_cast<std::int64_t>(ids_.size()) / window_;
    const Perplexity p = perplexity(engine, ids_, window_, [&](const Perplexity& so_far) {
      log_new_steps(notes, engine, n_logged);
      if (so_far.n_window % 16 == 0 || so_far.n_window == n_window) {
        print_line(fmt::format("window {} of {}: ppl {:.4f} +- {:.4f}", so_far.n_window, n_window,
                               so_far.value, so_far.error));
      }
      if (stop_asked() && so_far.n_window < n_window) {
        throw Interrupted(
            fmt::format("stopped on request after {} of {} windows", so_far.n_window, n_window));
      }
    });
    nlohmann::ordered_json j;
    j["model"] = config_.model;
    j["file"] = text_file_;
    j["window"] = window_;
    j["windows"] = p.n_window;
    j["tokens"] = p.n_token;
    j["mean_nll"] = p.mean_nll;
    j["ppl"] = p.value;
    j["error"] = p.error;
    write_out(j.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
  }

 private:
  RunConfig config_;
  std::string text_file_;
  std::int64_t window_ = 512;
  std::vector<std::int32_t> ids_;
};

}  // namespace

std::unique_ptr<EvalCommand> make_eval_ppl() { return std::make_unique<EvalPpl>(); }

}  // namespace k3
