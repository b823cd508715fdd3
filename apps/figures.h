// The figures of results/ by engine: what plots and tables of scaling draw on.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "apps/ledger.h"

namespace k3 {

struct SlotFigure {
  Slot slot;
  double value = 0;
  bool peer = false;
  std::string source;  // our log, or where the peer's figure comes from
};

// The frontier of each slot of ours, and every peer's figure; sorted by the slot's name.
std::vector<SlotFigure> figures_of(const Ledger& l);

// The best floor that a log of the same node, model, quantization, context and metric gives; 0 where none does.
double floor_at(const Ledger& l, const Slot& slot);

// The figures of what differs in nothing but the number of devices (and engines): by device, model, quantization, context
// and metric, then by engine. Groups without ours, and those where no engine was
// measured on two nodes, are left out.
using Series = std::vector<SlotFigure>;  // by number of devices, then node
std::map<std::string, std::map<std::string, Series>> scaling_groups(const Ledger& l);

// The table of them: speed-up and efficiency over the smallest number of devices, and the share of the floor.
std::string scaling_table(const Ledger& l);

}  // namespace k3
