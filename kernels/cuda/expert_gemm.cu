// The grouped product for the type that K3's experts have, built for speed.
#include "kernels/cuda/expert_gemm.cuh"
#include "kernels/cuda/iq1s_octets.cuh"
#include "kernels/cuda/layout.h"

namespace k3::cuda {
namespace {

void launch(const Grouped& g, bool gated, cudaStream_t stream) {
  if (g.w[0].type == BlockType::kIQ1_S && g.w[0].layout == kPlanes)
    return launch_grouped<Iq1sOctets>(g, gated, stream);
  grouped_any(g.w[0], g.w[1], g.x, g.out, g.rows, g.row_tiles, g.situ, g.out_scale, gated, stream);
}

}  // namespace

void experts_in(Panels hidden, Panels x, const ExpertRows& rows, const Weight& gate,
                const Weight& up, Situ situ, float out_scale, cudaStream_t stream) {
  launch({{gate, up}, x, hidden, rows, static_cast<int>(hidden.n_panel / 2), situ, out_scale}, true,
         stream);
}

void experts_out(Panels out, Panels hidden, const ExpertRows& rows, const Weight& down,
                 float out_scale, cudaStream_t stream) {
  const auto row_tiles = static_cast<int>((down.n_out + 255) / 256);
  launch({{down, down}, hidden, out, rows, row_tiles, {}, out_scale}, false, stream);
}

}  // namespace k3::cuda
