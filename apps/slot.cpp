#include "apps/slot.h"

#include <algorithm>
#include <iterator>
#include <regex>
#include <stdexcept>
#include <vector>

#include <fmt/core.h>

#include "rank/synth.h"

namespace k3 {
namespace {

constexpr const char* kMetrics[] = {"decode_ms", "decode_tok_s", "prefill_tok_s", "load_gb_s"};
// "+skip": SparkInfer's default, which drops routed experts of low weight past position 16384.
constexpr const char* kPeers[] = {"llama.cpp",  "sparkinfer", "sparkinfer+skip",
                                  "vllm+draft", "sglang",     "sglang+draft"};
// IQ1_S-307GiB: the file that was pruned in width.
constexpr const char* kPeerQuants[] = {"MXFP4", "IQ1_S-307GiB"};

template <class List>
bool listed(const List& list, const std::string& word) {
  return std::find(std::begin(list), std::end(list), word) != std::end(list);
}

const std::regex& node_form() {
  static const std::regex form("(\\d+)x([A-Za-z0-9]+)(-(\\d+)t)?(-part-of-(\\d+))?");
  return form;
}

std::smatch node_parts(const std::string& node) {
  std::smatch m;
  std::regex_match(node, m, node_form());
  return m;
}

}  // namespace

Slot Slot::parse(const std::string& name, bool peer) {
  std::vector<std::string> part{""};
  for (const char c : name) {
    if (c == '/')
      part.emplace_back();
    else
      part.back() += c;
  }
  const auto bad = [&](const std::string& what) {
    throw std::invalid_argument(name + ": " + what);
  };
  if (part.size() != 6) {
    bad(fmt::format("{} parts; expected node/model/quant/context/metric/engine", part.size()));
  }
  if (!std::regex_match(part[0], node_form())) bad("'" + part[0] + "' is no node");
  if (part[1].empty()) bad("no model");
  if (!listed(recipe_names(), part[2]) && !(peer && listed(kPeerQuants, part[2])))
    bad("'" + part[2] + "' is no quantization");
  if (!std::regex_match(part[3], std::regex("(p\\d+-)?d\\d+-(f32|f16|bf16|any)(-b\\d+)?|file")))
    bad("'" + part[3] + "' is no context");
  if (!listed(kMetrics, part[4])) bad("'" + part[4] + "' is no metric");
  const bool ours = std::regex_match(part[5], std::regex("k3-(exact|fast)(\\+(nccl|peer|mpi))?"));
  if (peer ? !listed(kPeers, part[5]) : !ours)
    bad("'" + part[5] + "' is not " + (peer ? "a peer's engine" : "an engine of ours"));
  return {part[0], part[1], part[2], part[3], part[4], part[5]};
}

std::string Slot::place() const {
  return node + "/" + model + "/" + quant + "/" + context + "/" + metric;
}

std::string Slot::name() const { return place() + "/" + engine; }

double Slot::devices() const {
  const std::smatch m = node_parts(node);
  return std::stod(m[1]) * (m[4].matched ? std::stod(m[4]) : 1);
}

std::string Slot::device() const {
  const std::smatch m = node_parts(node);
  return m[2].str() + (m[6].matched ? " (one rank of " + m[6].str() + ")" : "");
}

double Slot::depth() const {
  std::smatch m;
  return std::regex_search(context, m, std::regex("d(\\d+)")) ? std::stod(m[1]) : 0;
}

bool lower_is_better(const std::string& slot) {
  return slot.find("/decode_ms/") != std::string::npos;
}

double gain(double now, double before, bool lower) {
  return lower ? before / now - 1 : now / before - 1;
}

}  // namespace k3
