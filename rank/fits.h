// Whether a model is fully resident on a node at a context, and the walls that the node's figures set to its speed. Nothing
// but arithmetic on a plan: no device, no weights.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "rank/node_profile.h"
#include "rank/plan.h"
#include "rank/shapes.h"
#include "rank/state.h"

namespace k3 {

// A file that can be downloaded: what it is made of, and the size it is published with.
struct PublishedFile {
  const char* name;   // "UD-IQ2_XXS"
  const char* shape;  // named_shape()
  const char* recipe;
  double bytes;        // of its tensors, published; 0: as its types add up
  const char* caveat;  // what its types do not tell; empty where they give the published size
};
std::span<const PublishedFile> published_files();
// Throws std::invalid_argument naming the valid ones.
const PublishedFile& published_file(std::string_view name);

// A model whose bytes are known: its header, and how far the experts' types are from their true size.
struct SizedModel {
  std::string name;
  std::string caveat;
  ModelConfig config;
  std::vector<TensorInfo> tensors;
  double expert_scale = 1;  // bytes of the routed experts over those that `tensors` give
};
SizedModel sized_model(const PublishedFile& file);

// How weights lie in a device's memory.
enum class Placement : std::uint8_t {
  kFile,  // as many bytes as in the file
  kCuda,  // as the CUDA kernels want them: ternary codes unpacked, rows on 16 bytes (kernels/cuda/layout.h)
};

struct FitsRequest {
  Layout layout;  // tp * pp: one rank a device
  StateShape state{1, 0, CacheType::kF16};
  std::int64_t chunk_tok = 4096;
  std::int64_t prompt_tok = 32768;  // of the prefill wall
  Placement placement = Placement::kFile;
};

// Bytes of one rank.
struct RankNeed {
  double weights = 0;
  double cache = 0;      // MLA rows of all slots at the context asked for
  double kda_state = 0;  // and convolution windows
  double work = 0;       // activations of a step and the backend's workspace
  double total() const { return weights + cache + kda_state + work; }
};

struct Fits {
  double file_bytes = 0;
  RankNeed worst;  // of the rank that needs most
  int worst_rank = 0;
  int expert_groups = 1;  // the layout's, or where it leaves them open the first that fits
  double budget = 0;             // bytes of one device that may be taken
  bool resident = false;         // every rank within the budget
  std::int64_t largest_ctx = 0;  // that would be, at most the model's limit; 0: none
  double decode_ms = 0;  // wall of one token over an empty cache: bytes in turn over the bandwidth
  double decode_ms_at_ctx = 0;  // over a full one
  std::optional<double>
      collective_ms;  // a token's collectives at the link's latency, which no bandwidth makes faster
  double prefill_tok_s = 0;  // wall of a prompt from position 0
};

// Throws std::invalid_argument: a context beyond the model's limit, a layout of another world than the node's devices.
Fits fits(const SizedModel& model, const NodeProfile& node, const FitsRequest& request);

// The smallest number of such devices, up to `most`, on which the model is resident with tp over all of them; 0: none.
int devices_needed(const SizedModel& model, const NodeProfile& node, FitsRequest request, int most);

// "UD-Q4_K_XL on h200x8: not resident: ..." with what is needed and what there is: the line of a refusal.
std::string refusal_line(const SizedModel& model, const NodeProfile& node,
                         const FitsRequest& request, const Fits& fits);

}  // namespace k3
