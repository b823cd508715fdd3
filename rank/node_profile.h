// What a node offers, from a data file (launch/nodes/NAME.json): devices, their memory, what they read and compute a second,
// and the link between them. No figure without its source.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace k3 {

// One figure; its unit is the end of its key in the file.
struct Figure {
  double value = 0;
  std::string
      basis;  // "measured", "datasheet", "derived" (from other figures, the source says how) or "allowance"
  std::string source;  // where it was read or measured, for a reader to follow
};

struct NodeProfile {
  std::string name;
  std::string device;  // as its maker calls it
  int devices = 0;     // of all hosts together
  int hosts = 0;
  Figure
      memory_gib;  // of one device, as its driver (or, where memory is shared, the system) reports it
  Figure
      reserve_gib;  // of it, what the driver, the context and the communicator take, or the system where it shares it
  Figure read_gb_s;                          // memory bandwidth of one device, 1e9 bytes a second
  std::optional<Figure> read_measured_gb_s;  // what a kernel that only reads reaches
  Figure bf16_tflops;                        // dense, one device
  std::optional<Figure> bf16_measured_tflops;
  Figure link_gb_s;                       // of one device to the others, one direction
  std::optional<Figure> link_latency_us;  // the smallest sum over two devices, in a graph

  double budget_gib() const { return memory_gib.value - reserve_gib.value; }
  // Measured where it was, else the data sheet's.
  double best_read_gb_s() const {
    return (read_measured_gb_s ? *read_measured_gb_s : read_gb_s).value;
  }
  double best_tflops() const {
    return (bf16_measured_tflops ? *bf16_measured_tflops : bf16_tflops).value;
  }
};

// Reads a profile. Throws std::invalid_argument naming file and key: no JSON, a key that is missing, unknown or of another
// kind, a figure that is not positive, of unknown basis, or without a source.
NodeProfile parse_node_profile(std::string_view text, const std::string& file);

}  // namespace k3
