// What attention over the latent cache asks of sm_90a: barriers in shared memory, tile copies by tensor map, and products of
// a warpgroup (PTX ISA: mbarrier, cp.async.bulk.tensor, wgmma.mma_async).
//
// LatentMma<T, N>: d[64, N] (+)= a[64, 16] . b[16, N], a and b in shared memory under the 128-byte swizzle. kTransA: a is
// stored with its rows (not its 16) contiguous. Thread t of the group holds rows 16 * (t / 32) + t % 32 / 4 (+ 8) and, of every
// 8 columns j, columns 8j + 2 * (t % 4) (+ 1): d[4j .. 4j+3] = (row, col), (row, col+1), (row+8, col), (row+8, col+1).
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

namespace k3::cuda::latent {

__device__ __forceinline__ std::uint32_t address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void barrier_init(std::uint32_t b, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void arrive(std::uint32_t b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory");
}
__device__ __forceinline__ void arrive_expecting(std::uint32_t b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void wait(std::uint32_t b, std::uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}\n" ::"r"(b),
      "r"(parity)
      : "memory");
}

// Named barriers of some of a block's warps: `threads` in all, those that wait and those that only arrive.
__device__ __forceinline__ void sync_some(int id, int threads) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrive_some(int id, int threads) {
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ bool any_of_some(int id, int threads, bool mine) {
  int any;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.b32 p, %1, 0;\n"
      "barrier.cta.red.or.pred q, %2, %3, p;\nselp.s32 %0, 1, 0, q;\n}\n"
      : "=r"(any)
      : "r"(static_cast<int>(mine)), "r"(id), "r"(threads)
      : "memory");
  return any != 0;
}

// Ordinary stores to shared memory, before the tensor cores read them.
__device__ __forceinline__ void fence_for_tensor_cores() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void load_tile(std::uint32_t to, const CUtensorMap& map, int x, int y,
                                          int z, std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
      "l"(reinterpret_cast<std::uint64_t>(&map)), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

// The same to both blocks of a pair, at the same places in each.
__device__ __forceinline__ void load_tile_to_pair(std::uint32_t to, const CUtensorMap& map, int x,
                                                  int y, int z, std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(reinterpret_cast<std::uint64_t>(&map)), "r"(x), "r"(y), "r"(z), "r"(barrier),
      "h"(static_cast<std::uint16_t>(3))
      : "memory");
}
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<std::uint64_t>(&map)) : "memory");
}

// At the barrier that lies at the same place in block `rank` of the cluster.
__device__ __forceinline__ void arrive_at(std::uint32_t b, int rank) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}\n" ::"r"(b),
      "r"(rank)
      : "memory");
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}

// Programmatic dependent launch: this kernel may have started before the last one's end, the next one before this one's.
__device__ __forceinline__ void wait_for_last_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

template <int kMore>
__device__ __forceinline__ void set_registers() {  // more: above the launch's count, else below
  if constexpr (kMore > 128) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kMore));
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kMore));
  }
}

// Rows of 128 bytes in groups of 8 (1024 bytes), 128-byte swizzle; bytes a multiple of 1024, or within a row a multiple of 32.
__device__ __forceinline__ std::uint64_t descriptor(std::uint32_t bytes) {
  constexpr std::uint64_t kFixed =
      (std::uint64_t{1} << 62) | (std::uint64_t{1024 >> 4} << 32) | (std::uint64_t{1} << 16);
  return kFixed | ((bytes & 0x3ffff) >> 4);
}

__device__ __forceinline__ void mma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void mma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void mma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Writes four 8x8 tiles of 16-bit values, transposed; lane l gives the address of row l % 8 of tile l / 8.
__device__ __forceinline__ void store_transposed(std::uint32_t to, std::uint32_t a, std::uint32_t b,
                                                 std::uint32_t c, std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

template <class T, int N>
struct LatentMma;

#define K3_ACC8(i)                                                                            \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define K3_LATENT_MMA(T, TYPE, N, D, A, B, P, TRANS, ...)                                         \
  template <>                                                                                     \
  struct LatentMma<T, N> {                                                                        \
    template <bool kTransA>                                                                       \
    static __device__ __forceinline__ void run(float (&d)[N / 2], std::uint64_t a,                \
                                               std::uint64_t b, int add) {                        \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P                                          \
                   ", 0;\n"                                                                       \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" D "}, " A \
                   ", " B ", p, 1, 1, " TRANS ", 0;\n}\n"                                         \
                   : __VA_ARGS__                                                                  \
                   : "l"(a), "l"(b), "r"(add), "n"(static_cast<int>(kTransA)));                   \
    }                                                                                             \
  }
#define K3_D16 "%0, %1, %2, %3, %4, %5, %6, %7"
K3_LATENT_MMA(__half, "f16", 16, K3_D16, "%8", "%9", "%10", "%11", K3_ACC8(0));
K3_LATENT_MMA(__nv_bfloat16, "bf16", 16, K3_D16, "%8", "%9", "%10", "%11", K3_ACC8(0));
#define K3_D32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
K3_LATENT_MMA(__half, "f16", 32, K3_D32, "%16", "%17", "%18", "%19", K3_ACC8(0), K3_ACC8(8));
K3_LATENT_MMA(__nv_bfloat16, "bf16", 32, K3_D32, "%16", "%17", "%18", "%19", K3_ACC8(0),
              K3_ACC8(8));
#define K3_D48                                                                       \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
  "%18, %19, %20, %21, %22, %23"
K3_LATENT_MMA(__half, "f16", 48, K3_D48, "%24", "%25", "%26", "%27", K3_ACC8(0), K3_ACC8(8),
              K3_ACC8(16));
K3_LATENT_MMA(__nv_bfloat16, "bf16", 48, K3_D48, "%24", "%25", "%26", "%27", K3_ACC8(0), K3_ACC8(8),
              K3_ACC8(16));
#undef K3_LATENT_MMA
#undef K3_D16
#undef K3_D32
#undef K3_D48
#undef K3_ACC8

}  // namespace k3::cuda::latent

#endif  // __CUDA_ARCH_FEAT_SM90_ALL
