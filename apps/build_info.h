// What this program was built from, for --version and the run log.
#pragma once

#include <string>

namespace k3 {

struct BuildInfo {
  const char* version;     // "0.1.0"
  const char* commit;      // 12 hex digits and "-dirty" if tracked files differed; or "unknown"
  const char* build_type;  // "RelWithDebInfo"
  const char* flags;       // compiler flags of that build type, sanitizers included
  const char* compiler;    // "GNU 12.2.0"
  bool cuda;               // is the CUDA part in?
  const char* cuda_note;   // "nvcc 13.0.88, sm_90a", or why it is not in
};

const BuildInfo& build_info();

// The lines of --version, the last without a line end:
//   k3run 0.1.0 (5770d5d12ab3)
//   RelWithDebInfo, GNU 12.2.0, flags: ...
//   CUDA part: not built (nvcc or nccl.h not found)
std::string version_text(const std::string& program);

}  // namespace k3
