// RunConfig: what the user asked for, parsed once in apps/options, checked once, printed by rank 0 and sent to all ranks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "rank/config.h"
#include "rank/sampler.h"

namespace k3 {

inline constexpr double kAutoTimeLimit = -0.5;  // 60 s between CPU ranks, 10 s between CUDA ranks
inline constexpr std::int64_t kDefaultContext = 4096;  // positions, where the model has as many

struct RunConfig {
  // the model
  std::string model;      // any part of the GGUF file
  std::string synthetic;  // instead of a file: weights of this shape (parse_synth_model)
  std::uint64_t synthetic_seed = 1;
  bool ignore_split_count = false;  // accept a stale split.tensors.count over a complete set
  // the world
  Layout
      layout;  // tp * pp must equal the number of ranks; tp == 0: as many as there are ranks / pp
  std::string backend = "cpu";  // cpu or cuda
  std::string comm =
      "nccl";  // what data travel over between CUDA ranks: nccl; peer memory; mpi through the host
  Precision precision = Precision::kExact;  // of products, on CUDA ranks
  // A sequence's logits have the same bits whatever else is in its steps, however its prompt is cut and whenever it joined.
  // CPU ranks are so always; CUDA ranks take kernels whose sums do not depend on the number of tokens (exact), or run every
  // token by itself (fast).
  bool reproducible = false;
  bool share_gpu = false;  // several ranks may use one device; data then go through the host
  int threads = 0;         // per rank; 0: cores of the node / ranks on the node, at least 1
  bool bind = true;        // threads of CPU ranks to CPUs of their own, where that helps
  std::string cpu_kernels = "best";  // plain, avx2, avx512; best: the last that the CPU has
  double time_limit_s = 60;  // a rank that waits longer for its peers ends the job; 0: never
                             // (kAutoTimeLimit: until settle())
  // the sequence
  std::int64_t n_ctx = 0;        // positions per sequence; 0: the model's limit, at most 4096
  std::int64_t chunk_tok = 256;  // prompt tokens per prefill step
  int n_slot = 1;                // sequences held at once
  CacheType cache = CacheType::kF32;
  bool cache_auto = false;  // until settle(): f32 on CPU ranks, f16 on CUDA ranks
  // the text
  std::int64_t n_predict = 128;  // tokens to generate at most
  bool control_tokens = false;   // recognise control tokens in a raw prompt
  bool ignore_eos = false;
  SamplerOptions sampler;
  // the log
  std::string log;  // HDF5 file; empty: none
};

// Chooses what depends on the backend alone and was left open: cache type, time limit.
void settle(RunConfig& config);

// Throws std::invalid_argument naming the option, its value and the range it must lie in.
void check(const RunConfig& config);

// Every option as "name value" lines, settled, as printed at start and stored in the log.
std::vector<std::pair<std::string, std::string>> describe(const RunConfig& config);

// For Comm::broadcast: the whole struct as bytes and back.
std::string to_bytes(const RunConfig& config);
RunConfig run_config_from_bytes(const std::string& bytes);

}  // namespace k3
