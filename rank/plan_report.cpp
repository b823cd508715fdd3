#include "rank/plan_report.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <vector>

namespace k3 {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kGiB = 1024.0 * 1024 * 1024;
constexpr double kMiB = 1024.0 * 1024;

constexpr auto kClasses = static_cast<std::size_t>(TensorClass::kCount);

const char* policy_name(ShardPolicy p) { return p == ShardPolicy::kFull ? "full" : "experts-only"; }

// The first layer of each kind that a rank's stage has; -1: none.
struct FirstLayers {
  int kda = -1;
  int mla = -1;
  int moe = -1;
  int dense = -1;
};

FirstLayers first_layers(const Plan& plan, int rank) {
  FirstLayers f;
  const Band b = plan.layers(rank);
  for (auto il = static_cast<int>(b.end) - 1; il >= b.begin; --il) {
    const LayerConfig& l = plan.config().layers[static_cast<std::size_t>(il)];
    (l.is_mla ? f.mla : f.kda) = il;
    (l.is_dense ? f.dense : f.moe) = il;
  }
  return f;
}

// Every band of a rank that does not depend on more than the layer's kind.
std::vector<std::pair<const char*, Band>> bands_of(const Plan& plan, int rank) {
  const FirstLayers f = first_layers(plan, rank);
  const auto if_any = [&](int layer, Band (Plan::*band)(int, int) const) {
    return layer < 0 ? Band{} : (plan.*band)(rank, layer);
  };
  return {{"layers", plan.layers(rank)},
          {"kda_heads", if_any(f.kda, &Plan::heads)},
          {"mla_heads", if_any(f.mla, &Plan::heads)},
          {"experts", if_any(f.moe, &Plan::experts)},
          {"expert_ffn", if_any(f.moe, &Plan::expert_ffn)},
          {"shared_ffn", if_any(f.moe, &Plan::shared_ffn)},
          {"dense_ffn", if_any(f.dense, &Plan::dense_ffn)},
          {"router_rows", if_any(f.moe, &Plan::router_rows)},
          {"latent_rows", if_any(f.moe, &Plan::latent_rows)},
          {"latent_columns", if_any(f.moe, &Plan::latent_columns)},
          {"vocab_in", plan.vocab_in(rank)},
          {"vocab_out", plan.vocab_out(rank)}};
}

std::string size_text(std::uint64_t bytes) {
  const auto n = static_cast<double>(bytes);
  return n >= kGiB ? fmt::format("{:.1f} GiB", n / kGiB) : fmt::format("{:.1f} MiB", n / kMiB);
}

std::string text(const Band& b) {
  return b.empty() ? std::string("-") : fmt::format("{}-{}", b.begin, b.end - 1);
}

std::string text(const PlannedTensor& t) {
  return fmt::format("{}x{}x{}", t.dims[0], t.dims[1], t.dims[2]);
}

std::string text(const Box& b) {
  return fmt::format("[{},{}) [{},{}) [{},{})", b.axis[0].begin, b.axis[0].end, b.axis[1].begin,
                     b.axis[1].end, b.axis[2].begin, b.axis[2].end);
}

// "at 1024: 8 x (3072 runs of 34 every 272) every 835584"
std::string text(const ByteRuns& r) {
  std::string runs = r.n_run == 1
                         ? fmt::format("{} bytes", r.bytes)
                         : fmt::format("{} runs of {} bytes every {}", r.n_run, r.bytes, r.stride);
  if (r.n_matrix > 1) runs = fmt::format("{} x ({}) every {}", r.n_matrix, runs, r.matrix_stride);
  return fmt::format("at {}: {}", r.begin, runs);
}

// Columns as wide as their widest cell, right-aligned but for the first.
std::string table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<std::size_t> width;
  for (const auto& row : rows) {
    width.resize(std::max(width.size(), row.size()));
    for (std::size_t i = 0; i < row.size(); ++i) width[i] = std::max(width[i], row[i].size());
  }
  std::string out;
  for (const auto& row : rows) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) {
      line += i == 0 ? fmt::format("{:<{}}", row[i], width[i])
                     : fmt::format("  {:>{}}", row[i], width[i]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  }
  return out;
}

std::uint64_t stored_total(const Plan& plan) {
  std::uint64_t sum = 0;
  for (const PlannedTensor& t : plan.tensors()) sum += plan.stored_bytes(t);
  return sum;
}

std::size_t file_tensors(const Plan& plan) {
  std::size_t n = 0;
  for (const PlannedTensor& t : plan.tensors()) n += t.name2.empty() ? 1 : 2;
  return n;
}

std::string head_lines(const Plan& plan, const PlanTitle& title) {
  const ModelConfig& c = plan.config();
  const Layout& l = plan.layout();
  std::string out = title.model;
  if (!title.quant.empty()) out += ", " + title.quant;
  out += fmt::format(": {} tensors, {}; {} layers, {} heads, {} experts ({} used)\n",
                     file_tensors(plan), size_text(stored_total(plan)), c.n_layer, c.n_head,
                     c.n_expert, c.n_expert_used);
  out += fmt::format(
      "tp {} x pp {}, policy {}, expert groups {} (each expert's width in {} bands)\n", l.tp, l.pp,
      policy_name(l.policy), plan.expert_groups(), l.tp / plan.expert_groups());
  for (const std::string& d : plan.dialects()) out += "dialect: " + d + "\n";
  return out;
}

std::string band_table(const Plan& plan) {
  std::vector<std::vector<std::string>> rows;
  for (int rank = 0; rank < plan.layout().world(); ++rank) {
    const auto bands = bands_of(plan, rank);
    if (rows.empty()) {
      rows.push_back({"rank"});
      for (const auto& [name, band] : bands) rows[0].emplace_back(name);
    }
    rows.push_back({std::to_string(rank)});
    for (const auto& [name, band] : bands) rows.back().push_back(text(band));
  }
  return table(rows);
}

std::string byte_table(const Plan& plan) {
  std::vector<std::vector<std::string>> rows{{"rank"}};
  for (std::size_t c = 0; c < kClasses; ++c) {
    rows[0].emplace_back(class_name(static_cast<TensorClass>(c)));
  }
  rows[0].insert(rows[0].end(), {"total", "premium"});
  const auto mib = [](std::uint64_t bytes) {
    return fmt::format("{:.1f}", static_cast<double>(bytes) / kMiB);
  };
  std::uint64_t total = 0, most = 0, premium = 0;
  for (int rank = 0; rank < plan.layout().world(); ++rank) {
    const RankCost cost = rank_cost(plan, rank);
    rows.push_back({std::to_string(rank)});
    for (const std::uint64_t b : cost.bytes) rows.back().push_back(mib(b));
    rows.back().push_back(mib(cost.total));
    rows.back().push_back(mib(cost.premium));
    total += cost.total;
    premium += cost.premium;
    most = std::max(most, cost.total);
  }
  const double mean = static_cast<double>(total) / plan.layout().world();
  return table(rows) +
         fmt::format("all ranks {}, busiest {} ({:.1f} % over the mean), premium {}\n",
                     size_text(total), size_text(most),
                     mean > 0 ? (static_cast<double>(most) / mean - 1) * 100 : 0.0,
                     size_text(premium));
}

std::string collective_table(const Plan& plan) {
  std::vector<std::vector<std::string>> rows{{"point"}};
  for (int stage = 0; stage < plan.layout().pp; ++stage) {
    rows[0].push_back("stage " + std::to_string(stage));
  }
  std::vector<std::uint32_t> sums;
  for (std::size_t p = 0; p < static_cast<std::size_t>(Point::kCount); ++p) {
    std::vector<std::string> row{point_name(static_cast<Point>(p))};
    bool any = false;
    sums.resize(static_cast<std::size_t>(plan.layout().pp));
    for (int stage = 0; stage < plan.layout().pp; ++stage) {
      const std::uint32_t n = plan.collectives(stage * plan.layout().tp)[p];
      any = any || n > 0;
      sums[static_cast<std::size_t>(stage)] += n;
      row.push_back(std::to_string(n));
    }
    if (any) rows.push_back(row);
  }
  rows.push_back({"total"});
  for (const std::uint32_t n : sums) rows.back().push_back(std::to_string(n));
  return table(rows);
}

std::string tensor_table(const Plan& plan, int rank) {
  std::string out;
  for (const PlannedTensor& t : plan.tensors()) {
    const Box box = plan.box(t, rank);
    if (box.empty()) continue;
    out += fmt::format("{:<32} {:<8} {:<18} {:<18} {}  bytes {}\n", t.name, traits(t.type).name,
                       text(t), cut_name(t.cut), text(box), text(plan.byte_runs(t, rank)));
    if (!t.name2.empty()) {
      out += fmt::format("{:<32} {:<8} times the above; bytes {}\n", t.name2, traits(t.type2).name,
                         text(plan.byte_runs(t, rank, true)));
    }
  }
  return out;
}

Json json_of(const Band& b) { return Json::array({b.begin, b.end}); }

Json json_of(const ByteRuns& r) {
  return {{"begin", r.begin},   {"bytes", r.bytes},       {"runs", r.n_run},
          {"stride", r.stride}, {"matrices", r.n_matrix}, {"matrix_stride", r.matrix_stride}};
}

Json json_of_rank(const Plan& plan, int rank) {
  Json j;
  j["rank"] = rank;
  j["stage"] = plan.layout().stage(rank);
  j["tp_rank"] = plan.layout().tp_rank(rank);
  for (const auto& [name, band] : bands_of(plan, rank)) j["bands"][name] = json_of(band);
  const RankCost cost = rank_cost(plan, rank);
  for (std::size_t c = 0; c < kClasses; ++c) {
    j["bytes"][class_name(static_cast<TensorClass>(c))] = cost.bytes[c];
  }
  j["total_bytes"] = cost.total;
  j["premium_bytes"] = cost.premium;
  const CollectiveCounts counts = plan.collectives(rank);
  std::uint32_t sum = 0;
  j["collectives"] = Json::object();
  for (std::size_t p = 0; p < counts.size(); ++p) {
    if (counts[p] > 0) j["collectives"][point_name(static_cast<Point>(p))] = counts[p];
    sum += counts[p];
  }
  j["collectives_total"] = sum;
  return j;
}

Json json_of_tensor(const Plan& plan, const PlannedTensor& t, int rank) {
  const Box box = plan.box(t, rank);
  Json j{{"name", t.name},
         {"role", role_name(t.role)},
         {"layer", t.layer},
         {"type", traits(t.type).name},
         {"dims", t.dims},
         {"cut", cut_name(t.cut)},
         {"columns", json_of(box.axis[0])},
         {"rows", json_of(box.axis[1])},
         {"matrices", json_of(box.axis[2])},
         {"read_bytes", plan.band_bytes(t, rank)},
         {"premium_bytes", plan.premium_bytes(t, rank)},
         {"byte_runs", json_of(plan.byte_runs(t, rank))}};
  if (!t.name2.empty()) {
    j["times"] = {{"name", t.name2},
                  {"type", traits(t.type2).name},
                  {"byte_runs", json_of(plan.byte_runs(t, rank, true))}};
  }
  return j;
}

}  // namespace

const char* class_name(TensorClass c) {
  constexpr std::array<const char*, kClasses> names{"experts", "attention", "shared", "latent",
                                                    "router",  "dense",     "vocab",  "norms"};
  return names.at(static_cast<std::size_t>(c));
}

TensorClass class_of(Role role) {
  switch (role) {
    case Role::kTokenEmbd:
    case Role::kOutput:
      return TensorClass::kVocab;
    case Role::kDenseGate:
    case Role::kDenseUp:
    case Role::kDenseDown:
      return TensorClass::kDense;
    case Role::kRouter:
    case Role::kRouterBias:
      return TensorClass::kRouter;
    case Role::kExpertGate:
    case Role::kExpertUp:
    case Role::kExpertDown:
      return TensorClass::kExperts;
    case Role::kRoutedDown:
    case Role::kRoutedUp:
      return TensorClass::kLatent;
    case Role::kSharedGate:
    case Role::kSharedUp:
    case Role::kSharedDown:
      return TensorClass::kShared;
    case Role::kOutputNorm:
    case Role::kOutputResScore:
    case Role::kAttnNorm:
    case Role::kFfnNorm:
    case Role::kAttnResScore:
    case Role::kFfnResScore:
    case Role::kKdaNorm:
    case Role::kMlaQANorm:
    case Role::kMlaKvANorm:
    case Role::kRoutedNorm:
      return TensorClass::kNorms;
    default:
      return TensorClass::kAttention;
  }
}

RankCost rank_cost(const Plan& plan, int rank) {
  RankCost cost;
  for (const PlannedTensor& t : plan.tensors()) {
    const std::uint64_t bytes = plan.band_bytes(t, rank);
    cost.bytes[static_cast<std::size_t>(class_of(t.role))] += bytes;
    cost.total += bytes;
    cost.premium += plan.premium_bytes(t, rank);
  }
  return cost;
}

std::string plan_table(const Plan& plan, const PlanTitle& title, std::optional<int> rank) {
  std::string out = head_lines(plan, title);
  out += "\nWhat each rank holds, both ends included (first layer of each kind in its stage):\n" +
         band_table(plan);
  out += "\nMiB each rank reads, whole blocks (premium: blocks cut through, read twice):\n" +
         byte_table(plan);
  out += "\nCollectives of one forward step (one token, or one chunk of a prompt):\n" +
         collective_table(plan);
  if (rank) out += fmt::format("\nTensors of rank {}:\n", *rank) + tensor_table(plan, *rank);
  return out;
}

std::string plan_json(const Plan& plan, const PlanTitle& title, std::optional<int> rank) {
  const Layout& l = plan.layout();
  Json j;
  j["model"] = title.model;
  if (!title.quant.empty()) j["quant"] = title.quant;
  j["tensors"] = file_tensors(plan);
  j["stored_bytes"] = stored_total(plan);
  j["dialects"] = plan.dialects();
  j["layout"] = {{"tp", l.tp},
                 {"pp", l.pp},
                 {"policy", policy_name(l.policy)},
                 {"expert_groups", plan.expert_groups()}};
  j["ranks"] = Json::array();
  for (int r = 0; r < l.world(); ++r) j["ranks"].push_back(json_of_rank(plan, r));
  if (rank) {
    j["tensors_of_rank"] = {{"rank", *rank}, {"tensors", Json::array()}};
    for (const PlannedTensor& t : plan.tensors()) {
      if (plan.box(t, *rank).empty()) continue;
      j["tensors_of_rank"]["tensors"].push_back(json_of_tensor(plan, t, *rank));
    }
  }
  return j.dump(1) + "\n";
}

}  // namespace k3
