#include "comm/points.h"

namespace k3 {

const char* point_name(Point point) {
  switch (point) {
    case Point::kAgree:
      return "Agree";
    case Point::kRunConfig:
      return "RunConfig";
    case Point::kModelCheck:
      return "ModelCheck";
    case Point::kStep:
      return "Step";
    case Point::kEmbed:
      return "Embed";
    case Point::kMlaQuery:
      return "MlaQuery";
    case Point::kMlaParts:
      return "MlaParts";
    case Point::kAttnOut:
      return "AttnOut";
    case Point::kRouterLatent:
      return "RouterLatent";
    case Point::kMoeLatent:
      return "MoeLatent";
    case Point::kFfnOut:
      return "FfnOut";
    case Point::kStageHandOff:
      return "StageHandOff";
    case Point::kLogits:
      return "Logits";
    case Point::kCandidates:
      return "Candidates";
    case Point::kResidency:
      return "Residency";
    case Point::kSession:
      return "Session";
    case Point::kCount:
      break;
  }
  return "?";
}

}  // namespace k3
