// k3eval gate: a run against the exact path at given depths.
#include <algorithm>
#include <charconv>
#include <chrono>
#include <stdexcept>

#include <fmt/core.h>

#include "apps/eval_command.h"
#include "apps/eval_input.h"
#include "apps/launch_main.h"
#include "apps/local_main.h"
#include "loader/parts.h"
#include "rank/fault.h"
#include "rank/gate.h"
#include "rank/synth.h"

namespace k3 {
namespace {

constexpr const char* kAbout =
    R"(Grades a run against the exact path (--precision exact, --cache f32) of the same model, which goes
through the ids once. The run then starts over for every prefill length: it reads so many ids, and the
next --after one by one. Looked at are the prefill's last --before rows and all rows after it.
  held   each token is given the experts that the exact path chose for it, weighed by the run's own
         router: what is left is arithmetic. Graded: mean divergence from the exact path (KLD, nats), the
         share of rows with the same likeliest token (of rows inside prefills, which may be few, over all
         lengths together), and in each layer the share of experts that the router would have chosen
         otherwise, for a run that chooses by wrong numbers is right while it is held.
  free   each token chooses. Reported, and not graded.
Where a grade is missed, the exit status is 1. Prints a table on standard error, one JSON object on
standard output; --log keeps both and the divergence of every row.
)";

constexpr const char* kExamples =
    R"(  k3eval gate --synthetic k3-8l --backend cuda --precision fast --chunk 4096 --log gate.h5
  k3eval gate --model model.gguf --ids-file text.ids --cache f16 --lengths 4,64,512
)";

std::vector<std::int64_t> parse_lengths(const std::string& text) {
  std::vector<std::int64_t> out;
  const char* at = text.data();
  const char* const end = at + text.size();
  while (at != end) {
    std::int64_t n = 0;
    const auto [stop, error] = std::from_chars(at, end, n);
    if (error != std::errc() || (stop != end && (*stop != ',' || stop + 1 == end)))
      throw std::invalid_argument("--lengths " + text + ": expected numbers between commas");
    out.push_back(n);
    at = stop == end ? end : stop + 1;
  }
  return out;
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

class EvalGate : public EvalCommand {
 public:
  bool prepare(const std::vector<std::string>& args) override {
    Options o({"k3eval gate", "k3eval gate [--model FILE | --synthetic SHAPE] [options]", kAbout,
               kExamples});
    std::string lengths;
    add_input_options(o, in_);
    o.text("--ref-model", "FILE", ref_model_,
           "Another file of the same shape for the exact path. [default: the same model]");
    o.number("--ref-chunk", "N", ref_chunk_, "Of the exact path. [default: as --chunk]");
    o.group("What is looked at");
    o.text("--lengths", "N,N,...", lengths,
           "Prefill lengths, rising. [default: of 4,63,64,512,700,4096,32768 those that --ids, "
           "--ctx and "
           "the model have room for]");
    o.number("--before", "N", options_.n_before, "Rows of each prefill, its last.");
    o.number("--after", "N", options_.n_after, "Tokens decoded after each prefill.");
    o.number("--max-kld", "X", options_.max_kld, "Held: largest mean divergence, nats.");
    o.number("--min-top1", "X", options_.min_top1,
             "Held: least share of rows with the same token.");
    o.number(
        "--max-changed", "X", options_.max_changed,
        "Held: largest share of a layer's experts that its router would have chosen otherwise.");
    add_machine_options(o, in_.config, "as many as the longest prefill needs");
    if (!parse_or_page(o, args)) return false;
    if (o.given("--lengths")) options_.lengths = parse_lengths(lengths);
    check(options_);
    all_lengths_ = !o.given("--lengths");
    in_.n_seeded = [this](std::int64_t room) { return take_lengths(room); };
    read_ids(in_, o, "", ref_model_);
    check(in_.config);
    const std::int64_t needed = take_lengths(std::ssize(in_.ids));
    if (std::ssize(in_.ids) < needed)
      throw std::invalid_argument(
          fmt::format("--lengths: {} and {} tokens after it, there are {} ids",
                      options_.lengths.back(), options_.n_after, in_.ids.size()));
    in_.ids.resize(static_cast<std::size_t>(needed));
    if (!o.given("--ctx")) in_.config.n_ctx = needed;
    set_reference(o);
    return true;
  }

  const RunConfig& config() const override { return in_.config; }
  std::optional<RunConfig> other() const override { return other_; }
  std::vector<std::int32_t> prompt() const override { return in_.ids; }

  void make_reference(Engine& exact) override {
    const auto begin = std::chrono::steady_clock::now();
    reference_.emplace(gate_reference(exact, in_.ids, options_, going));
    reference_s_ = seconds_since(begin);
  }

  void run(Engine& engine, JobNotes& notes) override {
    const auto begin = std::chrono::steady_clock::now();
    const std::vector<GateRow> rows =
        gate_rows(engine, in_.ids, options_, *reference_, engine.config().threads, going);
    for (const std::string& line : gate_lines(rows)) print_line(line);
    for (const GateRow& row : rows) {
      for (const std::string& fault : gate_faults(row, options_)) {
        const std::string where =
            row.length == 0
                ? "inside all prefills"
                : fmt::format("{} a prefill of {}", row.decode ? "after" : "inside", row.length);
        if (!failed_)
          failed_ = fmt::format("gate: {}, {}: {}", row.held ? "held" : "free", where, fault);
        ++n_fault_;
      }
    }
    if (n_fault_ > 1) *failed_ += fmt::format("; and {} more", n_fault_ - 1);
    BenchRecord record = gate_record(rows, options_);
    record.text("model", engine.file().parts().front().path);
    record.text("reference",
                ref_model_.empty() ? "the exact path" : "the exact path of " + ref_model_);
    record.text("verdict", failed_ ? "failed" : "passed");
    record.number("reference_s", reference_s_);
    record.number("run_s", seconds_since(begin));
    if (notes.log) notes.log->bench(record);
    write_out(bench_json(record) + "\n");
  }
  std::optional<std::string> failed() const override { return failed_; }

 private:
  static void going(const std::string& where) {
    if (stop_asked()) throw Interrupted("stopped on request: " + where);
  }

  // Drops lengths that nobody asked for and that have no room; ids that the others need.
  std::int64_t take_lengths(std::int64_t room) {
    const std::int64_t shortest = options_.lengths.front();
    if (all_lengths_)
      std::erase_if(options_.lengths, [&](std::int64_t l) { return l + options_.n_after > room; });
    if (options_.lengths.empty())
      throw std::invalid_argument(
          fmt::format("--after {}: there are {} ids or positions, the shortest prefill is {}",
                      options_.n_after, room, shortest));
    return ids_needed(options_);
  }

  void set_reference(const Options& o) {
    other_ = in_.config;
    other_->precision = Precision::kExact;
    other_->cache = CacheType::kF32;
    other_->cache_auto = false;
    if (ref_chunk_ > 0) other_->chunk_tok = ref_chunk_;
    check(*other_);
    if (ref_model_.empty()) return;
    if (o.given("--synthetic"))
      throw std::invalid_argument("--ref-model: does not go with --synthetic");
    other_->model = ref_model_;
    const ModelConfig a = header(in_.config.model), b = header(ref_model_);
    if (a.n_vocab != b.n_vocab || a.n_layer != b.n_layer || a.n_expert != b.n_expert ||
        a.n_expert_used != b.n_expert_used)
      throw std::invalid_argument(
          fmt::format("{}: {} layers, {} of {} experts, {} tokens, {} has {}, {} of {}, {}",
                      ref_model_, b.n_layer, b.n_expert_used, b.n_expert, b.n_vocab,
                      in_.config.model, a.n_layer, a.n_expert_used, a.n_expert, a.n_vocab));
  }

  ModelConfig header(const std::string& path) const {
    OpenOptions open;
    open.ignore_split_count = in_.config.ignore_split_count;
    const ModelFile file = ModelFile::open(path, open);
    std::vector<std::string> dialects;  // the engine reports them
    return read_model_config(file.metadata(), file.tensors(), path, dialects);
  }

  EvalInput in_;
  GateOptions options_;
  bool all_lengths_ = false;
  std::string ref_model_;
  std::int64_t ref_chunk_ = 0;
  std::optional<RunConfig> other_;
  std::optional<GateReference> reference_;
  std::optional<std::string> failed_;
  int n_fault_ = 0;
  double reference_s_ = 0;
};

}  // namespace

std::unique_ptr<EvalCommand> make_eval_gate() { return std::make_unique<EvalGate>(); }

}  // namespace k3
