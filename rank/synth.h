// Seeded synthetic models: a whole K3 GGUF of any shape and block types with random weights, streamed to disk. The text
// such a model writes is noise, but sane noise: activations stay of order 1, decays range from almost none to almost full,
// routers spread over the experts, logits have a standard deviation near 3.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/synth_blocks.h"
#include "loader/parts.h"
#include "rank/shapes.h"

namespace k3 {

struct SynthOptions {
  ModelShape shape;
  QuantRecipe recipe = QuantRecipe::parse("UD-IQ1_S");
  std::uint64_t seed = 1;
  int threads = 1;
  GgufWriteOptions file;  // parts, header only
};

// A shape and its block types in one word: a preset's name and what differs from it, by k3synth's names:
// "k3-8l", "tiny,heads=5,quant=Q8_0". Throws std::invalid_argument naming the part that says nothing.
struct SynthModel {
  ModelShape shape;
  QuantRecipe recipe = QuantRecipe::parse("UD-IQ1_S");
};
SynthModel parse_synth_model(std::string_view text);

// Such a model without a file: metadata (no vocabulary) and tensors, under the name "synthetic TEXT seed SEED". The weights
// are SyntheticWeights(seed).
ModelFile synthetic_outline(std::string_view text, std::uint64_t seed);

// How one tensor's weights are made: matrices keep a unit variance (sigma = 1 / sqrt(n_in)), the output head gives
// logits of standard deviation 3, the embedding streams of 1. The same call gives any rank any block of any tensor.
SynthTensor synth_tensor(Role role, const TensorDecl& decl, std::uint64_t seed);

// tokenizer.ggml.* for n_vocab tokens: the 256 bytes in the order of the real vocabulary, merges of letters, and control
// tokens at the real vocabulary's offsets from its end (256 of them, or 32 in a small vocabulary). Any text encodes.
// Throws std::invalid_argument when n_vocab has no room for bytes and control tokens (less than 288) or for so many merges.
MetadataEntries synth_vocabulary(std::int64_t n_vocab);

// Bytes of tensor data written so far, of `total`.
using SynthProgress = std::function<void(std::uint64_t done, std::uint64_t total)>;

// Writes the model; returns the paths of its parts. Holds some megabytes per thread, never a tensor.
std::vector<std::string> write_synthetic(const std::string& path, const SynthOptions& options,
                                         const SynthProgress& progress = {});

}  // namespace k3
