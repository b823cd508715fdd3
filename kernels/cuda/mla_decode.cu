// Split attention over the latent cache on tensor cores, for decode. The rows of all tokens form one list of tiles of 64
// rows, cut evenly over the blocks by the positions in device memory, so a captured launch fits every position. A block
// serves all heads of a group; a second kernel joins what the blocks know of a token (mla_join.cuh).
//
// A tile is nine panels of 64 columns in a ring, brought by one thread. Scores are taken rows x heads (a row panel times the
// queries), weights go to shared memory as heads x rows, and the context is built latent x heads (a panel read transposed
// times the weights), so no head is padded beyond a multiple of 16. Where two groups of heads need the same rows, their blocks
// form a pair: each brings half of a panel and writes it to both, so that rows cross the device's network once.
//   warps  0-3   one thread copies panels
//   warps  4-7   scores, running maximum, weights, sums
//   warps  8-15  context, half of the 512 latent columns each four
#include "kernels/cuda/mla_decode.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "kernels/cuda/check.h"
#include "kernels/cuda/mla_decode.cuh"
#include "kernels/cuda/mla_join.cuh"
#include "kernels/cuda/mla_roles.cuh"

namespace k3::cuda {
namespace {

using namespace latent;

constexpr int kThreads = 512;
constexpr float kLog2E = 1.4426950408889634f;

template <class C>
__global__ void __launch_bounds__(kThreads, 1)
    decode_kernel(const __grid_constant__ CUtensorMap map, const __grid_constant__ Args args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if (threadIdx.x == 0) prefetch_map(map);
  if (!plan<C>(args)) return;
  const int group = static_cast<int>(threadIdx.x) / 128;
  if (group == 0) {
    set_registers<C::kCopyRegs>();
    if (threadIdx.x == 0) copy_panels<C>(map);
  } else if (group == 1) {
    set_registers<C::kScoreRegs>();
    scores<C>(args);
  } else {
    set_registers<C::kContextRegs>();
    context<C>(args, group - 2);
  }
  // The other block of a pair may still write here and arrive at barriers here.
  if constexpr (C::kPair) cluster_sync();
#endif
}

CUtensorMap tile_map(const MlaCache& cache, unsigned n_row) {
  static const auto encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                           cudaEnableDefault, &found),
          "cudaGetDriverEntryPointByVersion");
    if (found != cudaDriverEntryPointSuccess) {
      throw DeviceError("the driver has no cuTensorMapEncodeTiled");
    }
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  }();
  constexpr cuuint64_t kRow = kWidth * 2, kSlots = 1 << 16;  // more slots than anyone has
  const cuuint64_t n_ctx = static_cast<cuuint64_t>(cache.n_ctx);
  // Rows beyond a slot's last are read as zeros.
  const cuuint64_t dims[] = {kWidth, n_ctx, kSlots}, strides[] = {kRow, n_ctx * kRow};
  const cuuint32_t box[] = {64, n_row, 1}, steps[] = {1, 1, 1};
  CUtensorMap map;
  const CUresult status =
      encode(&map,
             cache.type == CacheType::kF16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                           : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
             3, cache.rows, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw DeviceError("cuTensorMapEncodeTiled: error " + std::to_string(status) + " for " +
                      std::to_string(cache.n_ctx) + " rows a slot");
  }
  return map;
}

// A kernel that may start while the one before it in the stream still runs; it waits for that one's end itself.
template <class... Parameters>
void launch_early(const char* name, void (*kernel)(Parameters...), dim3 grid, int threads,
                  int shared, int cluster, cudaStream_t stream, const Parameters&... arguments) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = static_cast<unsigned>(cluster);
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(shared);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  check(cudaLaunchKernelEx(&config, kernel, arguments...), name);
}

template <class C>
void launch(const MlaCache& cache, Args args, int n_block, std::byte* scratch,
            std::size_t scratch_bytes, cudaStream_t stream) {
  constexpr int N = C::kHeads, kPair = C::kPair ? 2 : 1;
  constexpr std::size_t kStats = 2 * N * sizeof(float),
                        kValues = N * kLatent / 4 * sizeof(typename C::Four);
  const int n_segment = args.n_tok * (C::kPair ? 1 : args.n_group),
            fit = static_cast<int>(
                std::min<std::size_t>(scratch_bytes / (kStats + kValues) / kPair, 4096));
  args.n_block = std::min(n_block / kPair, fit - n_segment);
  if (args.n_block < 1) {
    throw std::invalid_argument("mla_decode: " + std::to_string(scratch_bytes) +
                                " bytes of scratch for " + std::to_string(n_segment) + " segments");
  }
  args.values = scratch;
  args.stats = reinterpret_cast<float*>(
      scratch + static_cast<std::size_t>((args.n_block + n_segment) * kPair) * kValues);
  check(cudaFuncSetAttribute(decode_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             C::kShared),
        "cudaFuncSetAttribute");
  launch_early("decode_kernel", decode_kernel<C>, dim3(static_cast<unsigned>(args.n_block * kPair)),
               kThreads, C::kShared, kPair, stream, tile_map(cache, kTileRows / kPair), args);
  launch_early("join_parts_kernel", join_parts_kernel<C>,
               dim3(kLatent / 16, N / 8, static_cast<unsigned>(args.n_tok * args.n_group)),
               kJoinThreads<C>, 0, 1, stream, args);
}

}  // namespace

bool has_mla_decode() {
#ifdef K3_SM90A
  return true;
#else
  return false;
#endif
}

MlaShape mla_shape(const MlaQueries& q, std::int64_t n_head, const MlaCache& cache,
                   const BatchView& batch, int cc) {
  const auto on_16 = [](const View<const float>& v) {
    return reinterpret_cast<std::uintptr_t>(v.data) % 16 == 0 && v.stride % 4 == 0;
  };
  const bool aligned = on_16(q.latent) && on_16(q.rope) && q.rope_head % 4 == 0 &&
                       reinterpret_cast<std::uintptr_t>(cache.rows) % 16 == 0;
  return {cache.type, cache.kv_latent,  cache.rope, n_head, batch.n_tok,
          cc,         has_mla_decode(), aligned};
}

void mla_decode(MlaOut out, const MlaQueries& q, float scale, const MlaCache& cache,
                const BatchView& batch, const MlaChoice& choice, int n_head, int n_block,
                std::byte* scratch, std::size_t scratch_bytes, cudaStream_t stream) {
  if (batch.n_tok == 0) return;
  const Args args{out,
                  q,
                  scale * kLog2E,
                  batch.pos,
                  batch.slot,
                  cache.shard,
                  static_cast<int>(batch.n_tok),
                  n_head,
                  choice.n_group,
                  choice.group_heads,
                  0,
                  nullptr,
                  nullptr};
  const auto run = [&]<class T, int N, bool kSplit, bool kPair>() {
    launch<Config<T, N, kSplit, kPair>>(cache, args, n_block, scratch, scratch_bytes, stream);
  };
  const auto run_type = [&]<class T, bool kSplit>() {
    if (choice.pair) return run.template operator()<T, 48, kSplit, true>();
    if (choice.tile_heads == 16) return run.template operator()<T, 16, kSplit, false>();
    if (choice.tile_heads == 32) return run.template operator()<T, 32, kSplit, false>();
    run.template operator()<T, 48, kSplit, false>();
  };
  if (choice.split_q) {
    run_type.template operator()<__nv_bfloat16, true>();
  } else {
    run_type.template operator()<__half, false>();
  }
}

}  // namespace k3::cuda
