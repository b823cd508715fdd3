// Bulk copies from device memory to shared memory, and the barriers that tell of their arrival (sm_90 and later; empty
// elsewhere, where no kernel that uses them is launched).
#pragma once

#include <cstdint>

namespace k3::cuda {

__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void barrier_init(std::uint64_t* b, unsigned count) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(count)
               : "memory");
#endif
}
// After the inits, before anyone else or a copy uses the barriers.
__device__ __forceinline__ void barrier_init_done() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async;" ::: "memory");
#endif
}
// Arrives, and announces that copies of so many bytes will complete on the barrier.
__device__ __forceinline__ void barrier_expect(std::uint64_t* b, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)),
               "r"(bytes)
               : "memory");
#endif
}
__device__ __forceinline__ void barrier_arrive(std::uint64_t* b) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
#endif
}
// Until the phase of this parity has completed.
__device__ __forceinline__ void barrier_wait(std::uint64_t* b, unsigned parity) {
#if __CUDA_ARCH__ >= 900
  unsigned done = 0;
  while (done == 0)
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}\n"
        : "=r"(done)
        : "r"(shared_address(b)), "r"(parity)
        : "memory");
#endif
}
// bytes, from and to: multiples of 16.
__device__ __forceinline__ void bulk_load(void* to, const void* from, unsigned bytes,
                                          std::uint64_t* arrived) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(arrived))
      : "memory");
#endif
}

}  // namespace k3::cuda
