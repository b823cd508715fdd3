// What layer code may ask of a device. One object per rank. Calls take effect in order on the device's stream and may
// return before they are done; only download() and synchronize() wait. On CPU ranks everything is done on return.
//
// Tensors are views: row-major, last axis contiguous, sizes in elements; the memory is the device's. Any axis may be
// empty (a rank with no heads or no experts is legal): such a call does nothing, or leaves zeros where it owns the output.
// All activations are f32 with f32 accumulation. Per-step facts (ids, positions, slots) live in device memory
// (BatchView), so that a captured step can be replayed with new ones; shapes are fixed at capture.
//
// Every op is defined by its plain loops in kernels/cpu; other backends meet the tolerance in tests/kernels.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/synth_blocks.h"
#include "kernels/timeline.h"
#include "loader/blocks.h"

namespace k3 {

// A failure of the device itself (launch, memory, lost device); its own exit code.
class DeviceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <class T>
struct View {
  T* data = nullptr;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t stride = 0;  // elements from one row to the next

  // constexpr throughout: device code calls these too.
  constexpr View() = default;
  constexpr View(T* d, std::int64_t r, std::int64_t c) : data(d), rows(r), cols(c), stride(c) {}
  constexpr View(T* d, std::int64_t r, std::int64_t c, std::int64_t s)
      : data(d), rows(r), cols(c), stride(s) {}
  // A view may be read where a view to read from is asked for.
  template <class U>
  requires(std::is_same_v<const U, T>) constexpr View(const View<U>& v)
      : data(v.data), rows(v.rows), cols(v.cols), stride(v.stride) {}
  constexpr T* row(std::int64_t r) const { return data + r * stride; }
  // Columns [begin, begin + n) of every row.
  constexpr View columns(std::int64_t begin, std::int64_t n) const {
    return {data + begin, rows, n, stride};
  }
  // Rows [begin, begin + n).
  constexpr View slice(std::int64_t begin, std::int64_t n) const {
    return {data + begin * stride, n, cols, stride};
  }
  constexpr bool empty() const { return rows == 0 || cols == 0; }
};

// A rank's part of a weight tensor on its device: n_mat matrices of n_out rows of n_in elements. How the bytes lie
// there (`layout`) is the backend's own business; only the backend that made a Weight can read it.
struct Weight {
  BlockType type = BlockType::kF32;
  std::int64_t n_in = 0;   // elements of a row that this rank owns (columns)
  std::int64_t n_out = 0;  // rows
  std::int64_t n_mat = 1;  // experts or heads
  const std::byte* data = nullptr;
  std::int64_t row_bytes = 0;
  std::int64_t mat_bytes = 0;
  std::int64_t first =
      0;  // elements of a row's first block that come before the band (a cut inside a block)
  int layout = 0;
  bool empty() const { return n_in == 0 || n_out == 0 || n_mat == 0; }
};

// A band of a stored tensor, as the plan cut it: half-open ranges on the three axes (columns, rows, matrices).
struct HostBox {
  BlockType type = BlockType::kF32;
  std::array<std::int64_t, 3> dims{1, 1, 1};  // the whole tensor, fastest axis first
  std::array<std::int64_t, 3> begin{0, 0, 0};
  std::array<std::int64_t, 3> end{0, 0, 0};
  // First byte of the whole tensor in the mapped part; null where the tensor is made by synthesize().
  const std::byte* base = nullptr;
  // Called, where set, when rows [row_begin, row_end) of a matrix (numbers of the whole tensor) have been copied and are not
  // read again: a column band touches the pages of whole rows, and a tensor can be larger than what is kept of all of them.
  std::function<void(std::int64_t mat, std::int64_t row_begin, std::int64_t row_end)> copied = {};
};

// One owner of device memory; freed when it goes. Contents are zero at the start.
class DeviceBuffer {
 public:
  virtual ~DeviceBuffer() = default;
  virtual std::byte* data() const = 0;
  virtual std::size_t bytes() const = 0;
};

// The tokens of one step: n_tok tokens in n_seg segments; a segment is a run of consecutive tokens of one sequence.
// All arrays are in device memory. tok i of a segment has position pos[i]; a segment whose first position is 0 starts
// from zero state whatever its slot held before.
struct BatchView {
  std::int64_t n_tok = 0;
  std::int64_t n_seg = 0;
  const std::int32_t* ids = nullptr;        // [n_tok]
  const std::int32_t* pos = nullptr;        // [n_tok]
  const std::int32_t* slot = nullptr;       // [n_tok]
  const std::int32_t* seg_begin = nullptr;  // [n_seg + 1], first token of each segment
};

// What a sequence remembers in one KDA layer, for all slots. Heads are this rank's.
struct KdaState {
  float* s = nullptr;  // [n_slot, n_head, head_dim (key), head_dim (value)]
  float* window =
      nullptr;  // [n_slot, conv_kernel - 1, 3 * n_head * head_dim]: raw q|k|v projections, oldest first
  std::int64_t n_head = 0;
  std::int64_t head_dim = 0;
  std::int64_t conv_kernel = 0;
};

enum class CacheType : std::uint8_t { kF32, kF16, kBF16 };

// Which positions of a sequence a rank keeps where the latent cache is cut over ranks: blocks of `block` positions are
// dealt out in turn, so that every rank's share grows alike. The positions kept lie without gaps, in order.
struct RowShard {
  std::int64_t part = 0;
  std::int64_t n_part = 1;
  std::int64_t block = 64;
  constexpr bool keeps(std::int64_t pos) const { return pos / block % n_part == part; }
  // Positions kept among 0 .. n - 1; so the row of a position that is kept is rows(pos).
  constexpr std::int64_t rows(std::int64_t n) const {
    if (n_part == 1) return n;
    const std::int64_t round = block * n_part, rest = n % round - part * block;
    return n / round * block + (rest < 0 ? 0 : rest < block ? rest : block);
  }
};

// The latent cache of one MLA layer, for all slots: one row per token, [kv_latent | rope].
struct MlaCache {
  std::byte* rows = nullptr;  // [n_slot, n_ctx, kv_latent + rope] of `type`
  CacheType type = CacheType::kF32;
  std::int64_t n_ctx = 0;  // rows of a slot that this rank keeps
  std::int64_t kv_latent = 0;
  std::int64_t rope = 0;
  RowShard shard{};  // n_part > 1: attention is mla_attend_part on every rank, then mla_combine
};

struct MatmulJob {
  View<float> y;
  View<const float> x;
  const Weight* w = nullptr;
};

// Routed experts of one layer on this rank: matrices [expert_begin, expert_begin + gate->n_mat) of the model's, and of
// each the ffn band the plan gave (gate and up: rows; down: columns).
struct ExpertWeights {
  const Weight* gate = nullptr;  // [n_mat][ffn band, moe_latent]
  const Weight* up = nullptr;
  const Weight* down = nullptr;  // [n_mat][moe_latent, ffn band]
  std::int64_t expert_begin = 0;
};

// How products are rounded. kExact: f32 activations and sums, the oracle. kFast: what the device multiplies quickest;
// router, gates, residual mix, norms and KDA state stay f32. A backend without a fast path runs the exact one.
enum class Precision : std::uint8_t { kExact, kFast };

struct Situ {
  float beta = 0;    // situ(g, u) = beta*tanh(g/beta)*sigmoid(g) * lambda*tanh(u/lambda)
  float lambda = 0;  // <= 0: u is used as it is
};

struct Candidate {
  std::int32_t id = -1;  // in the whole vocabulary
  float logit = 0;       // after penalties
  float key = 0;         // what candidates are ordered by: the logit, or the perturbed logit
};

// How a vocabulary band is searched for candidates.
struct CandidateQuery {
  std::int32_t n = 1;  // how many to return, best first; ties: lower id first
  float inv_temperature =
      0;  // 0: order by logit; else order by logit * inv_temperature + gumbel(seed, draw, id)
  std::uint64_t seed = 0;
  std::uint64_t draw = 0;
  bool by_logit =
      false;  // order by logit whatever inv_temperature is, which then only scales sum_exp_scaled
};

struct CandidateResult {
  std::vector<Candidate> best;
  float max_logit = 0;  // over the band
  double sum_exp = 0;   // sum of exp(logit - max_logit) over the band
  double sum_exp_scaled =
      0;  // the same for logits / temperature (equal to sum_exp when inv_temperature == 0)
};

// ---- fused steps: stretches of the layer program that a backend may do in few launches; see Backend::fused_* -----------

// What a product reads: x, or something made of it on the way.
struct Operand {
  enum class Op { kPlain, kSitu, kSigmoidGate, kRms };
  Op op = Op::kPlain;
  View<const float> x;
  View<const float> other;  // kSitu: situ(x, other); kSigmoidGate: x * sigmoid(other)
  // kRms: columns [begin, begin + n) of rms_norm(x; norm_w)
  const float* norm_w = nullptr;
  float eps = 0;
  std::int64_t begin = 0, n = 0;
  Situ situ;

  std::int64_t width() const { return op == Op::kRms ? n : x.cols; }
};

// y = a, a + b, or situ(a, b), where a and b are products of a weight and an operand.
struct FusedProduct {
  enum class Join { kOne, kAdd, kSitu };
  struct Term {
    const Weight* w = nullptr;
    int operand = 0;
  };
  View<float> y;
  Join join = Join::kOne;
  Term a, b;
};

// residual(x, add, restart) where add is not empty, note_nonfinite(x, layer, first), mix_norm to y, and where `push` is not
// null copy_rows(push, x).
struct MixStep {
  View<float> y, x;
  View<const float> add;
  bool restart = false;
  std::int32_t layer = 0;
  std::int32_t* first_nonfinite = nullptr;
  const float* bank = nullptr;
  std::int64_t n_bank = 0, bank_stride = 0;
  float* push = nullptr;
  const float* score_w = nullptr;
  const float* norm_w = nullptr;
  float eps = 0;
};

// From the raw projections to the gated output of a KDA layer: the product with f_b, kda_conv, l2_norm_heads of q and k,
// kda_gates, kda_scan, kda_output_gate. u, f, beta and gate may be used up.
struct KdaStep {
  View<float> o;
  View<const float> u, f, gate;
  View<float> beta;
  const Weight* f_b = nullptr;
  const float* conv = nullptr;
  const float* dt = nullptr;
  const float* a = nullptr;
  const float* norm_w = nullptr;
  float eps = 0;
  bool safe_gate = false;
  float lower_bound = 0;
};

// route, then experts.
struct ExpertStep {
  View<float> m;
  View<const float> z, logits;
  View<std::int32_t> ids;
  View<float> weights;
  const float* bias = nullptr;
  std::int64_t bias_stride = 0;  // as route() takes it
  bool normalise = false;
  float scale = 0;
  ExpertWeights w;
  Situ situ;
};

// Work that can be run again with the same shapes and new values in device memory (a CUDA graph, or just the calls).
class Replay {
 public:
  virtual ~Replay() = default;
  virtual void run() = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;

  // ---- the device -----------------------------------------------------------------------------------------------
  // "cpu: 2 threads, avx512", "cuda 3: NVIDIA H200, sm_90a"
  virtual std::string describe() const = 0;
  virtual void* stream() const = 0;  // for Comm; null on the CPU
  virtual std::size_t free_bytes() const = 0;
  // Names the memory that free_bytes() counts; ranks that give the same name share it ("memory of node7", a GPU's id).
  virtual std::string memory_domain() const = 0;
  virtual std::unique_ptr<DeviceBuffer> allocate(std::size_t bytes) = 0;
  // A little memory that kernels write and the host reads where it lies, after a wait: small results without a copy.
  virtual std::unique_ptr<DeviceBuffer> allocate_shared(std::size_t bytes) {
    return allocate(bytes);
  }
  virtual void upload(void* device, const void* host,
                      std::size_t bytes) = 0;  // host memory may be reused on return
  virtual void download(void* host, const void* device, std::size_t bytes) = 0;  // waits
  virtual void copy(void* to, const void* from, std::size_t bytes) = 0;          // device to device
  virtual void zero(void* device, std::size_t bytes) = 0;
  virtual void synchronize() = 0;
  // Whether run() of a Replay repeats the work without the calls being made again.
  virtual bool has_graphs() const { return false; }
  // Records the calls `body` makes; run() repeats them. Data calls of Comm on stream() may be among them.
  virtual std::unique_ptr<Replay> capture(const std::function<void()>& body) = 0;
  // Whether a token's results have the same bits however many others share its step. Where not, those of a step of one token
  // are always the same.
  virtual bool token_independent() const = 0;
  // Marks on this stream, and the times between them. The backend must outlive it.
  virtual std::unique_ptr<Timeline> timeline() = 0;

  // ---- weights --------------------------------------------------------------------------------------------------
  // Brings a band to the device, in the layout this backend's kernels want. `storage` receives the memory that must
  // outlive the Weight (nothing where the mapped file itself can be used). box.base must stay valid until then.
  virtual Weight load(const HostBox& box, std::vector<std::unique_ptr<DeviceBuffer>>& storage) = 0;
  // The same band of a tensor that no file holds: its blocks as kernels/synth_blocks.h makes them from `recipe`, made on the
  // device, then laid out as load() would. box.base is null.
  virtual Weight synthesize(const HostBox& box, const SynthTensor& recipe,
                            std::vector<std::unique_ptr<DeviceBuffer>>& storage) = 0;
  // `heard` is called in load(), in the caller's thread, whenever another piece has been read; it may throw to end the
  // load. Backends that read nothing in load() never call it.
  virtual void on_load_piece(std::function<void()> /*heard*/) {}
  // Device bytes load() will take for this box, or synthesize() where base is null.
  virtual std::size_t loaded_bytes(const HostBox& box) const = 0;

  // ---- dense ----------------------------------------------------------------------------------------------------
  // y[n_tok, n_out] = x[n_tok, n_in] . w[n_out, n_in]^T for each job. The jobs do not depend on each other, so a backend
  // may run them as one kernel. Throws std::invalid_argument naming both shapes.
  virtual void matmul(std::span<const MatmulJob> jobs) = 0;
  // Per head h of w->n_mat: y[:, h*n_out ...] = x[:, h*x_head ... + n_in] . w[h]^T. x_head, y_head: elements between heads.
  virtual void head_matmul(View<float> y, std::int64_t y_head, View<const float> x,
                           std::int64_t x_head, const Weight& w) = 0;
  // y[i] = row ids[i] of the table where vocab_begin <= ids[i] < vocab_begin + n_out, else zeros.
  virtual void embed(View<float> y, const BatchView& batch, const Weight& table,
                     std::int64_t vocab_begin) = 0;

  // ---- residual stream ------------------------------------------------------------------------------------------
  // Residual-attention mix of the bank's n_bank streams and x (kimi-k3.md section 3), then RMS norm:
  //   score_s = sum_i w_i s_i / sqrt(mean(s^2) + eps); p = softmax; h = sum_s p_s s; y = norm_w * h / sqrt(mean(h^2)+eps).
  // bank: [n_bank][n_tok, hidden], bank_stride elements apart. n_bank == 0: h = x. probs, where not null: [n_tok, n_bank+1].
  virtual void mix_norm(View<float> y, View<const float> x, const float* bank, std::int64_t n_bank,
                        std::int64_t bank_stride, const float* score_w, const float* norm_w,
                        float eps, float* probs) = 0;
  virtual void rms_norm(View<float> y, View<const float> x, const float* w, float eps) = 0;
  // x = a (restart) or x + a.
  virtual void residual(View<float> x, View<const float> a, bool restart) = 0;
  virtual void copy_rows(View<float> y, View<const float> x) = 0;
  // Undoes the interleaving of a gather of two banded tensors: `all` holds, rank after rank, a_widths[r] columns of a and
  // b_widths[r] columns of b. At most 64 ranks.
  virtual void unpack_bands(View<float> a, View<float> b, View<const float> all,
                            std::span<const std::int64_t> a_widths,
                            std::span<const std::int64_t> b_widths) = 0;
  // first[t] = min(first[t], layer) where row t of x holds a NaN or an infinity. first: device memory, [x.rows].
  virtual void note_nonfinite(View<const float> x, std::int32_t layer, std::int32_t* first) = 0;

  // ---- KDA (kimi-k3.md section 4); d = n_head * head_dim, this rank's heads -----------------------------------------
  // qkv = silu(causal convolution of u), both [n_tok, 3d] = [q | k | v], u the raw projections. Reads and updates the
  // window of each segment's slot. conv: [3d, conv_kernel], tap fastest.
  virtual void kda_conv(View<float> qkv, View<const float> u, const float* conv,
                        const KdaState& state, const BatchView& batch) = 0;
  // Per head of head_dim columns: y /= max(|y|_2, eps). eps is a floor on the norm, not under the root.
  virtual void l2_norm_heads(View<float> y, std::int64_t head_dim, float eps) = 0;
  // g = lower_bound * sigmoid(-a_h * (f + dt)), or a_h * softplus(f + dt) when safe_gate is false; a = ssm_a = -exp(A_log).
  // beta = sigmoid(beta). Both in place: g holds f on entry.
  virtual void kda_gates(View<float> g, View<float> beta, const float* dt, const float* a,
                         std::int64_t head_dim, bool safe_gate, float lower_bound) = 0;
  // The gated delta rule; o[n_tok, d], scale 1/sqrt(head_dim) on q. Reads and updates s of each segment's slot.
  virtual void kda_scan(View<float> o, View<const float> q, View<const float> k,
                        View<const float> v, View<const float> g, View<const float> beta,
                        const KdaState& state, const BatchView& batch) = 0;
  // o = rms(o; w) per head * sigmoid(gate).
  virtual void kda_output_gate(View<float> o, View<const float> gate, const float* w,
                               std::int64_t head_dim, float eps) = 0;

  // ---- MLA (section 5) --------------------------------------------------------------------------------------------
  // Row of each token: [rms(c[0:kv_latent]; w) | c[kv_latent:]] into its slot at its position, where cache.shard keeps it.
  virtual void mla_append(View<const float> c, const float* w, float eps, const MlaCache& cache,
                          const BatchView& batch) = 0;
  // Per head of k_b.n_mat: q_abs = [k_b . q_nope (kv_latent) | q_rope]. q: [n_tok, n_head * (nope + rope)] with
  // nope = k_b.n_in; q_abs: [n_tok, n_head * (kv_latent + rope)] with kv_latent = k_b.n_out.
  virtual void mla_absorb(View<float> q_abs, View<const float> q, const Weight& k_b,
                          std::int64_t rope) = 0;
  // q: [n_tok, n_head * (kv_latent + rope)], absorbed. ctx: [n_tok, n_head * kv_latent]. Token attends to positions 0..pos
  // of its slot, all rows already appended. scale = 1/sqrt(key length per head).
  virtual void mla_attend(View<float> ctx, View<const float> q, std::int64_t n_head, float scale,
                          const MlaCache& cache, const BatchView& batch) = 0;
  // What the rows of cache.shard say of the same attention: part [n_tok, n_head * (2 + kv_latent)], per head [m | l | v],
  // m = the largest score q . row * scale, l = sum of exp(score - m), v = sum of exp(score - m) * row[0:kv_latent].
  // A token without rows here has m = -inf, l = 0, v = 0. Any m may stand for the largest score, where l and v agree.
  virtual void mla_attend_part(View<float> part, View<const float> q, std::int64_t n_head,
                               float scale, const MlaCache& cache, const BatchView& batch) = 0;
  // ctx of n_part ranks' parts: rows p * ctx.rows ... of `parts` are those of rank p. One part at least has rows.
  virtual void mla_combine(View<float> ctx, View<const float> parts, std::int64_t n_part,
                           std::int64_t n_head) = 0;
  // o = the heads' values: mla_absorb, mla_attend and v_b per head, by way of q_abs and ctx. A backend may come to o another
  // way and leave q_abs and ctx as they are. o: [n_tok, n_head * v_b.n_out].
  virtual void mla_heads(View<float> o, View<const float> q, const Weight& k_b, const Weight& v_b,
                         std::int64_t rope, float scale, const MlaCache& cache,
                         const BatchView& batch, View<float> q_abs, View<float> ctx) {
    mla_absorb(q_abs, q, k_b, rope);
    mla_attend(ctx, q_abs, k_b.n_mat, scale, cache, batch);
    head_matmul(o, v_b.n_out, ctx, v_b.n_in, v_b);
  }
  // y *= sigmoid(gate)
  virtual void sigmoid_gate(View<float> y, View<const float> gate) = 0;

  // ---- MoE (section 6) ----------------------------------------------------------------------------------------------
  // Chooses k experts by sigmoid(logit) + bias (ties: lower index), best first; weights from the unbiased probabilities,
  // normalised (floor 2^-14) if normalise, times scale unless it is 0 or 1. bias: [n_expert] for all tokens, or, with
  // bias_stride not 0, a row for each, so many elements apart: the bias chooses and only chooses, so that such rows can hold
  // tokens to given experts.
  virtual void route(View<std::int32_t> ids, View<float> weights, View<const float> logits,
                     const float* bias, std::int64_t bias_stride, bool normalise, float scale) = 0;
  // m = sum over chosen experts e on this rank of w_e * down_e . situ(gate_e . z, up_e . z); partial over ranks; zeros where
  // a token has none here.
  virtual void experts(View<float> m, View<const float> z, View<const std::int32_t> ids,
                       View<const float> weights, const ExpertWeights& w, Situ situ) = 0;
  // g = situ(g, u)
  virtual void situ(View<float> g, View<const float> u, Situ p) = 0;

  // ---- fused steps ----------------------------------------------------------------------------------------------------
  // Each does what the ops it stands for do, within this backend's precision, and returns true; or does nothing and
  // returns false, where it has no kernel for these shapes. The layer program then calls the ops one by one: they are the
  // definition, and what traces see.
  virtual bool fused_products(std::span<const Operand>, std::span<const FusedProduct>) {
    return false;
  }
  virtual bool fused_mix(const MixStep&) { return false; }
  virtual bool fused_kda(const KdaStep&, const KdaState&, const BatchView&) { return false; }
  virtual bool fused_experts(const ExpertStep&) { return false; }

  // ---- sampling -------------------------------------------------------------------------------------------------------
  // For ids in history (device, n_hist of them, duplicates once): logit /= repetition if > 0 else *= repetition; -= presence.
  virtual void penalise(View<float> logits, std::int64_t vocab_begin, const std::int32_t* history,
                        std::int64_t n_hist, float repetition, float presence) = 0;
  // Searches one row of a vocabulary band. Waits.
  virtual CandidateResult candidates(View<const float> logits_row, std::int64_t vocab_begin,
                                     const CandidateQuery& query) = 0;
};

// gumbel(seed, draw, id): standard Gumbel noise from a counter-based generator, the same on every device and layout, so
// that the token drawn does not depend on how the vocabulary is cut. Defined in kernels/cpu/sampling.cpp.
float gumbel_noise(std::uint64_t seed, std::uint64_t draw, std::int32_t id);

// How the CPU backend computes.
struct CpuOptions {
  int threads = 1;
  std::vector<int> cpus;  // operating-system numbers, one a thread to be bound to; empty: not bound
  bool crowded = false;   // more threads than CPUs on this machine: those that wait sleep at once
  std::string instructions;  // "plain", "avx2", "avx512"; empty: the best that the processor has
};

// The CPU backend. Throws std::invalid_argument for instructions that the processor does not have, std::system_error where
// threads cannot be started or bound. The calling thread is one of `threads` and is bound at its first product.
std::unique_ptr<Backend> make_cpu_backend(const CpuOptions& options);
// Unbound, with the best instructions.
std::unique_ptr<Backend> make_cpu_backend(int threads);

// The CUDA backend on device `index` (as cuda_devices() counts). Throws DeviceError where the build has no CUDA part, no
// code for the device's architecture, or the device cannot be used. reproducible: the exact path's kernels are chosen so that
// token_independent() holds.
std::unique_ptr<Backend> make_cuda_backend(int index, Precision precision = Precision::kExact,
                                           bool reproducible = false);

}  // namespace k3
