// How rank 0 drives the other ranks: one Command a step, broadcast; one Answer from every rank where rank 0 asked for one.
// Plain bytes: all ranks of a job run the same binary.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "comm/comm.h"
#include "kernels/backend.h"
#include "rank/expert_choices.h"

namespace k3 {

// One sequence's part of a step that several share: of kStep, where its ids follow those of the parts before it, and of kMore.
struct CommandPart {
  std::int32_t slot = 0;
  std::int32_t n_ids = 0;
  std::int32_t generated = 0;    // as Command::generated
  std::int32_t wants_token = 0;  // rank 0 wants candidates for what follows its last id
  std::int32_t row = 0;          // kMore: which of the rows searched last
  float repetition = 1;
  float presence = 0;
  CandidateQuery query;
};

struct Command {
  enum class Kind : std::int32_t {
    kExtend,     // append ids to a slot's sequence and run them
    kStep,       // append ids to the sequences of several slots and run them together
    kMore,       // the candidates were too few: search the same logits again
    kReset,      // the slot's sequence starts anew
    kClear,      // and nothing is left of what it held
    kFork,       // to_slot continues what slot holds
    kSave,       // every rank keeps its part of the slot's sequence under the number `saved`
    kRestore,    // the slot holds what was kept under `saved`
    kForget,     // drops it
    kStore,      // the slot's sequence goes to a session file, whose name follows
    kLoad,       // and comes back into the slot
    kFabricate,  // the slot holds `length` made-up positions
    kChoices,    // what becomes of expert choices from now on (`use`)
    kReport,     // say how you are (gather of encoded RankReports)
    kStop,
  };
  enum class Want : std::int32_t { kNothing, kCandidates, kLastLogits };

  // A decode step fits into one broadcast; longer id lists follow in a second one.
  static constexpr std::size_t kInlineIds = 32;

  Kind kind = Kind::kStop;
  Want want = Want::kNothing;
  std::int32_t slot = 0;
  std::int32_t n_ids = 0;
  std::int32_t n_parts = 0;      // kStep; kMore of such a step
  std::int32_t wants_token = 1;  // kExtend: rank 0 draws from the candidates that it wants
  std::int32_t generated = 0;    // ids were drawn, not given: they count for the presence penalty
  std::int32_t exit_code = 0;    // kStop
  std::int32_t to_slot = 0;      // kFork
  std::uint64_t saved = 0;       // kSave, kRestore, kForget
  ChoiceUse use = ChoiceUse::kNone;  // kChoices
  std::int64_t n_row = 1;            // kLastLogits: rows wanted, at most as many as the step has
  std::int64_t length = 0;           // kFabricate
  std::uint64_t seed = 0;            // kFabricate
  float repetition = 1;
  float presence = 0;
  CandidateQuery query;
  std::array<std::int32_t, kInlineIds> inline_ids{};
};

// Rank 0 sends; the others receive command, ids and parts.
void send_command(Comm& world, Command command, std::span<const std::int32_t> ids,
                  std::span<const CommandPart> parts = {});
Command receive_command(Comm& world, std::vector<std::int32_t>& ids,
                        std::vector<CommandPart>& parts);

// What a rank knows after a step that rank 0 asked about.
struct Answer {
  std::int32_t stop_requested = 0;
  std::vector<std::int32_t> first_nonfinite;  // for each part of the step (Shard::take_nonfinite)
  std::vector<CandidateResult> candidates;    // kCandidates: one a part that wants a token
  std::vector<float> logits;                  // rows of this rank's band, kLastLogits
};
std::vector<std::byte> to_bytes(const Answer& answer);
Answer answer_from_bytes(std::span<const std::byte> bytes);

}  // namespace k3
