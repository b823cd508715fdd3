// The only table of tensor names: for every tensor its shape, how it is cut, and which band each rank owns.
// Pure arithmetic: no MPI, no device, no file contents.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "comm/points.h"
#include "loader/gguf.h"
#include "rank/band.h"
#include "rank/config.h"

namespace k3 {

// What a tensor is to the layer program; names as in the model's description.
enum class Role : std::uint8_t {
  kTokenEmbd,
  kOutput,
  kOutputNorm,
  kOutputResScore,
  kAttnNorm,
  kFfnNorm,
  kAttnResScore,
  kFfnResScore,
  kAttnOutput,
  kKdaQ,
  kKdaK,
  kKdaV,
  kKdaConvQ,
  kKdaConvK,
  kKdaConvV,
  kKdaFA,
  kKdaFB,
  kKdaDt,
  kKdaA,
  kKdaBeta,
  kKdaG,
  kKdaNorm,
  kMlaQA,
  kMlaQANorm,
  kMlaQB,
  kMlaQ,
  kMlaKvA,
  kMlaKvANorm,
  kMlaKB,
  kMlaVB,
  kMlaGate,
  kDenseGate,
  kDenseUp,
  kDenseDown,
  kRouter,
  kRouterBias,
  kExpertGate,
  kExpertUp,
  kExpertDown,
  kRoutedDown,
  kRoutedUp,
  kRoutedNorm,
  kSharedGate,
  kSharedUp,
  kSharedDown,
  kCount,
};
const char* role_name(Role role);
bool is_conv(Role role);  // one of the three KDA convolutions

enum class Cut : std::uint8_t {
  kReplicate,
  kRows,
  kColumns,
  kMatrices,
  kMatricesRows,
  kMatricesColumns
};
const char* cut_name(Cut cut);

// What has to be done to the stored values to get the tensor the model's description means.
enum class Transform : std::uint8_t {
  kNone,
  kNegAbs,  // ssm_a: use -|a|. Set on every ssm_a: whether a file stores +exp(A_log) shows only in its data, and -|a| of a
            // proper one is itself. Who loads it warns when it meets a positive value.
  kProduct,  // residual score kept as norm and projection: elementwise product of the two sources
};

// Half-open ranges on (columns, rows, matrices) of a tensor.
struct Box {
  std::array<Band, 3> axis;
  std::int64_t elems() const { return axis[0].size() * axis[1].size() * axis[2].size(); }
  bool empty() const { return elems() == 0; }
};

struct PlannedTensor {
  Role role{};
  int layer = -1;     // -1: not of a layer
  std::string name;   // as the file spells it
  std::string name2;  // second source of kProduct
  BlockType type{};
  BlockType type2{};  // of name2
  std::array<std::int64_t, 3> dims{
      1, 1, 1};  // [columns, rows, matrices]; conv weights are [conv_kernel, channels, 1]
  std::int64_t n_col =
      1;  // columns that count: dims[0], or fewer where a file pads (ssm_a to 128 of 96 heads)
  Cut cut = Cut::kReplicate;
  Transform transform = Transform::kNone;
};

// The bytes of one source of a tensor that a rank reads, as equal runs: matrix m, run i of it begin at
// begin + m * matrix_stride + i * stride and are `bytes` long. Offsets count from the tensor's first byte.
struct ByteRuns {
  std::uint64_t begin = 0;
  std::uint64_t bytes = 0;
  std::uint64_t n_run = 0;
  std::uint64_t stride = 0;
  std::uint64_t n_matrix = 0;
  std::uint64_t matrix_stride = 0;
  std::uint64_t total() const { return bytes * n_run * n_matrix; }
};

// Calls of each Point that one rank makes in one forward step (embed .. head) of one chunk, sampling not included.
using CollectiveCounts = std::array<std::uint32_t, static_cast<std::size_t>(Point::kCount)>;

class Plan {
 public:
  // Matches every tensor to its role, checks every shape, and refuses what is left over or missing (up to a handful of names
  // and how many more). Naming dialects are mapped exactly; each adds a line to dialects(). Throws std::invalid_argument.
  static Plan make(const ModelConfig& config, const std::vector<TensorInfo>& tensors,
                   const Layout& layout, const std::string& file);

  const ModelConfig& config() const { return config_; }
  const Layout& layout() const { return layout_; }
  std::span<const PlannedTensor> tensors() const { return tensors_; }
  const std::vector<std::string>& dialects() const { return dialects_; }

  // Null where the model has no such tensor (optional ones).
  const PlannedTensor* find(Role role, int layer = -1) const;

  // ---- bands; `rank` is a rank of the world; empty for layers of another stage -----------------------------------
  Band layers(int rank) const;         // the stage's layers; stages differ by one layer at most
  bool has_embedding(int rank) const;  // first stage
  bool has_head(int rank) const;       // last stage
  Band heads(int rank, int layer) const;
  Band vocab_in(int rank) const;               // rows of token_embd
  Band vocab_out(int rank) const;              // rows of output
  Band experts(int rank, int layer) const;     // matrices of the exps tensors
  Band expert_ffn(int rank, int layer) const;  // ffn band inside each of them
  Band dense_ffn(int rank, int layer) const;
  Band shared_ffn(int rank, int layer) const;
  Band router_rows(int rank, int layer) const;     // rows of ffn_gate_inp
  Band latent_rows(int rank, int layer) const;     // rows of ffn_routed_down
  Band latent_columns(int rank, int layer) const;  // columns of ffn_routed_up
  int expert_groups() const { return expert_groups_; }

  // What `rank` holds of t; empty where its stage has no such layer. Every element of every tensor is in exactly one rank's
  // box of a tensor-parallel group, except for Cut::kReplicate, where it is in all.
  Box box(const PlannedTensor& t, int rank) const;

  // ---- what it costs ---------------------------------------------------------------------------------------------
  std::uint64_t stored_bytes(const PlannedTensor& t) const;  // in the file
  std::uint64_t band_bytes(const PlannedTensor& t,
                           int rank) const;  // bytes rank must read, whole blocks
  std::uint64_t premium_bytes(const PlannedTensor& t, int rank)
      const;  // of these, blocks cut through: another rank reads them too
  ByteRuns byte_runs(const PlannedTensor& t, int rank,
                     bool second = false) const;  // second: of name2
  CollectiveCounts collectives(int rank) const;

  // Throws std::logic_error naming tensor and rank when a layer or an element is left out or owned twice.
  void check_tiling() const;

 private:
  int choose_expert_groups() const;
  std::int64_t granule(Role role, int layer) const;  // of the tensor's type; 1 where there is none
  std::int64_t head_width(int layer) const;          // columns of attn_output per head
  bool is_dense(int layer) const;
  bool has_layer(int rank, int layer) const;
  bool holds(const PlannedTensor& t, int rank) const;
  Band layer_band(int rank, int layer, std::int64_t n, std::int64_t unit) const;
  std::uint64_t cost(const PlannedTensor& t, int rank, bool premium) const;
  void check_tiling(const PlannedTensor& t) const;

  ModelConfig config_;
  Layout layout_;
  std::vector<PlannedTensor> tensors_;
  std::vector<std::string> dialects_;
  int expert_groups_ = 1;
  // lookup: role x layer -> index
  std::vector<int> index_;
};

}  // namespace k3
