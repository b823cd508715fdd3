// k3plan layout: who would hold what, and how many bytes, from a model's headers alone or from a named shape.
#include <optional>
#include <stdexcept>

#include "apps/build_info.h"
#include "apps/local_main.h"
#include "apps/options.h"
#include "apps/plan_commands.h"
#include "loader/parts.h"
#include "rank/plan.h"
#include "rank/plan_report.h"
#include "rank/shapes.h"

namespace k3 {
namespace {

const char* const kAbout =
    "Cuts a model over tensor-parallel ranks and pipeline stages and prints, per rank, the heads,\n"
    "experts, widths and vocabulary rows it holds, the bytes it reads by kind of tensor, and how\n"
    "often ranks speak to each other in one forward step. Only headers of files are read; no\n"
    "device is used. Ranks may end up with empty bands: that is legal, and shown as '-'.\n"
    "\n"
    "Shapes: k3 (the real model), k3-8l, k3-16l (true widths, fewer layers), k3-nano, tiny.\n"
    "Quantizations of a shape: UD-IQ1_S, UD-Q2_K_XL, UD-Q4_K_XL, UD-Q8_K_XL, a block type for all\n"
    "matrices (F32, BF16, Q8_0, ...), or experts=TYPE,other=TYPE.\n";

const char* const kExamples =
    "  k3plan --shape k3 --quant UD-IQ1_S --tp 8\n"
    "  k3plan --model model-00001-of-00014.gguf --tp 4 --pp 2 --json > plan.json\n"
    "  k3plan --shape k3 --tp 3 --rank 2         every tensor of rank 2, with its byte ranges\n"
    "  k3plan --shape k3 --tp 5 --verify         proof that every element has one owner\n";

struct Request {
  RunConfig run;
  std::string shape;
  std::string quant = "UD-IQ1_S";
  int rank = -1;
  bool json = false;
  bool verify = false;
};

Plan make_plan(Request& q, PlanTitle& title) {
  Layout& layout = q.run.layout;
  if (layout.tp == 0) layout.tp = 1;
  std::vector<std::string> lines;
  if (!q.shape.empty()) {
    title.model = "shape " + named_shape(q.shape).name;
    title.quant = q.quant;
    const ModelOutline outline = outline_of(named_shape(q.shape), QuantRecipe::parse(q.quant));
    const auto tensors = tensors_of(outline);
    const ModelConfig c = read_model_config(metadata_of(outline), tensors, title.model, lines);
    return Plan::make(c, tensors, layout, title.model);
  }
  OpenOptions open;
  open.ignore_split_count = q.run.ignore_split_count;
  open.header_only = true;
  const ModelFile file = ModelFile::open(q.run.model, open);
  title.model = q.run.model;
  const ModelConfig c = read_model_config(file.metadata(), file.tensors(), q.run.model, lines);
  for (const std::string& w : file.warnings()) print_line("warning: " + w);
  for (const std::string& l : lines) print_line("dialect: " + l);
  return Plan::make(c, file.tensors(), layout, q.run.model);
}

int run(Request& q) {
  PlanTitle title;
  const Plan plan = make_plan(q, title);
  std::optional<int> rank;
  if (q.rank >= 0) rank = q.rank;
  if (rank && *rank >= plan.layout().world()) {
    throw std::invalid_argument("--rank " + std::to_string(*rank) + ": tp x pp gives ranks 0 to " +
                                std::to_string(plan.layout().world() - 1));
  }
  if (q.verify) plan.check_tiling();
  std::string text = q.json ? plan_json(plan, title, rank) : plan_table(plan, title, rank);
  if (q.verify && !q.json) {
    text += "\nverified: every layer is in one stage, every element of " +
            std::to_string(plan.tensors().size()) +
            " tensors has one owner or is on all ranks of its stage\n";
  }
  write_out(text);
  return 0;
}

}  // namespace

int plan_layout(const std::vector<std::string>& args) {
  Request q;
  Options options({"k3plan layout",
                   "k3plan [layout] --shape NAME [--quant RECIPE] [--tp T] [--pp M] ...\n"
                   "k3plan [layout] --model FILE [--tp T] [--pp M] ...",
                   kAbout, kExamples});
  options.group("Model");
  options.text("--model", "FILE", q.run.model, "A GGUF file; of a split model any part.");
  options.flag("--ignore-split-count", q.run.ignore_split_count,
               "Accepts a complete set of parts whose split.tensors.count is stale.");
  options.text("--shape", "NAME", q.shape, "A named shape instead of a file.");
  options.text("--quant", "RECIPE", q.quant, "Block types of the shape's tensors.");
  options.group("Ranks");
  add_layout_options(options, q.run.layout);
  options.group("Output");
  options.flag("--json", q.json, "One JSON object instead of tables.");
  options.number("--rank", "R", q.rank,
                 "Adds what rank R reads of every tensor. [default: no rank]");
  options.flag("--verify", q.verify,
               "Checks that every element has exactly one owner; fails if not.");
  switch (options.parse(args)) {
    case Options::Outcome::kHelp:
      write_out(options.help());
      return 0;
    case Options::Outcome::kVersion:
      write_out(version_text("k3plan") + "\n");
      return 0;
    case Options::Outcome::kRun:
      break;
  }
  if (q.run.model.empty() == q.shape.empty()) {
    throw std::invalid_argument("give either --model FILE or --shape NAME; k3plan layout --help");
  }
  if (q.shape.empty() && options.given("--quant")) {
    throw std::invalid_argument("--quant belongs to --shape; a file has its own types");
  }
  if (options.given("--rank") && q.rank < 0) {
    throw std::invalid_argument("--rank " + std::to_string(q.rank) + ": expected 0 or more");
  }
  return run(q);
}

}  // namespace k3
