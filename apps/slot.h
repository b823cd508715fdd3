// The name of what a number measures. It carries every axis, so that no number is held against one of another kind:
//   NODE/MODEL/QUANT/CONTEXT/METRIC/ENGINE    1xH200/k3-8l/UD-IQ1_S/d128-f16/decode_ms/k3-fast
//
// NODE     ranks and device, "2xH200", "1xcpu-2t" (threads a rank); one rank of a larger world alone: "1xH200-part-of-8"
// CONTEXT  "d128-f16": depth and type of the cache; "p4096-d0-f16": so many tokens of a prompt behind a depth; "-b32": so
//          many sequences together; "file": loading
// METRIC   decode_ms a token, decode_tok_s (of all sequences), prefill_tok_s, load_gb_s
// ENGINE   ours "k3-exact", "k3-fast+peer" (path, and what data travel over); or a peer's
#pragma once

#include <string>

namespace k3 {

struct Slot {
  std::string node, model, quant, context, metric, engine;

  // Throws std::invalid_argument saying which part is missing or unknown. Engines beside ours, and quantizations that only
  // they have, where `peer` and there alone.
  static Slot parse(const std::string& name, bool peer);
  std::string name() const;
  std::string place() const;  // the name without its engine: what figures may be compared

  double devices() const;      // GPUs; of CPUs, threads
  std::string device() const;  // "H200", "cpu"; "H200 (one rank of 8)"
  double depth() const;        // positions before; 0 for loading
};

bool lower_is_better(const std::string& slot);
// By how much `now` is faster than `before`: 0.1 is 10 %.
double gain(double now, double before, bool lower_is_better);

}  // namespace k3
