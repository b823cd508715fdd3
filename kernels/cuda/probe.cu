// What the device reaches at most: a read, tensor-core products from shared memory, an empty kernel.
#include <cuda_bf16.h>

#include <cstdint>
#include <memory>

#include "kernels/cuda/check.h"
#include "kernels/probe.h"

namespace k3::cuda {
namespace {

__global__ void nothing_kernel() {}

// Grid-stride 16-byte loads, several under way in each thread. The sum is written where it is one value of 2^32: never,
// but the compiler does not know.
__global__ void read_kernel(const uint4* from, std::int64_t n, std::uint32_t* to) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  std::uint32_t sum = 0;
  for (; i + 3 * step < n; i += 4 * step) {
    uint4 v[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) v[k] = __ldcs(from + i + k * step);
#pragma unroll
    for (int k = 0; k < 4; ++k) sum += v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  for (; i < n; i += step) sum += __ldcs(from + i).x;
  if (sum == 0x9e3779b9u) to[0] = sum;
}

// Rows of 16 bf16 in core matrices of 8 rows by 16 bytes, one after the other: two along k, then the next eight rows.
constexpr int kM = 64, kN = 256, kSteps = 8, kGroups = 2, kTurns = 512;
constexpr int kABytes = kM * 16 * 2, kBBytes = kN * 16 * 2;
constexpr int kSharedBytes = kSteps * (kGroups * kABytes + kBBytes);

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// PTX ISA, matrix descriptor of wgmma without swizzling: address, 128 bytes from one core matrix to the next along k, 256
// from eight rows to the next eight, all in units of 16 bytes.
__device__ std::uint64_t descriptor(const void* shared) {
  const auto at = static_cast<std::uint64_t>(__cvta_generic_to_shared(shared));
  return (at & 0x3ffff) >> 4 | std::uint64_t{128 >> 4} << 16 | std::uint64_t{256 >> 4} << 32;
}

#define K3_ACC16(i)                                                                           \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7]), "+f"(d[i + 8]), "+f"(d[i + 9]), "+f"(d[i + 10]),        \
      "+f"(d[i + 11]), "+f"(d[i + 12]), "+f"(d[i + 13]), "+f"(d[i + 14]), "+f"(d[i + 15])

__device__ void multiply_64x256x16(float (&d)[128], std::uint64_t a, std::uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, "
      "%127}, %128, %129, 1, 1, 1, 0, 0;\n"
      : K3_ACC16(0), K3_ACC16(16), K3_ACC16(32), K3_ACC16(48), K3_ACC16(64), K3_ACC16(80),
        K3_ACC16(96), K3_ACC16(112)
      : "l"(a), "l"(b));
}
#undef K3_ACC16
#endif

// Two warpgroups a block, each with its own 64 rows. ran: whether this device's code has the instruction.
__global__ void __launch_bounds__(128 * kGroups, 1)
    multiply_kernel([[maybe_unused]] float* to, int* ran) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(128) unsigned char shared[];
  auto* values = reinterpret_cast<__nv_bfloat16*>(shared);
  // Pseudo-random: equal operands draw less power and would clock higher than real ones.
  for (int i = threadIdx.x; i < kSharedBytes / 2; i += blockDim.x) {
    std::uint32_t x = (static_cast<std::uint32_t>(i) + 1) * 2654435761u;
    x ^= x >> 15;
    values[i] = __float2bfloat16(static_cast<float>(x & 0xffff) * 0x1p-15f - 1.0f);
  }
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  const int group = threadIdx.x / 128;
  const unsigned char* a = shared + group * kSteps * kABytes;
  const unsigned char* b = shared + kGroups * kSteps * kABytes;
  float d[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) d[i] = 0;
  for (int turn = 0; turn < kTurns; ++turn) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
      multiply_64x256x16(d, descriptor(a + k * kABytes), descriptor(b + k * kBBytes));
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 128; ++i) sum += d[i];
  if (sum == 0.123456789f) to[0] = sum;
  if (blockIdx.x == 0 && threadIdx.x == 0) *ran = 1;
#else
  if (blockIdx.x == 0 && threadIdx.x == 0) *ran = 0;
#endif
}

class CudaProbe final : public DeviceProbe {
 public:
  explicit CudaProbe(cudaStream_t stream) : stream_(stream) {
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    check(cudaDeviceGetAttribute(&n_sm_, cudaDevAttrMultiProcessorCount, device),
          "cudaDeviceGetAttribute");
    check(cudaMalloc(reinterpret_cast<void**>(&sink_), 256), "cudaMalloc");
    check(cudaFuncSetAttribute(multiply_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               kSharedBytes),
          "cudaFuncSetAttribute");
    int ran = 0;
    launch_multiply();
    check(cudaMemcpyAsync(&ran, sink_ + 1, sizeof ran, cudaMemcpyDeviceToHost, stream_),
          "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    multiplies_ = ran != 0;
  }
  ~CudaProbe() override { cudaFree(sink_); }
  CudaProbe(const CudaProbe&) = delete;
  CudaProbe& operator=(const CudaProbe&) = delete;

  void read(const std::byte* from, std::size_t bytes) override {
    read_kernel<<<static_cast<unsigned>(n_sm_) * 8, 256, 0, stream_>>>(
        reinterpret_cast<const uint4*>(from), static_cast<std::int64_t>(bytes / 16), sink_);
    check_launch("read_kernel");
  }
  double multiply() override {
    if (!multiplies_) return 0;
    launch_multiply();
    return 2.0 * kM * kN * 16 * kSteps * kTurns * kGroups * n_sm_;
  }
  const char* multiply_what() const override {
    return "bf16 on tensor cores, operands in shared memory";
  }
  void nothing() override {
    nothing_kernel<<<1, 1, 0, stream_>>>();
    check_launch("nothing_kernel");
  }

 private:
  void launch_multiply() {
    multiply_kernel<<<static_cast<unsigned>(n_sm_), 128 * kGroups, kSharedBytes, stream_>>>(
        reinterpret_cast<float*>(sink_), reinterpret_cast<int*>(sink_ + 1));
    check_launch("multiply_kernel");
  }

  cudaStream_t stream_;
  int n_sm_ = 0;
  bool multiplies_ = false;
  std::uint32_t* sink_ = nullptr;
};

}  // namespace
}  // namespace k3::cuda

namespace k3 {

std::unique_ptr<DeviceProbe> make_cuda_probe(void* stream) {
  return std::make_unique<cuda::CudaProbe>(static_cast<cudaStream_t>(stream));
}

}  // namespace k3
