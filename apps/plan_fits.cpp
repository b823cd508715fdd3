// k3plan fits: which published files are fully resident on which node, at which context, and how fast it could be at most.
#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <system_error>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "apps/build_info.h"
#include "apps/local_main.h"
#include "apps/options.h"
#include "apps/plan_commands.h"
#include "loader/parts.h"
#include "rank/fits.h"

namespace k3 {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr double kGiB = 1024.0 * 1024 * 1024;

const char* const kAbout =
    "Says whether a model is fully resident on a node's devices at a context: weights, cache, KDA\n"
    "state and work memory of the rank that needs most, against what a device has to give. Names\n"
    "the largest context that fits, and the walls that bandwidth and FLOP/s set to decoding and "
    "to\n"
    "prefill: bounds of any program, not predictions of this one. No device and no weights "
    "needed.\n"
    "\n"
    "Nodes are the files of launch/nodes, where every figure carries its source: copy one for a\n"
    "node of your own. With --quant or --model the answer is also the exit code: 0 fits, 2 does "
    "not.\n";

const char* const kExamples =
    "  k3plan fits                                  every published file on 8x H200 at 1M\n"
    "  k3plan fits --node gb10x3 --quant Neuron-IQ1_S --ctx 8192\n"
    "  k3plan fits --node all --quant UD-IQ1_S      one file on every node\n"
    "  k3plan fits --node ./mine.json --model model-00001-of-00014.gguf --json\n";

struct Request {
  RunConfig run;
  FitsRequest fits;
  std::string node = "h200x8";
  std::string quant;
  bool json = false;
};

struct Row {
  NodeProfile node;
  SizedModel model;
  FitsRequest request;
  Fits fits;
  bool resident_on_cuda = false;  // as the CUDA kernels lay the weights out
  double cuda_total = 0;
};

std::string read_text(const fs::path& path) {
  std::ifstream in(path);
  std::stringstream text;
  if (in) text << in.rdbuf();
  if (!in) throw std::system_error(errno, std::generic_category(), path.string());
  return text.str();
}

std::vector<std::string> node_names() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(K3_NODE_DIR)) {
    if (entry.path().extension() == ".json") names.push_back(entry.path().stem().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

// By name, or by path where it looks like one.
NodeProfile read_node(const std::string& node) {
  const bool is_path = node.find('/') != std::string::npos || node.ends_with(".json");
  const fs::path path = is_path ? fs::path(node) : fs::path(K3_NODE_DIR) / (node + ".json");
  if (!is_path && !fs::exists(path)) {
    throw std::invalid_argument(
        fmt::format("--node {}: valid: all, {}, or a file (see launch/nodes)", node,
                    fmt::join(node_names(), ", ")));
  }
  return parse_node_profile(read_text(path), path.string());
}

std::vector<NodeProfile> nodes_of(const Request& q) {
  std::vector<NodeProfile> out;
  if (q.node != "all") return {read_node(q.node)};
  for (const std::string& name : node_names()) out.push_back(read_node(name));
  return out;
}

SizedModel model_of_file(const RunConfig& run) {
  OpenOptions open;
  open.ignore_split_count = run.ignore_split_count;
  open.header_only = true;
  const ModelFile file = ModelFile::open(run.model, open);
  SizedModel m;
  m.name = fs::path(run.model).filename().string();
  std::vector<std::string> lines;
  m.config = read_model_config(file.metadata(), file.tensors(), run.model, lines);
  m.tensors = file.tensors();
  for (const std::string& w : file.warnings()) print_line("warning: " + w);
  return m;
}

std::vector<SizedModel> models_of(const Request& q) {
  if (!q.run.model.empty()) return {model_of_file(q.run)};
  if (!q.quant.empty()) return {sized_model(published_file(q.quant))};
  std::vector<SizedModel> out;
  for (const PublishedFile& f : published_files()) out.push_back(sized_model(f));
  return out;
}

Row row_of(const NodeProfile& node, const SizedModel& model, FitsRequest request) {
  Layout& l = request.layout;
  if (l.tp == 0) {
    if (node.devices % l.pp != 0)
      throw std::invalid_argument(fmt::format("--pp {}: does not divide the {} devices of {}", l.pp,
                                              node.devices, node.name));
    l.tp = node.devices / l.pp;
  }
  if (request.state.n_ctx == 0) request.state.n_ctx = model.config.n_ctx;
  Row r{node, model, request, fits(model, node, request), false, 0};
  request.placement = Placement::kCuda;
  const Fits cuda = request.placement == r.request.placement ? r.fits : fits(model, node, request);
  r.resident_on_cuda = cuda.resident;
  r.cuda_total = cuda.worst.total();
  return r;
}

std::string node_lines(const NodeProfile& n) {
  const auto best = [](const Figure& plain, const std::optional<Figure>& measured) {
    return measured ? fmt::format("{:.0f} ({}; {} {:.0f})", measured->value, measured->basis,
                                  plain.basis, plain.value)
                    : fmt::format("{:.0f} ({})", plain.value, plain.basis);
  };
  return fmt::format(
      "{}: {} x {}, {} host{}\n  memory {:.1f} GiB a device ({}), less {:.1f} ({}); reads GB/s {}; "
      "bf16 TFLOP/s {}; link {:.0f} GB/s\n",
      n.name, n.devices, n.device, n.hosts, n.hosts == 1 ? "" : "s", n.memory_gib.value,
      n.memory_gib.basis, n.reserve_gib.value, n.reserve_gib.basis,
      best(n.read_gb_s, n.read_measured_gb_s), best(n.bf16_tflops, n.bf16_measured_tflops),
      n.link_gb_s.value);
}

std::string cells(const std::vector<std::string>& row) {
  constexpr int kWidths[] = {8, 14, 9, 9, 7, 6, 6, 7, 8, 9, 8, 9, 15, 7, 9};
  std::string line;
  for (std::size_t i = 0; i < row.size(); ++i)
    line += i < 2 ? fmt::format("{:<{}}", row[i], kWidths[i])
                  : fmt::format("{:>{}}", row[i], kWidths[i]);
  line.erase(line.find_last_not_of(' ') + 1);
  return line + "\n";
}

std::string gib(double bytes) { return fmt::format("{:.1f}", bytes / kGiB); }

std::string table(const std::vector<Row>& rows) {
  std::string out =
      "GiB; of the device that needs most\n" +
      cells({"node", "model", "tensors", "weights", "cache", "KDA", "work", "total", "budget",
             "verdict", "groups", "max ctx", "decode ms", "+sums", "prefill"});
  for (const Row& r : rows) {
    const Fits& f = r.fits;
    out +=
        cells({r.node.name, r.model.name, gib(f.file_bytes), gib(f.worst.weights),
               gib(f.worst.cache), gib(f.worst.kda_state), gib(f.worst.work), gib(f.worst.total()),
               gib(f.budget), f.resident ? "fits" : "NO", std::to_string(f.expert_groups),
               f.largest_ctx > 0 ? std::to_string(f.largest_ctx) : "none",
               fmt::format("{:.2f}-{:.2f}", f.decode_ms, f.decode_ms_at_ctx),
               f.collective_ms ? fmt::format("{:.2f}", *f.collective_ms) : "?",
               fmt::format("{:.0f}", f.prefill_tok_s)});
  }
  return out;
}

std::string notes(const std::vector<Row>& rows) {
  std::string out;
  std::vector<std::string> said;
  for (const Row& r : rows) {
    if (!r.model.caveat.empty() &&
        std::find(said.begin(), said.end(), r.model.name) == said.end()) {
      out += fmt::format("note: {}: {}\n", r.model.name, r.model.caveat);
      said.push_back(r.model.name);
    }
    if (r.fits.resident && !r.resident_on_cuda) {
      out += fmt::format(
          "note: {}: {} fits byte for byte as in the file, but as this build's CUDA kernels lay "
          "weights out it takes {} GiB a "
          "device: --weights-as cuda judges by that\n",
          r.node.name, r.model.name, gib(r.cuda_total));
    }
  }
  return out;
}

Json figure_json(const Figure& f) {
  return {{"value", f.value}, {"basis", f.basis}, {"source", f.source}};
}

Json row_json(const Row& r) {
  const Fits& f = r.fits;
  Json j{{"node", r.node.name},
         {"device", r.node.device},
         {"devices", r.node.devices},
         {"model", r.model.name},
         {"caveat", r.model.caveat},
         {"tp", r.request.layout.tp},
         {"pp", r.request.layout.pp},
         {"expert_groups", f.expert_groups},
         {"ctx", r.request.state.n_ctx},
         {"slots", r.request.state.n_slot},
         {"chunk", r.request.chunk_tok},
         {"tensor_bytes", f.file_bytes},
         {"weight_bytes", f.worst.weights},
         {"cache_bytes", f.worst.cache},
         {"kda_state_bytes", f.worst.kda_state},
         {"work_bytes", f.worst.work},
         {"need_bytes", f.worst.total()},
         {"need_bytes_as_cuda_lays_out", r.cuda_total},
         {"budget_bytes", f.budget},
         {"resident", f.resident},
         {"resident_as_cuda_lays_out", r.resident_on_cuda},
         {"largest_ctx", f.largest_ctx},
         {"decode_wall_ms", f.decode_ms},
         {"decode_wall_ms_at_ctx", f.decode_ms_at_ctx},
         {"prefill_wall_tok_s", f.prefill_tok_s},
         {"prompt", r.request.prompt_tok},
         {"read_gb_s", figure_json(r.node.read_measured_gb_s.value_or(r.node.read_gb_s))},
         {"bf16_tflops", figure_json(r.node.bf16_measured_tflops.value_or(r.node.bf16_tflops))}};
  j["collective_wall_ms"] = f.collective_ms ? Json(*f.collective_ms) : Json();
  return j;
}

std::string text_of(const Request& q, const std::vector<Row>& rows) {
  if (q.json) {
    Json all = Json::array();
    for (const Row& r : rows) all.push_back(row_json(r));
    return all.dump(2) + "\n";
  }
  std::string out;
  std::string last;
  for (const Row& r : rows) {
    if (r.node.name != last) out += node_lines(r.node);
    last = r.node.name;
  }
  const FitsRequest& f = rows.front().request;
  out += fmt::format(
      "context {}, {} slot{}, steps of {}; weights {}; walls: decode of an empty and of a full "
      "cache, its collectives at the "
      "link's latency, prefill of {} tokens (tok/s)\n\n",
      f.state.n_ctx, f.state.n_slot, f.state.n_slot == 1 ? "" : "s", f.chunk_tok,
      f.placement == Placement::kFile ? "as in the file" : "as the CUDA kernels lay them out",
      f.prompt_tok);
  return out + table(rows) + notes(rows);
}

int run(const Request& q) {
  std::vector<Row> rows;
  const std::vector<SizedModel> models = models_of(q);
  for (const NodeProfile& n : nodes_of(q)) {
    for (const SizedModel& m : models) rows.push_back(row_of(n, m, q.fits));
  }
  write_out(text_of(q, rows));
  const bool asked_one = rows.size() == 1 && (!q.quant.empty() || !q.run.model.empty());
  const Row& r = rows.front();
  if (asked_one && !r.fits.resident)
    throw std::invalid_argument(refusal_line(r.model, r.node, r.request, r.fits));
  return 0;
}

void check(const Request& q) {
  const auto within = [](const char* name, std::int64_t v, std::int64_t low, std::int64_t high) {
    if (v < low || v > high)
      throw std::invalid_argument(fmt::format("{} {}: valid: {} to {}", name, v, low, high));
  };
  within("--ctx", q.fits.state.n_ctx, 0, std::int64_t{1} << 31);
  within("--chunk", q.fits.chunk_tok, 1, 65536);
  within("--slots", q.fits.state.n_slot, 1, 4096);
  within("--prompt", q.fits.prompt_tok, 1, std::int64_t{1} << 24);
  within("--pp", q.fits.layout.pp, 1, 4096);
  within("--tp", q.fits.layout.tp, 0, 4096);
  if (!q.quant.empty() && !q.run.model.empty())
    throw std::invalid_argument("give --quant NAME or --model FILE, not both");
}

}  // namespace

int plan_fits(const std::vector<std::string>& args) {
  Request q;
  q.fits.layout.tp = 0;
  Options options({"k3plan fits",
                   "k3plan fits [--node NAME|FILE|all] [--quant NAME | --model FILE] ...", kAbout,
                   kExamples});
  options.group("Node and model");
  options.text("--node", "NAME", q.node, "A node of launch/nodes, a file of that kind, or all.");
  options.text("--quant", "NAME", q.quant, "A published file. [default: all of them]");
  options.text("--model", "FILE", q.run.model, "A GGUF file instead; of a split model any part.");
  options.flag("--ignore-split-count", q.run.ignore_split_count,
               "Accepts a complete set of parts whose split.tensors.count is stale.");
  options.group("What it shall hold");
  options.number("--ctx", "N", q.fits.state.n_ctx,
                 "Positions of each sequence. [default: the model's limit]");
  options.number("--slots", "N", q.fits.state.n_slot, "Sequences held at once.");
  options.choice(
      "--cache", {"f16", "f32"}, 0,
      [&](std::size_t i) { q.fits.state.cache = i == 0 ? CacheType::kF16 : CacheType::kF32; },
      "Type of the latent cache.");
  options.number("--chunk", "N", q.fits.chunk_tok, "Prompt tokens of a prefill step.");
  options.number("--prompt", "N", q.fits.prompt_tok, "Tokens of the prompt of the prefill wall.");
  options.choice(
      "--weights-as", {"file", "cuda"}, 0,
      [&](std::size_t i) { q.fits.placement = i == 0 ? Placement::kFile : Placement::kCuda; },
      "Bytes of weights: as in the file, or as the CUDA kernels of this build lay them out.");
  options.group("Ranks");
  add_layout_options(options, q.fits.layout);
  options.group("Output");
  options.flag("--json", q.json, "One JSON array instead of a table.");
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
  check(q);
  return run(q);
}

}  // namespace k3
