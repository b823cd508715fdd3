// What the prefill kernels share: operands in panels, copies of whole tiles by the bulk copy engine, barriers in shared
// memory, descriptors for the tensor cores (sm_90a; bodies are empty for other architectures, which never launch them).
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/cuda/panels.h"
#include "kernels/cuda/wgmma.cuh"

namespace k3::cuda {

// Piece `piece` (8 values) of a row of a panel.
__device__ __forceinline__ uint4* panel_piece(const Panels& p, std::int64_t panel, std::int64_t row,
                                              int piece) {
  auto* bytes = reinterpret_cast<char*>(p.data) + (panel * p.rows + row) * kPanelRow;
  return reinterpret_cast<uint4*>(bytes + ((piece ^ static_cast<int>(row & 7)) << 4));
}

// Held to f16's range: an overflow here would turn into NaN far away. What is not finite already stays so.
__device__ __forceinline__ float finite_half(float v) {
  return isfinite(v) ? fminf(fmaxf(v, -65504.0f), 65504.0f) : v;
}
__device__ __forceinline__ std::uint32_t pack_half2(float low, float high) {
  const __half2 h = __floats2half2_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&h);
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// ---- barriers in shared memory (mbarrier) ------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(std::uint64_t* b, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals));
}
__device__ __forceinline__ void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(std::uint64_t* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
__device__ __forceinline__ void barrier_expect(std::uint64_t* b, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void barrier_wait(std::uint64_t* b, std::uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nwaiting:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra through;\nbra waiting;\nthrough:\n}\n" ::"r"(shared_address(b)),
      "r"(parity)
      : "memory");
}

// A ring of kStages tiles: which one is next, and how often the ring went round.
template <int kStages>
struct Ring {
  int stage = 0;
  std::uint32_t parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// ---- the bulk copy engine -----------------------------------------------------------------------------------------------

// bytes: a multiple of 16; both addresses 16-byte aligned. Completes on the barrier.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, std::uint32_t bytes,
                                          std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}
// Brings bytes (a multiple of 16, 16-byte aligned) as far as L2.
__device__ __forceinline__ void bulk_prefetch(const void* global, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(global)),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void bulk_store(void* global, const void* shared, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                   __cvta_generic_to_global(global)),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until the stores of this thread have read their shared memory.
__device__ __forceinline__ void bulk_store_wait() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// Before another unit (copy engine, tensor cores) reads what this thread wrote to shared memory.
__device__ __forceinline__ void publish_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- tensor cores ---------------------------------------------------------------------------------------------------------

// Descriptor of an operand tile in shared memory, in panels, 1024-byte aligned: 128-byte swizzle, 1024 bytes from one
// group of 8 rows to the next. Adding 2 moves by 16 columns.
__device__ __forceinline__ std::uint64_t operand(const void* tile) {
  return static_cast<std::uint64_t>((shared_address(tile) & 0x3ffff) >> 4) |
         std::uint64_t{1} << 16 | std::uint64_t{64} << 32 | std::uint64_t{1} << 62;
}
__device__ __forceinline__ void mma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void mma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kLeft>
__device__ __forceinline__ void mma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}
// Keeps the compiler from moving uses of sums over a wait.
template <int N>
__device__ __forceinline__ void hold(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// A barrier among the 128 threads of one warpgroup.
__device__ __forceinline__ void group_sync(int group) {
  asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}
template <int kRegisters>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace k3::cuda
