// Everything that must hold before a weight is read: the file opens and is a K3, the layout fits the world, all ranks see the
// same model, and it fits. Collective; every fault is agreed on, so that all ranks stop with one line.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/comm.h"
#include "kernels/backend.h"
#include "loader/parts.h"
#include "rank/plan.h"
#include "rank/run_config.h"
#include "rank/shard.h"
#include "rank/weight_source.h"

namespace k3 {

struct Prepared {
  RunConfig config;                 // as asked, with every "choose for me" replaced by the choice
  std::unique_ptr<ModelFile> file;  // an outline where the weights are synthetic
  std::unique_ptr<WeightSource> source;
  std::unique_ptr<Plan> plan;
  std::string fingerprint;
  ShardCost cost;                // this rank's, as it was held against
  std::uint64_t free_bytes = 0;  // what was free then
  std::vector<std::string> warnings;
};

Prepared prepare(const RunConfig& asked, Comm& world, const Backend& backend);

ShardOptions shard_options(const RunConfig& config);

}  // namespace k3
