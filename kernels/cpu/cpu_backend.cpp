// The CPU backend: memory is the heap, the stream is the program's order, weights are read where the file is mapped.
#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <system_error>

#include "kernels/backend.h"
#include "kernels/cpu/ops.h"
#include "kernels/cpu/sampling.h"

namespace k3 {
namespace {

class HeapBuffer final : public DeviceBuffer {
 public:
  explicit HeapBuffer(std::size_t bytes) : bytes_(bytes) {
    // calloc leaves untouched pages to the kernel: a cache for a long context costs what is used of it.
    data_ = static_cast<std::byte*>(std::calloc(std::max<std::size_t>(bytes, 1), 1));
    // The machine's memory, not a device's: exit code 3.
    if (data_ == nullptr) {
      throw std::system_error(std::make_error_code(std::errc::not_enough_memory),
                              "cpu: " + std::to_string(bytes) + " bytes");
    }
  }
  ~HeapBuffer() override { std::free(data_); }
  HeapBuffer(const HeapBuffer&) = delete;
  HeapBuffer& operator=(const HeapBuffer&) = delete;
  std::byte* data() const override { return data_; }
  std::size_t bytes() const override { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_;
};

class ClockTimeline final : public Timeline {
 protected:
  void stamp(std::size_t i, const char*) override {
    if (i == 0) at_.clear();
    at_.push_back(std::chrono::steady_clock::now());
  }
  std::vector<double> seconds(std::size_t n) override {
    std::vector<double> out;
    for (std::size_t i = 0; i < n; ++i)
      out.push_back(std::chrono::duration<double>(at_[i] - at_[0]).count());
    return out;
  }

 private:
  std::vector<std::chrono::steady_clock::time_point> at_;
};

class CallReplay final : public Replay {
 public:
  explicit CallReplay(std::function<void()> body) : body_(std::move(body)) {}
  void run() override { body_(); }

 private:
  std::function<void()> body_;
};

constexpr std::int64_t kCopyBytes = 8 << 20;  // of stored rows, between letting pages go

// Where a box's blocks lie in the stored tensor: a cut inside a block takes the whole block.
struct BoxBytes {
  std::int64_t stored_row;  // bytes of a whole stored row
  std::int64_t row_begin;   // first byte of the band in a row
  std::int64_t row_bytes;   // bytes of the band's blocks
  std::int64_t first;       // elements of the first block before the band
};

BoxBytes box_bytes(const HostBox& box) {
  const BlockTraits& t = traits(box.type);
  const std::int64_t b0 = box.begin[0] / t.elems;
  const std::int64_t b1 = (box.end[0] + t.elems - 1) / t.elems;
  return {box.dims[0] / t.elems * t.bytes, b0 * t.bytes, (b1 - b0) * t.bytes,
          box.begin[0] - b0 * t.elems};
}

const cpu::KernelTable& table_named(const std::string& name) {
  const std::vector<const cpu::KernelTable*> all = cpu::usable_tables();
  if (name.empty()) return *all.back();
  std::string known;
  for (const cpu::KernelTable* t : all) {
    if (t->name == name) return *t;
    known += std::string(known.empty() ? "" : ", ") + t->name;
  }
  throw std::invalid_argument("instructions '" + name + "': this processor has " + known);
}

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(const CpuOptions& o)
      : pool_({o.threads, o.cpus, o.crowded}), ops_{pool_, table_named(o.instructions), {}, {}} {
    what_ = "cpu: " + std::to_string(pool_.size()) + (pool_.size() == 1 ? " thread" : " threads");
    what_ += std::string(", ") + ops_.table.name;
    for (std::size_t i = 0; i < o.cpus.size(); ++i) {
      what_ += (i == 0 ? ", on CPU " : " ") + std::to_string(o.cpus[i]);
    }
  }

  std::string describe() const override { return what_; }
  void* stream() const override { return nullptr; }

  std::size_t free_bytes() const override {
    std::ifstream meminfo("/proc/meminfo");
    for (std::string key, unit; meminfo >> key;) {
      std::size_t kib = 0;
      meminfo >> kib;
      std::getline(meminfo, unit);
      if (key == "MemAvailable:") return kib * 1024;
    }
    struct sysinfo info {};
    sysinfo(&info);
    return static_cast<std::size_t>(info.freeram) * info.mem_unit;
  }

  std::string memory_domain() const override {
    char host[256] = {};
    gethostname(host, sizeof(host) - 1);
    return std::string("memory of ") + host;
  }

  std::unique_ptr<DeviceBuffer> allocate(std::size_t bytes) override {
    return std::make_unique<HeapBuffer>(bytes);
  }
  void upload(void* device, const void* host, std::size_t bytes) override {
    copy(device, host, bytes);
  }
  void download(void* host, const void* device, std::size_t bytes) override {
    copy(host, device, bytes);
  }
  void copy(void* to, const void* from, std::size_t bytes) override {
    if (bytes > 0) std::memcpy(to, from, bytes);
  }
  void zero(void* device, std::size_t bytes) override {
    if (bytes > 0) std::memset(device, 0, bytes);
  }
  bool token_independent() const override { return true; }
  void synchronize() override {}
  std::unique_ptr<Replay> capture(const std::function<void()>& body) override {
    return std::make_unique<CallReplay>(body);
  }
  std::unique_ptr<Timeline> timeline() override { return std::make_unique<ClockTimeline>(); }

  Weight load(const HostBox& box, std::vector<std::unique_ptr<DeviceBuffer>>& storage) override {
    const BoxBytes b = box_bytes(box);
    Weight w;
    w.type = box.type;
    w.n_in = box.end[0] - box.begin[0];
    w.n_out = box.end[1] - box.begin[1];
    w.n_mat = box.end[2] - box.begin[2];
    w.first = b.first;
    const std::int64_t stored_mat = b.stored_row * box.dims[1];
    const std::byte* source =
        box.base + box.begin[2] * stored_mat + box.begin[1] * b.stored_row + b.row_begin;
    if (in_place(box, b)) {
      w.data = source;
      w.row_bytes = b.stored_row;
      w.mat_bytes = stored_mat;
      return w;
    }
    // A column band: rows are gathered, so that the pages of the other ranks' columns can be let go.
    w.row_bytes = b.row_bytes;
    w.mat_bytes = b.row_bytes * w.n_out;
    storage.push_back(allocate(static_cast<std::size_t>(w.mat_bytes * w.n_mat)));
    std::byte* to = storage.back()->data();
    w.data = to;
    // In pieces, each let go when it is copied; by the threads that will read the rows, so that the memory is near them.
    const std::int64_t at_once = std::max<std::int64_t>(1, kCopyBytes / b.stored_row);
    for (std::int64_t m = 0; m < w.n_mat; ++m) {
      for (std::int64_t r0 = 0; r0 < w.n_out; r0 += at_once) {
        const std::int64_t r1 = std::min(r0 + at_once, w.n_out);
        pool_.split(r1 - r0, b.row_bytes, [&](std::int64_t begin, std::int64_t end, int) {
          for (std::int64_t r = r0 + begin; r < r0 + end; ++r) {
            std::memcpy(to + (m * w.n_out + r) * b.row_bytes,
                        source + m * stored_mat + r * b.stored_row,
                        static_cast<std::size_t>(b.row_bytes));
          }
        });
        if (box.copied) box.copied(box.begin[2] + m, box.begin[1] + r0, box.begin[1] + r1);
      }
    }
    return w;
  }

  Weight synthesize(const HostBox& box, const SynthTensor& recipe,
                    std::vector<std::unique_ptr<DeviceBuffer>>& storage) override {
    const BoxBytes b = box_bytes(box);
    const int size = traits(box.type).bytes;
    const std::int64_t per_row = b.row_bytes / size, first_block = b.row_begin / size;
    Weight w;
    w.type = box.type;
    w.n_in = box.end[0] - box.begin[0];
    w.n_out = box.end[1] - box.begin[1];
    w.n_mat = box.end[2] - box.begin[2];
    w.first = b.first;
    w.row_bytes = b.row_bytes;
    w.mat_bytes = b.row_bytes * w.n_out;
    storage.push_back(allocate(static_cast<std::size_t>(w.mat_bytes * w.n_mat)));
    auto* to = reinterpret_cast<std::uint8_t*>(storage.back()->data());
    w.data = storage.back()->data();
    const std::int64_t n_row = w.n_out * w.n_mat;
    pool_.split(n_row, b.row_bytes, [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t mat = box.begin[2] + i / w.n_out, row = box.begin[1] + i % w.n_out;
        const std::int64_t at = (mat * box.dims[1] + row) * (b.stored_row / size) + first_block;
        for (std::int64_t k = 0; k < per_row; ++k) {
          synth_block(recipe, static_cast<std::uint64_t>(at + k), to + i * b.row_bytes + k * size,
                      size);
        }
      }
    });
    return w;
  }

  std::size_t loaded_bytes(const HostBox& box) const override {
    const BoxBytes b = box_bytes(box);
    if (in_place(box, b)) return 0;
    return static_cast<std::size_t>(b.row_bytes * (box.end[1] - box.begin[1]) *
                                    (box.end[2] - box.begin[2]));
  }

  void matmul(std::span<const MatmulJob> jobs) override {
    pool_.bind_caller();  // here and not earlier: from here on this thread computes
    cpu::matmul(ops_, jobs);
  }
  void head_matmul(View<float> y, std::int64_t y_head, View<const float> x, std::int64_t x_head,
                   const Weight& w) override {
    cpu::head_matmul(ops_, y, y_head, x, x_head, w);
  }
  void embed(View<float> y, const BatchView& batch, const Weight& table,
             std::int64_t vocab_begin) override {
    cpu::embed(ops_, y, batch, table, vocab_begin);
  }

  void mix_norm(View<float> y, View<const float> x, const float* bank, std::int64_t n_bank,
                std::int64_t bank_stride, const float* score_w, const float* norm_w, float eps,
                float* probs) override {
    cpu::mix_norm(ops_, y, x, bank, n_bank, bank_stride, score_w, norm_w, eps, probs);
  }
  void rms_norm(View<float> y, View<const float> x, const float* w, float eps) override {
    cpu::rms_norm(ops_, y, x, w, eps);
  }
  void residual(View<float> x, View<const float> a, bool restart) override {
    cpu::residual(ops_, x, a, restart);
  }
  void copy_rows(View<float> y, View<const float> x) override { cpu::copy_rows(y, x); }
  void unpack_bands(View<float> a, View<float> b, View<const float> all,
                    std::span<const std::int64_t> a_widths,
                    std::span<const std::int64_t> b_widths) override {
    cpu::unpack_bands(a, b, all, a_widths, b_widths);
  }
  void note_nonfinite(View<const float> x, std::int32_t layer, std::int32_t* first) override {
    cpu::note_nonfinite(x, layer, first);
  }

  void kda_conv(View<float> qkv, View<const float> u, const float* conv, const KdaState& state,
                const BatchView& batch) override {
    cpu::kda_conv(ops_, qkv, u, conv, state, batch);
  }
  void l2_norm_heads(View<float> y, std::int64_t head_dim, float eps) override {
    cpu::l2_norm_heads(ops_, y, head_dim, eps);
  }
  void kda_gates(View<float> g, View<float> beta, const float* dt, const float* a,
                 std::int64_t head_dim, bool safe_gate, float lower_bound) override {
    cpu::kda_gates(ops_, g, beta, dt, a, head_dim, safe_gate, lower_bound);
  }
  void kda_scan(View<float> o, View<const float> q, View<const float> k, View<const float> v,
                View<const float> g, View<const float> beta, const KdaState& state,
                const BatchView& batch) override {
    cpu::kda_scan(ops_, o, q, k, v, g, beta, state, batch);
  }
  void kda_output_gate(View<float> o, View<const float> gate, const float* w, std::int64_t head_dim,
                       float eps) override {
    cpu::kda_output_gate(ops_, o, gate, w, head_dim, eps);
  }

  void mla_append(View<const float> c, const float* w, float eps, const MlaCache& cache,
                  const BatchView& batch) override {
    cpu::mla_append(ops_, c, w, eps, cache, batch);
  }
  void mla_absorb(View<float> q_abs, View<const float> q, const Weight& k_b,
                  std::int64_t rope) override {
    const std::int64_t from = k_b.n_in + rope, to = k_b.n_out + rope;
    head_matmul(q_abs, to, q, from, k_b);
    for (std::int64_t h = 0; h < k_b.n_mat; ++h) {
      cpu::copy_rows(q_abs.columns(h * to + k_b.n_out, rope), q.columns(h * from + k_b.n_in, rope));
    }
  }
  void mla_attend(View<float> ctx, View<const float> q, std::int64_t n_head, float scale,
                  const MlaCache& cache, const BatchView& batch) override {
    cpu::mla_attend(ops_, ctx, q, n_head, scale, cache, batch);
  }
  void mla_attend_part(View<float> part, View<const float> q, std::int64_t n_head, float scale,
                       const MlaCache& cache, const BatchView& batch) override {
    cpu::mla_attend_part(ops_, part, q, n_head, scale, cache, batch);
  }
  void mla_combine(View<float> ctx, View<const float> parts, std::int64_t n_part,
                   std::int64_t n_head) override {
    cpu::mla_combine(ops_, ctx, parts, n_part, n_head);
  }
  void sigmoid_gate(View<float> y, View<const float> gate) override {
    cpu::sigmoid_gate(ops_, y, gate);
  }

  void route(View<std::int32_t> ids, View<float> weights, View<const float> logits,
             const float* bias, std::int64_t bias_stride, bool normalise, float scale) override {
    cpu::route(ops_, ids, weights, logits, bias, bias_stride, normalise, scale);
  }
  void experts(View<float> m, View<const float> z, View<const std::int32_t> ids,
               View<const float> weights, const ExpertWeights& w, Situ p) override {
    cpu::experts(ops_, m, z, ids, weights, w, p);
  }
  void situ(View<float> g, View<const float> u, Situ p) override { cpu::situ(ops_, g, u, p); }

  void penalise(View<float> logits, std::int64_t vocab_begin, const std::int32_t* history,
                std::int64_t n_hist, float repetition, float presence) override {
    for (std::int64_t t = 0; t < logits.rows; ++t) {
      penalise_logits(logits.row(t), logits.cols, vocab_begin, history, n_hist, repetition,
                      presence);
    }
  }
  CandidateResult candidates(View<const float> logits_row, std::int64_t vocab_begin,
                             const CandidateQuery& query) override {
    return search_candidates(logits_row.data, logits_row.cols, vocab_begin, query);
  }

 private:
  // Whole rows are used where the file is mapped, whatever rows and matrices the band has.
  static bool in_place(const HostBox& box, const BoxBytes& b) {
    return box.base != nullptr && b.row_bytes == b.stored_row;
  }

  cpu::Pool pool_;
  cpu::Ops ops_;
  std::string what_;
};

}  // namespace

std::unique_ptr<Backend> make_cpu_backend(const CpuOptions& options) {
  return std::make_unique<CpuBackend>(options);
}

std::unique_ptr<Backend> make_cpu_backend(int threads) {
  CpuOptions options;
  options.threads = threads;
  return make_cpu_backend(options);
}

}  // namespace k3
