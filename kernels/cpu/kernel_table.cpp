#include "kernels/cpu/kernel_table.h"

namespace k3::cpu {

#ifdef K3_CPU_X86
const KernelTable& avx2_table();
const KernelTable& avx512_table();

std::vector<const KernelTable*> usable_tables() {
  std::vector<const KernelTable*> all{&plain_table()};
  __builtin_cpu_init();
  // Also asks the system whether it saves the registers.
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return all;
  all.push_back(&avx2_table());
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    all.push_back(&avx512_table());
  }
  return all;
}
#else
std::vector<const KernelTable*> usable_tables() { return {&plain_table()}; }
#endif

const KernelTable& best_table() { return *usable_tables().back(); }

}  // namespace k3::cpu
