// The CUDA backend: one device, one stream; every op is a launch, waits happen in download() and synchronize() alone.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cpu/sampling.h"
#include "kernels/cuda/candidates.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/kda_chunk.h"
#include "kernels/cuda/layout.h"
#include "kernels/cuda/mla_decode.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/prefill.h"
#include "kernels/cuda/staging.h"
#include "kernels/cuda/timeline.h"

namespace k3 {
namespace cuda {
namespace {

constexpr std::size_t kHiddenFloats = std::size_t{16}
                                      << 20;  // experts: activations between their two halves
constexpr std::size_t kRepackBytes = std::size_t{64} << 20;
constexpr std::size_t kSmallBytes = 1024;  // uploads of at most these go through a ring of kSmalls
constexpr std::size_t kSmalls = 64;
constexpr std::size_t kMaxBlocks = 4096;  // of a launch whose blocks count themselves
constexpr int kReaderThreads = 8;

class CudaBuffer final : public DeviceBuffer {
 public:
  CudaBuffer(std::size_t bytes, cudaStream_t stream) : bytes_(bytes) {
    check(cudaMalloc(reinterpret_cast<void**>(&data_), std::max<std::size_t>(bytes, 1)),
          "cudaMalloc");
    check(cudaMemsetAsync(data_, 0, std::max<std::size_t>(bytes, 1), stream), "cudaMemsetAsync");
  }
  ~CudaBuffer() override { cudaFree(data_); }
  CudaBuffer(const CudaBuffer&) = delete;
  CudaBuffer& operator=(const CudaBuffer&) = delete;
  std::byte* data() const override { return data_; }
  std::size_t bytes() const override { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_;
};

// Pinned host memory that the device sees at the same address.
class SharedBuffer final : public DeviceBuffer {
 public:
  explicit SharedBuffer(std::size_t bytes) : bytes_(bytes) {
    check(cudaHostAlloc(reinterpret_cast<void**>(&data_), std::max<std::size_t>(bytes, 1),
                        cudaHostAllocMapped | cudaHostAllocPortable),
          "cudaHostAlloc");
    std::memset(data_, 0, bytes);
  }
  ~SharedBuffer() override { cudaFreeHost(data_); }
  SharedBuffer(const SharedBuffer&) = delete;
  SharedBuffer& operator=(const SharedBuffer&) = delete;
  std::byte* data() const override { return data_; }
  std::size_t bytes() const override { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_;
};

class GraphReplay final : public Replay {
 public:
  GraphReplay(cudaStream_t stream, cudaGraph_t graph) : stream_(stream) {
    const cudaError_t status = cudaGraphInstantiate(&exec_, graph, 0);
    cudaGraphDestroy(graph);
    check(status, "cudaGraphInstantiate");
  }
  ~GraphReplay() override { cudaGraphExecDestroy(exec_); }
  GraphReplay(const GraphReplay&) = delete;
  GraphReplay& operator=(const GraphReplay&) = delete;
  void run() override { check(cudaGraphLaunch(exec_, stream_), "cudaGraphLaunch"); }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t exec_ = nullptr;
};

// The blocks of a band's rows: a cut inside a block takes the whole block.
struct RowBytes {
  std::int64_t stored_row, begin, bytes, first;
};

RowBytes row_bytes(const HostBox& box) {
  const BlockTraits& t = traits(box.type);
  const std::int64_t b0 = box.begin[0] / t.elems, b1 = (box.end[0] + t.elems - 1) / t.elems;
  return {box.dims[0] / t.elems * t.bytes, b0 * t.bytes, (b1 - b0) * t.bytes,
          box.begin[0] - b0 * t.elems};
}

class CudaBackend final : public Backend {
 public:
  CudaBackend(int index, Precision precision, bool reproducible)
      : index_(index), precision_(precision), reproducible_(reproducible) {
    check(cudaSetDevice(index), "cudaSetDevice");
    check(cudaGetDeviceProperties(&prop_, index), "cudaGetDeviceProperties");
    if (!has_code_for_device()) {
      throw DeviceError(
          describe() +
          ": this build has no code for its architecture (K3_CUDA_ARCHS at configure)");
    }
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    staging_ = std::make_unique<Staging>(
        std::min<int>(kReaderThreads, static_cast<int>(std::thread::hardware_concurrency())));
    hidden_ = allocate(kHiddenFloats * sizeof(float));
    partial_ = allocate(mla_scratch_floats() * sizeof(float));
    parts_ = allocate(expert_scratch_floats() * sizeof(float));
    arrived_ = allocate(kMaxBlocks * sizeof(unsigned));
    candidates_ = allocate(candidate_scratch_bytes());
    found_ = allocate_shared(candidate_answer_bytes());
    smalls_ = allocate_shared(kSmalls * kSmallBytes);
    // Taken before free_bytes() is first asked, so that what is left is what is free.
    if (precision == Precision::kFast && has_prefill_code()) {
      workspace_ = allocate(Prefill::kBytes);
      prefill_ = std::make_unique<Prefill>(workspace_->data());
    }
  }
  ~CudaBackend() override {
    cudaStreamSynchronize(stream_);
    hidden_.reset();
    partial_.reset();
    parts_.reset();
    arrived_.reset();
    candidates_.reset();
    found_.reset();
    smalls_.reset();
    repack_.reset();
    workspace_.reset();
    staging_.reset();
    cudaStreamDestroy(stream_);
  }

  std::string describe() const override {
    return "cuda " + std::to_string(index_) + ": " + prop_.name + ", sm_" +
           std::to_string(prop_.major) + std::to_string(prop_.minor);
  }
  void* stream() const override { return stream_; }
  std::size_t free_bytes() const override {
    std::size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return free;
  }
  std::string memory_domain() const override {
    std::string id = prop_.name + std::string(" ");
    for (const char c : prop_.uuid.bytes) {
      constexpr char kHex[] = "0123456789abcdef";
      id += kHex[static_cast<unsigned char>(c) >> 4];
      id += kHex[c & 15];
    }
    return id;
  }
  std::unique_ptr<DeviceBuffer> allocate(std::size_t bytes) override {
    return std::make_unique<CudaBuffer>(bytes, stream_);
  }
  std::unique_ptr<DeviceBuffer> allocate_shared(std::size_t bytes) override {
    return std::make_unique<SharedBuffer>(bytes);
  }
  void upload(void* device, const void* host, std::size_t bytes) override {
    if (bytes == 0) return;
    if (bytes <= kSmallBytes) {  // by way of pinned memory: a copy from pageable memory waits
      if (small_ == kSmalls) {
        synchronize();
        small_ = 0;
      }
      std::byte* at = smalls_->data() + small_++ * kSmallBytes;
      std::memcpy(at, host, bytes);
      host = at;
    }
    check(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream_), "cudaMemcpyAsync");
  }
  void download(void* host, const void* device, std::size_t bytes) override {
    if (bytes > 0)
      check(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream_),
            "cudaMemcpyAsync");
    synchronize();
  }
  void copy(void* to, const void* from, std::size_t bytes) override {
    if (bytes > 0)
      check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_), "cudaMemcpyAsync");
  }
  void zero(void* device, std::size_t bytes) override {
    if (bytes > 0) check(cudaMemsetAsync(device, 0, bytes, stream_), "cudaMemsetAsync");
  }
  void synchronize() override { check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }
  bool has_graphs() const override { return true; }
  bool token_independent() const override {
    return reproducible_ && precision_ == Precision::kExact;
  }
  std::unique_ptr<Replay> capture(const std::function<void()>& body) override {
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal),
          "cudaStreamBeginCapture");
    cudaGraph_t graph = nullptr;
    try {
      body();
    } catch (...) {
      cudaStreamEndCapture(stream_, &graph);
      if (graph != nullptr) cudaGraphDestroy(graph);
      throw;
    }
    check(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture");
    return std::make_unique<GraphReplay>(stream_, graph);
  }
  std::unique_ptr<Timeline> timeline() override { return make_timeline(stream_); }

  Weight load(const HostBox& box, std::vector<std::unique_ptr<DeviceBuffer>>& storage) override {
    const RowBytes r = row_bytes(box);
    Weight w = shape_of(box);
    storage.push_back(allocate(static_cast<std::size_t>(w.mat_bytes * w.n_mat)));
    std::byte* to = storage.back()->data();
    w.data = to;
    const std::int64_t stored_mat = r.stored_row * box.dims[1];
    const std::byte* from =
        box.base + box.begin[2] * stored_mat + box.begin[1] * r.stored_row + r.begin;
    if (w.n_out == box.dims[1]) {  // whole matrices: one run of rows
      upload_rows(to, w, {from, w.n_out * w.n_mat, r.bytes, r.stored_row});
      return w;
    }
    for (std::int64_t m = 0; m < w.n_mat; ++m) {
      upload_rows(to + m * w.mat_bytes, w, {from + m * stored_mat, w.n_out, r.bytes, r.stored_row});
    }
    return w;
  }
  Weight synthesize(const HostBox& box, const SynthTensor& recipe,
                    std::vector<std::unique_ptr<DeviceBuffer>>& storage) override {
    const RowBytes r = row_bytes(box);
    Weight w = shape_of(box);
    storage.push_back(allocate(static_cast<std::size_t>(w.mat_bytes * w.n_mat)));
    std::byte* to = storage.back()->data();
    w.data = to;
    const int size = traits(box.type).bytes;
    SynthRows rows{recipe, 0, r.stored_row / size, r.bytes / size, size};
    // Whole matrices are one run of rows.
    const std::int64_t n_run = w.n_out == box.dims[1] ? 1 : w.n_mat;
    for (std::int64_t m = 0; m < n_run; ++m) {
      const std::int64_t row = (box.begin[2] + m) * box.dims[1] + box.begin[1];
      rows.first_block = row * rows.stride + r.begin / size;
      place_rows(to + m * w.mat_bytes, w, w.n_out * w.n_mat / n_run, r.bytes,
                 [&](std::byte* at, std::int64_t pitch, std::int64_t first, std::int64_t n) {
                   SynthRows some = rows;
                   some.first_block += first * rows.stride;
                   synth_rows(at, pitch, n, some, stream_);
                 });
    }
    return w;
  }
  void on_load_piece(std::function<void()> heard) override {
    staging_->on_piece = std::move(heard);
  }
  std::size_t loaded_bytes(const HostBox& box) const override {
    const Weight w = shape_of(box);
    return static_cast<std::size_t>(w.mat_bytes * w.n_mat);
  }

  // One token in the fast path: the jobs that gemv.cu has a kernel for in one launch, the others as ever.
  void matmul(std::span<const MatmulJob> jobs) override {
    if (prefill_ && !jobs.empty() && jobs[0].x.rows >= kMinPanelTok)
      return prefill_->matmul(jobs, stream_);
    std::vector<FusedProduct> fast;
    std::vector<MatmulJob> rest;
    for (const MatmulJob& j : jobs) {
      const bool same_x = j.x.data == jobs[0].x.data && j.x.cols == jobs[0].x.cols;
      const bool fits = is_fast() && j.x.rows == 1 && same_x && !j.w->empty() &&
                        fast.size() < kMaxProducts && has_gemv(*j.w);
      if (fits) fast.push_back({j.y, FusedProduct::Join::kOne, {j.w, 0}, {}});
      if (!fits) rest.push_back(j);
    }
    Operand x;
    if (!fast.empty()) x.x = jobs[0].x;
    if (fast.empty() || !cuda::fused_products({&x, 1}, fast, stream_))
      return cuda::matmul(jobs, stream_, reproducible_);
    cuda::matmul(rest, stream_);
  }
  void head_matmul(View<float> y, std::int64_t y_head, View<const float> x, std::int64_t x_head,
                   const Weight& w) override {
    cuda::head_matmul(y, y_head, x, x_head, w, stream_, reproducible_);
  }
  void embed(View<float> y, const BatchView& batch, const Weight& table,
             std::int64_t vocab_begin) override {
    cuda::embed(y, batch, table, vocab_begin, stream_);
  }
  void mix_norm(View<float> y, View<const float> x, const float* bank, std::int64_t n_bank,
                std::int64_t bank_stride, const float* score_w, const float* norm_w, float eps,
                float* probs) override {
    cuda::mix_norm(y, x, bank, n_bank, bank_stride, score_w, norm_w, eps, probs, stream_);
  }
  void rms_norm(View<float> y, View<const float> x, const float* w, float eps) override {
    cuda::rms_norm(y, x, w, eps, stream_);
  }
  void residual(View<float> x, View<const float> a, bool restart) override {
    cuda::residual(x, a, restart, stream_);
  }
  void copy_rows(View<float> y, View<const float> x) override { cuda::copy_rows(y, x, stream_); }
  void unpack_bands(View<float> a, View<float> b, View<const float> all,
                    std::span<const std::int64_t> a_widths,
                    std::span<const std::int64_t> b_widths) override {
    cuda::unpack_bands(a, b, all, a_widths, b_widths, stream_);
  }
  void note_nonfinite(View<const float> x, std::int32_t layer, std::int32_t* first) override {
    cuda::note_nonfinite(x, layer, first, stream_);
  }

  void kda_conv(View<float> qkv, View<const float> u, const float* conv, const KdaState& state,
                const BatchView& batch) override {
    if (prefill_ && uses_parallel_conv(state, batch))
      return kda_conv_tokens(qkv, u, conv, state, batch, stream_);
    cuda::kda_conv(qkv, u, conv, state, batch, stream_);
  }
  void l2_norm_heads(View<float> y, std::int64_t head_dim, float eps) override {
    cuda::l2_norm_heads(y, head_dim, eps, stream_);
  }
  void kda_gates(View<float> g, View<float> beta, const float* dt, const float* a,
                 std::int64_t head_dim, bool safe_gate, float lower_bound) override {
    cuda::kda_gates(g, beta, dt, a, head_dim, safe_gate, lower_bound, stream_);
  }
  void kda_scan(View<float> o, View<const float> q, View<const float> k, View<const float> v,
                View<const float> g, View<const float> beta, const KdaState& state,
                const BatchView& batch) override {
    if (prefill_ && uses_chunked_kda(state, batch, q, g))
      return prefill_->kda(o, q, k, v, g, beta, state, batch, stream_);
    cuda::kda_scan(o, q, k, v, g, beta, state, batch, stream_);
  }
  void kda_output_gate(View<float> o, View<const float> gate, const float* w, std::int64_t head_dim,
                       float eps) override {
    cuda::kda_output_gate(o, gate, w, head_dim, eps, stream_);
  }

  void mla_append(View<const float> c, const float* w, float eps, const MlaCache& cache,
                  const BatchView& batch) override {
    cuda::mla_append(c, w, eps, cache, batch, stream_);
  }
  void mla_absorb(View<float> q_abs, View<const float> q, const Weight& k_b,
                  std::int64_t rope) override {
    cuda::head_matmul(q_abs, k_b.n_out + rope, q, k_b.n_in + rope, k_b, stream_, reproducible_);
    cuda::mla_rope_part(q_abs, q, k_b.n_mat, k_b.n_in, k_b.n_out, rope, stream_);
  }
  void mla_attend(View<float> ctx, View<const float> q, std::int64_t n_head, float scale,
                  const MlaCache& cache, const BatchView& batch) override {
    if (cache.shard.n_part > 1)
      throw std::invalid_argument(
          "mla_attend: this rank keeps a part of the rows; see mla_attend_part");
    const MlaQueries queries = absorbed(q, cache.kv_latent, cache.rope);
    if (attend_fast({ctx, false}, queries, n_head, scale, cache, batch)) return;
    cuda::mla_attend(ctx, q, n_head, scale, cache, batch,
                     reinterpret_cast<float*>(partial_->data()), stream_, reproducible_);
  }
  void mla_attend_part(View<float> part, View<const float> q, std::int64_t n_head, float scale,
                       const MlaCache& cache, const BatchView& batch) override {
    const MlaQueries queries = absorbed(q, cache.kv_latent, cache.rope);
    if (attend_fast({part, true}, queries, n_head, scale, cache, batch)) return;
    cuda::mla_attend_part(part, q, n_head, scale, cache, batch, stream_);
  }
  void mla_combine(View<float> ctx, View<const float> parts, std::int64_t n_part,
                   std::int64_t n_head) override {
    cuda::mla_combine(ctx, parts, n_part, n_head, stream_);
  }
  void mla_heads(View<float> o, View<const float> q, const Weight& k_b, const Weight& v_b,
                 std::int64_t rope, float scale, const MlaCache& cache, const BatchView& batch,
                 View<float> q_abs, View<float> ctx) override {
    if (prefill_ && uses_expanded_mla(k_b, v_b, cache, batch, Prefill::kBytes))
      return prefill_->mla(o, q, k_b, v_b, scale, cache, batch, stream_);
    // On tensor cores attention reads the rope part where it is: no copy into q_abs.
    const MlaQueries queries{q_abs, q.columns(k_b.n_in, rope), k_b.n_in + rope};
    if (!attends_fast(queries, k_b.n_mat, cache, batch))
      return Backend::mla_heads(o, q, k_b, v_b, rope, scale, cache, batch, q_abs, ctx);
    head_matmul(q_abs, k_b.n_out + rope, q, k_b.n_in + rope, k_b);
    attend_fast({ctx, false}, queries, k_b.n_mat, scale, cache, batch);
    head_matmul(o, v_b.n_out, ctx, v_b.n_in, v_b);
  }
  void sigmoid_gate(View<float> y, View<const float> gate) override {
    cuda::sigmoid_gate(y, gate, stream_);
  }

  void route(View<std::int32_t> ids, View<float> weights, View<const float> logits,
             const float* bias, std::int64_t bias_stride, bool normalise, float scale) override {
    cuda::route(ids, weights, logits, bias, bias_stride, normalise, scale, stream_);
  }
  void experts(View<float> m, View<const float> z, View<const std::int32_t> ids,
               View<const float> weights, const ExpertWeights& w, Situ p) override {
    if (prefill_ && uses_grouped_experts(w, m.rows))
      return prefill_->experts(m, z, ids, weights, w, p, stream_);
    cuda::experts(m, z, ids, weights, w, p, reinterpret_cast<float*>(hidden_->data()),
                  kHiddenFloats, stream_);
  }
  void situ(View<float> g, View<const float> u, Situ p) override { cuda::situ(g, u, p, stream_); }

  bool fused_products(std::span<const Operand> operands,
                      std::span<const FusedProduct> products) override {
    return is_fast() && cuda::fused_products(operands, products, stream_);
  }
  bool fused_mix(const MixStep& step) override {
    return is_fast() && cuda::fused_mix(step, stream_);
  }
  bool fused_kda(const KdaStep& step, const KdaState& state, const BatchView& batch) override {
    return is_fast() && cuda::fused_kda(step, state, batch, stream_);
  }
  bool fused_experts(const ExpertStep& step) override {
    return is_fast() && cuda::fused_experts(step, reinterpret_cast<float*>(hidden_->data()),
                                            kHiddenFloats, reinterpret_cast<float*>(parts_->data()),
                                            reinterpret_cast<unsigned*>(arrived_->data()), stream_);
  }

  void penalise(View<float> logits, std::int64_t vocab_begin, const std::int32_t* history,
                std::int64_t n_hist, float repetition, float presence) override {
    cuda::penalise(logits, vocab_begin, history, n_hist, repetition, presence, stream_);
  }
  CandidateResult candidates(View<const float> row, std::int64_t vocab_begin,
                             const CandidateQuery& query) override {
    const CandidateScratch scratch = lay_out_candidates(candidates_->data(), found_->data());
    if (search_candidates_on_device(row.data, row.cols, vocab_begin, query, scratch, stream_)) {
      synchronize();
      return candidates_from(*scratch.header, scratch.best);
    }
    // So many candidates are searched for on the host.
    std::vector<float> host(static_cast<std::size_t>(row.cols));
    download(host.data(), row.data, host.size() * sizeof(float));
    return search_candidates(host.data(), row.cols, vocab_begin, query);
  }

 private:
  // The decode kernels are written for Hopper: bulk copies, clusters, dependent launches.
  bool is_fast() const { return precision_ == Precision::kFast && prop_.major >= 9; }
  MlaChoice choose(const MlaQueries& q, std::int64_t n_head, const MlaCache& cache,
                   const BatchView& batch) const {
    return choose_mla(precision_,
                      mla_shape(q, n_head, cache, batch, prop_.major * 10 + prop_.minor));
  }
  bool attends_fast(const MlaQueries& q, std::int64_t n_head, const MlaCache& cache,
                    const BatchView& batch) const {
    return choose(q, n_head, cache, batch).tensor_cores;
  }
  // Attention on tensor cores, where choose_mla() says so; else false, and nothing is queued.
  bool attend_fast(MlaOut out, const MlaQueries& q, std::int64_t n_head, float scale,
                   const MlaCache& cache, const BatchView& batch) {
    const MlaChoice choice = choose(q, n_head, cache, batch);
    if (!choice.tensor_cores) return false;
    mla_decode(out, q, scale, cache, batch, choice, static_cast<int>(n_head),
               prop_.multiProcessorCount, partial_->data(), partial_->bytes(), stream_);
    return true;
  }

  // A band as it will lie on the device, without memory.
  static Weight shape_of(const HostBox& box) {
    const RowBytes r = row_bytes(box);
    Weight w;
    w.type = box.type;
    w.n_in = box.end[0] - box.begin[0];
    w.n_out = box.end[1] - box.begin[1];
    w.n_mat = box.end[2] - box.begin[2];
    w.first = r.first;
    w.layout = has_planes(w.type, w.n_in, w.first) ? kPlanes : kRaw;
    w.row_bytes = w.layout == kPlanes
                      ? plane_sizes(w.type, w.n_in, (w.first + w.n_in + 255) / 256).row()
                      : align16(r.bytes);
    w.mat_bytes = w.row_bytes * w.n_out;
    return w;
  }

  // Rows to their place, by way of a scratch buffer where they are repacked. fill(to, pitch, first, n) queues rows
  // [first, first + n) as a file holds them, pitch bytes apart.
  template <class Fill>
  void place_rows(std::byte* to, const Weight& w, std::int64_t n_row, std::int64_t row_bytes,
                  const Fill& fill) {
    if (w.layout == kRaw) return fill(to, w.row_bytes, 0, n_row);
    if (!repack_) repack_ = allocate(kRepackBytes);
    const std::int64_t pitch = align16(row_bytes);
    const std::int64_t per = static_cast<std::int64_t>(kRepackBytes) / pitch;
    if (per < 1) throw DeviceError("a weight's row exceeds the repacking buffer");
    for (std::int64_t at = 0; at < n_row; at += per) {
      const std::int64_t n = std::min(per, n_row - at);
      fill(repack_->data(), pitch, at, n);
      repack(to + at * w.row_bytes, repack_->data(), pitch, n, w, stream_);
    }
  }

  void upload_rows(std::byte* to, const Weight& w, HostRows rows) {
    place_rows(to, w, rows.n_row, rows.row_bytes,
               [&](std::byte* at, std::int64_t pitch, std::int64_t first, std::int64_t n) {
                 staging_->upload(at, pitch,
                                  {rows.data + first * rows.stride, n, rows.row_bytes, rows.stride},
                                  stream_);
               });
  }

  int index_;
  Precision precision_;
  bool reproducible_;
  cudaDeviceProp prop_{};
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<Staging> staging_;
  std::unique_ptr<DeviceBuffer> hidden_, partial_, repack_, workspace_;
  std::unique_ptr<DeviceBuffer> parts_, arrived_, candidates_, found_, smalls_;
  std::size_t small_ = 0;             // of smalls_, the next to use
  std::unique_ptr<Prefill> prefill_;  // where there is a fast path
};

}  // namespace
}  // namespace cuda

std::unique_ptr<Backend> make_cuda_backend(int index, Precision precision, bool reproducible) {
  return std::make_unique<cuda::CudaBackend>(index, precision, reproducible);
}

}  // namespace k3
