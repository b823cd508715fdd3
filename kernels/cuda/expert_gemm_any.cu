// The grouped product for every other type: weights through the same decoder as everywhere, octet by octet.
#include "kernels/cuda/expert_gemm.cuh"

namespace k3::cuda {
namespace {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <class Codec>
struct CodecOctets {
  static constexpr float kFactor = 1;
  static constexpr bool kFast = false;
  struct Row {
    typename Codec::Row at;
    bool here;
  };
  struct Packed {
    Row row;
    std::int64_t i, n_in;
  };
  struct Scale {};

  std::int64_t n_in;

  explicit __device__ __forceinline__ CodecOctets(const Weight& w) : n_in(w.n_in) {}
  static __device__ __forceinline__ Row row(const Weight& w, std::int64_t mat, std::int64_t r) {
    const bool here = r < w.n_out;
    return {Codec::at(w, mat, here ? r : 0), here};
  }
  __device__ __forceinline__ Packed load(const Row& r, std::int64_t i) const {
    return {r, i, n_in};
  }
  static __device__ __forceinline__ Scale scale(const Packed&) { return {}; }
  static __device__ __forceinline__ void octet(const Packed& p, const Scale&, int o,
                                               std::uint32_t (&f)[4]) {
    float v[8] = {};
    if (p.row.here && p.i + 8 * o < p.n_in) octet_at(p.row.at, Codec{}, p.i + 8 * o, v);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int e = j / 2 * 4 + j % 2;
      f[j] = pack_half2(finite_half(v[e]), finite_half(v[e + 2]));
    }
  }
};

#else

template <class Codec>
struct CodecOctets {};

#endif

}  // namespace

void grouped_any(const Weight& first, const Weight& second, Panels x, Panels out,
                 const ExpertRows& rows, int row_tiles, Situ situ, float out_scale, bool gated,
                 cudaStream_t stream) {
  const Grouped g{{first, second}, x, out, rows, row_tiles, situ, out_scale};
  with_codec(first, [&]<class Codec>() { launch_grouped<CodecOctets<Codec>>(g, gated, stream); });
}

}  // namespace k3::cuda
