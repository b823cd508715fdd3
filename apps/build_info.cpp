#include "apps/build_info.h"

#include "generated/build_info.inc"

namespace k3 {

const BuildInfo& build_info() {
  static constexpr BuildInfo info{K3_BUILD_VERSION,  K3_BUILD_COMMIT,   K3_BUILD_TYPE,
                                  K3_BUILD_FLAGS,    K3_BUILD_COMPILER, K3_BUILD_CUDA,
                                  K3_BUILD_CUDA_NOTE};
  return info;
}

std::string version_text(const std::string& program) {
  const BuildInfo& b = build_info();
  return program + " " + b.version + " (" + b.commit + ")\n" + b.build_type + ", " + b.compiler +
         ", flags: " + b.flags + "\nCUDA part: " + (b.cuda ? "built" : "not built") + " (" +
         b.cuda_note + ")";
}

}  // namespace k3
