// Pictures of what results/ holds: of the pinned frontier of every slot, of peers' figures, and of the logs. Each is a column
// of panels, and nothing is drawn that is not in the folder.
#pragma once

#include <string>
#include <vector>

#include "apps/ledger.h"

namespace k3 {

struct Plot {
  std::string name;  // of the file: "decode-depth.svg"
  std::string svg;
};

// decode-depth: ms a token over depth. scaling: values over the number of devices. phases: device time of a step's phases.
// ladder: every run of a slot, in the order of time. One that would have no panel is left out.
std::vector<Plot> make_plots(const Ledger& l);

}  // namespace k3
