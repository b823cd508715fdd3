#include "apps/eval_parity.h"

#include <exception>
#include <memory>
#include <stdexcept>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "apps/eval_command.h"
#include "apps/eval_input.h"
#include "apps/launch_main.h"
#include "apps/local_main.h"
#include "apps/logit_rows.h"
#include "loader/parts.h"
#include "rank/fault.h"

namespace k3 {
namespace {

constexpr const char* kParityAbout =
    R"(Holds a run against its reference at nested prefixes of a text: the first 4 ids, 8, 16 and so on up to
all of them (or to the reference's rows), each from an empty state, so that short and long steps are
both looked at. The reference is a file of raw logits, or the same model run once on the exact path.
The worst depth is graded: the share of its rows with the same likeliest token, and their mean
divergence from the reference, must both pass, or the exit status is 1. Prints one JSON object.
)";

constexpr const char* kParityExamples =
    R"(  k3eval parity --synthetic k3-8l --backend cuda --precision fast --ids-file ids.txt
  k3eval parity --model model.gguf --ids-file ids.txt --ref logits.f32 --max-kld 0.001
)";

// The reference's rows from the first, again for each depth.
class Reference {
 public:
  Reference(const ParityRequest& r, std::int64_t n_vocab)
      : rows_(r.rows), n_vocab_(static_cast<std::size_t>(n_vocab)) {
    if (!r.ref.empty()) file_ = std::make_unique<RowReader>(r.ref, n_vocab);
  }
  std::span<const float> next() {
    if (file_) return file_->next();
    return std::span(rows_).subspan(n_vocab_ * at_++, n_vocab_);
  }

 private:
  const std::vector<float>& rows_;
  std::size_t n_vocab_;
  std::size_t at_ = 0;
  std::unique_ptr<RowReader> file_;
};

LogitComparison compare_prefix(const ParityRequest& r, Engine& engine,
                               std::span<const std::int32_t> prefix) {
  const std::int64_t n_vocab = engine.model().n_vocab;
  Reference reference(r, n_vocab);
  LogitComparer comparer(n_vocab);
  // An error must not leave the ranks in the middle of a step.
  std::exception_ptr trouble;
  engine.reset(0);
  engine.logits(0, prefix, false, [&](std::span<const float> rows, std::int64_t n_row) {
    try {
      for (std::int64_t i = 0; i < n_row && !trouble; ++i) {
        comparer.add(
            rows.subspan(static_cast<std::size_t>(i * n_vocab), static_cast<std::size_t>(n_vocab)),
            reference.next());
      }
    } catch (...) {
      trouble = std::current_exception();
    }
  });
  if (trouble) std::rethrow_exception(trouble);
  return comparer.result();
}

}  // namespace

std::vector<std::int64_t> parity_depths(std::int64_t n) {
  if (n < 4) throw std::invalid_argument(fmt::format("parity: {} ids, expected at least 4", n));
  std::vector<std::int64_t> out;
  for (std::int64_t d = 4; d < n; d *= 2) out.push_back(d);
  out.push_back(n);
  return out;
}

void check_parity(const ParityRequest& r, std::int64_t n_vocab, std::vector<std::int32_t>& ids) {
  if (!(r.min_top1 >= 0 && r.min_top1 <= 1))
    throw std::invalid_argument(fmt::format("--min-top1 {}: outside 0 to 1", r.min_top1));
  if (!(r.max_kld >= 0))
    throw std::invalid_argument(fmt::format("--max-kld {}: under 0", r.max_kld));
  if (!r.ref.empty()) {
    const std::int64_t n_row = RowReader(r.ref, n_vocab).n_row();
    if (n_row > std::ssize(ids))
      throw std::invalid_argument(
          fmt::format("{}: {} rows, there are {} ids", r.ref, n_row, ids.size()));
    ids.resize(static_cast<std::size_t>(n_row));
  }
  parity_depths(std::ssize(ids));
}

void parity_reference(ParityRequest& r, Engine& engine, std::span<const std::int32_t> ids) {
  r.rows.clear();
  r.rows.reserve(ids.size() * static_cast<std::size_t>(engine.model().n_vocab));
  engine.logits(0, ids, false, [&](std::span<const float> rows, std::int64_t) {
    r.rows.insert(r.rows.end(), rows.begin(), rows.end());
  });
}

std::optional<std::string> parity_of_run(const ParityRequest& r, Engine& engine,
                                         std::span<const std::int32_t> ids,
                                         const std::function<void(std::int64_t depth)>& before) {
  nlohmann::ordered_json j;
  j["run"] = engine.file().parts().front().path;
  j["ref"] = r.ref.empty() ? "the exact path" : r.ref;
  double top1 = 1, kld = 0;
  std::int64_t top1_depth = ids.empty() ? 0 : 4, kld_depth = top1_depth;
  for (const std::int64_t depth : parity_depths(std::ssize(ids))) {
    before(depth);
    const LogitComparison c = compare_prefix(r, engine, ids.first(static_cast<std::size_t>(depth)));
    j["depths"].push_back(depth);
    j["top1"].push_back(c.top1);
    j["kld_mean"].push_back(c.kld_mean);
    j["kld_max"].push_back(c.kld_max);
    if (c.top1 < top1) top1 = c.top1, top1_depth = depth;
    // Written so that a NaN is the worst.
    if (!(c.kld_mean <= kld)) kld = c.kld_mean, kld_depth = depth;
  }
  const bool pass = top1 >= r.min_top1 && kld <= r.max_kld;
  j["worst_top1"] = top1;
  j["worst_top1_depth"] = top1_depth;
  j["worst_kld_mean"] = kld;
  j["worst_kld_mean_depth"] = kld_depth;
  j["min_top1"] = r.min_top1;
  j["max_kld"] = r.max_kld;
  j["pass"] = pass;
  write_out(j.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
  if (pass) return std::nullopt;
  return fmt::format(
      "parity: worst top-1 {:.4f} at depth {} (expected {} at least), worst KLD {:.4g} at depth {} "
      "(expected {} at most)",
      top1, top1_depth, r.min_top1, kld, kld_depth, r.max_kld);
}

namespace {

class EvalParity : public EvalCommand {
 public:
  bool prepare(const std::vector<std::string>& args) override {
    Options o({"k3eval parity",
               "k3eval parity [--model FILE] (--ids-file FILE | --ids IDS) [--ref FILE] [options]",
               kParityAbout, kParityExamples});
    add_input_options(o, in_);
    o.text(
        "--ref", "FILE", r_.ref,
        "Reference logits, one row an id. [default: the exact path of the same model, run first]");
    o.number("--min-top1", "X", r_.min_top1, "Least share of rows with the same token.");
    o.number("--max-kld", "X", r_.max_kld, "Largest mean divergence, nats.");
    add_machine_options(o, in_.config, kAllIds);
    if (!parse_or_page(o, args)) return false;
    read_ids(in_, o, "", r_.ref);
    check(in_.config);
    check_parity(r_, in_.n_vocab, in_.ids);
    if (!r_.ref.empty()) return true;
    r_.other = in_.config;
    r_.other->precision = Precision::kExact;
    return true;
  }

  const RunConfig& config() const override { return in_.config; }
  std::optional<RunConfig> other() const override { return r_.other; }
  void make_reference(Engine& engine) override { parity_reference(r_, engine, in_.ids); }
  std::vector<std::int32_t> prompt() const override { return in_.ids; }

  void run(Engine& engine, JobNotes&) override {
    failed_ = parity_of_run(r_, engine, in_.ids, [](std::int64_t depth) {
      if (stop_asked()) throw Interrupted(fmt::format("stopped on request at depth {}", depth));
    });
  }
  std::optional<std::string> failed() const override { return failed_; }

 private:
  EvalInput in_;
  ParityRequest r_;
  std::optional<std::string> failed_;
};

}  // namespace

std::unique_ptr<EvalCommand> make_eval_parity() { return std::make_unique<EvalParity>(); }

}  // namespace k3
