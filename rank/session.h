// A slot's sequence to disk and back, over all ranks: each writes what it keeps, each reads what it needs, whatever the layouts.
// Collective; an error on any rank is AgreedFault on all.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "comm/comm.h"
#include "rank/plan.h"
#include "rank/shard.h"

namespace k3 {

// What all ranks know alike of a session that is stored or loaded.
struct SessionPlace {
  Comm& world;
  const Plan& plan;
  Shard& shard;
  std::string fingerprint;  // of the model
  int slot = 0;
};

// `path` and `ids`, all that the sequence has read, count on rank 0. The folder must be the same on all ranks. Whatever goes wrong,
// what `path` held before stays. Refuses to replace a file that is no session.
void store_session(const SessionPlace& place, std::string path, std::span<const std::int32_t> ids);

// `path` counts on rank 0; returns the ids there. Refuses a session of another model or cache type, one that does not fit into
// n_ctx, and bytes that are not those that were written; the slot is then as it was, or empty.
std::vector<std::int32_t> load_session(const SessionPlace& place, std::string path);

}  // namespace k3
