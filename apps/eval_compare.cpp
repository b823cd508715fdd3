// k3eval compare: how far logits lie from reference logits.
#include <stdexcept>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "apps/eval_command.h"
#include "apps/eval_input.h"
#include "apps/local_main.h"
#include "apps/logit_rows.h"

namespace k3 {
namespace {

constexpr const char* kCompareAbout =
    R"(Compares logits with reference logits: either two files (one process, no model), or a model run here
against a file. Files hold raw little-endian 32-bit floats, rows of the vocabulary's size. Prints one
JSON object:
  rows, vocab                  what was compared
  kld_mean, _median, _max      divergence of the run from the reference, nats: sum p log(p/q), p the
                               reference
  top1                         share of rows with the same likeliest token
  top1_decided, rows_decided   the same over rows that the reference decides by more than --margin-tol
  top5                         mean share of the reference's five likeliest among the run's five
  max_abs, max_rel             largest difference of two logits; and over the row's largest logit
  kld_max_row, max_abs_row     where, from 0
)";

constexpr const char* kCompareExamples = R"(  k3eval compare --run x.f32 --ref y.f32 --vocab 163840
  mpirun -n 2 k3eval compare --model model.gguf --ids-file ids.txt --ref y.f32 --margin-tol 0.01
)";

struct CompareRequest {
  EvalInput in;
  std::string run, ref, positions_text;
  double margin_tol = 0;
  std::vector<std::int32_t>
      positions;  // of the run's rows, one for each row of the reference; empty: all
};

RowComparer comparer_of(const CompareRequest& r, std::int64_t n_vocab, std::int64_t n_run_row) {
  return {r.ref, n_vocab, n_run_row, r.margin_tol, r.positions};
}

void print_json(const CompareRequest& request, const LogitComparison& c) {
  nlohmann::ordered_json j;
  j["run"] = request.run.empty() ? request.in.config.model : request.run;
  j["ref"] = request.ref;
  j["rows"] = c.n_row;
  j["vocab"] = c.n_vocab;
  j["kld_mean"] = c.kld_mean;
  j["kld_median"] = c.kld_median;
  j["kld_max"] = c.kld_max;
  j["kld_max_row"] = c.kld_max_row;
  j["top1"] = c.top1;
  j["top1_decided"] = c.top1_decided;
  j["rows_decided"] = c.n_decided;
  j["margin_tol"] = request.margin_tol;
  j["top5"] = c.top5;
  j["max_abs"] = c.max_abs;
  j["max_rel"] = c.max_rel;
  j["max_abs_row"] = c.max_abs_row;
  // Paths may hold any bytes; a JSON string may not.
  const std::string text = j.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  write_out(text);
}

Options compare_options(CompareRequest& r) {
  Options o({"k3eval compare",
             "k3eval compare --run FILE --ref FILE --vocab N [options]\n"
             "k3eval compare [--model FILE] (--ids-file FILE | --ids IDS) --ref FILE [options]",
             kCompareAbout, kCompareExamples});
  add_input_options(o, r.in);
  o.text("--run", "FILE", r.run, "Logits to compare, instead of running a model.");
  o.text("--ref", "FILE", r.ref, "Reference logits.");
  o.number("--vocab", "N", r.in.n_vocab,
           "Floats in a row; only with --run. [default: the model's]");
  o.text("--positions", "IDS", r.positions_text,
         "Positions of the run, rising from 0, that the rows of the reference belong to. [default: "
         "all]");
  o.number("--margin-tol", "X", r.margin_tol,
           "Rows whose two largest reference logits lie no further apart do not count for "
           "top1_decided.");
  add_machine_options(o, r.in.config, kAllIds);
  return o;
}

void check_compare(CompareRequest& r, const Options& o) {
  if (r.ref.empty()) throw std::invalid_argument("--ref: not given");
  if (!(r.margin_tol >= 0))
    throw std::invalid_argument(fmt::format("--margin-tol {}: under 0", r.margin_tol));
  if (o.given("--positions")) r.positions = parse_ids(r.positions_text, "--positions");
  if (r.run.empty()) {
    if (o.given("--vocab"))
      throw std::invalid_argument("--vocab: only with --run; a model knows its own");
    read_ids(r.in, o, "", r.ref);
    check(r.in.config);
    comparer_of(r, r.in.n_vocab, std::ssize(r.in.ids));  // does the reference fit?
    return;
  }
  if (o.given("--model") || o.given("--ids") || o.given("--ids-file")) {
    throw std::invalid_argument(
        "--run: its logits are compared; --model, --ids and --ids-file do not go with it");
  }
  constexpr std::int64_t kMaxVocab = std::int64_t{1} << 30;  // a row's bytes stay far from overflow
  if (r.in.n_vocab < 1 || r.in.n_vocab > kMaxVocab) {
    throw std::invalid_argument(
        fmt::format("--vocab {}: must be given, from 1 to {}", r.in.n_vocab, kMaxVocab));
  }
}

class EvalCompare : public EvalCommand {
 public:
  bool prepare(const std::vector<std::string>& args) override {
    Options o = compare_options(r_);
    if (!parse_or_page(o, args)) return false;
    check_compare(r_, o);
    return true;
  }
  const RunConfig& config() const override { return r_.in.config; }
  std::vector<std::int32_t> prompt() const override { return r_.in.ids; }

  void run_files() override {
    RowReader run(r_.run, r_.in.n_vocab);
    RowComparer comparer = comparer_of(r_, r_.in.n_vocab, run.n_row());
    for (std::int64_t i = 0; i < run.n_row(); ++i) comparer.add(run.next());
    print_json(r_, comparer.result());
  }

  void run(Engine& engine, JobNotes& notes) override {
    const std::int64_t n_vocab = engine.model().n_vocab;
    RowComparer comparer = comparer_of(r_, n_vocab, std::ssize(r_.in.ids));
    run_ids(r_.in.ids, engine, notes, [&](std::span<const float> rows, std::int64_t n_row) {
      for (std::int64_t i = 0; i < n_row; ++i) {
        comparer.add(
            rows.subspan(static_cast<std::size_t>(i * n_vocab), static_cast<std::size_t>(n_vocab)));
      }
    });
    print_json(r_, comparer.result());
  }

 private:
  CompareRequest r_;
};

}  // namespace

std::unique_ptr<EvalCommand> make_eval_compare() { return std::make_unique<EvalCompare>(); }

}  // namespace k3
