#include "rank/protocol.h"

#include <cstring>
#include <stdexcept>
#include <type_traits>

namespace k3 {
namespace {

static_assert(std::is_trivially_copyable_v<Command> && std::is_trivially_copyable_v<CommandPart>);

template <class T>
void put(std::vector<std::byte>& out, const T* values, std::size_t count) {
  static_assert(std::is_trivially_copyable_v<T>);
  const auto* p = reinterpret_cast<const std::byte*>(values);
  out.insert(out.end(), p, p + count * sizeof(T));
}

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <class T>
  void take(T* values, std::size_t count) {
    if (count > (bytes_.size() - at_) / sizeof(T))
      throw std::logic_error("an answer is shorter than it says");
    if (count > 0) std::memcpy(values, bytes_.data() + at_, count * sizeof(T));
    at_ += count * sizeof(T);
  }
  template <class T>
  void take_list(std::vector<T>& values) {
    std::uint64_t count = 0;
    take(&count, 1);
    if (count > (bytes_.size() - at_) / sizeof(T))
      throw std::logic_error("an answer is shorter than it says");
    values.resize(count);
    take(values.data(), values.size());
  }

 private:
  std::span<const std::byte> bytes_;
  std::size_t at_ = 0;
};

}  // namespace

void send_command(Comm& world, Command command, std::span<const std::int32_t> ids,
                  std::span<const CommandPart> parts) {
  command.n_parts = static_cast<std::int32_t>(parts.size());
  command.n_ids = static_cast<std::int32_t>(ids.size());
  const bool fits = ids.size() <= Command::kInlineIds;
  if (fits) std::copy(ids.begin(), ids.end(), command.inline_ids.begin());
  world.broadcast(Point::kStep, std::as_writable_bytes(std::span(&command, 1)), 0);
  if (!parts.empty()) {
    std::vector<CommandPart> copy(parts.begin(), parts.end());
    world.broadcast(Point::kStep, std::as_writable_bytes(std::span(copy)), 0);
  }
  if (fits) return;
  std::vector<std::int32_t> copy(ids.begin(), ids.end());
  world.broadcast(Point::kStep, std::as_writable_bytes(std::span(copy)), 0);
}

Command receive_command(Comm& world, std::vector<std::int32_t>& ids,
                        std::vector<CommandPart>& parts) {
  Command command;
  world.broadcast(Point::kStep, std::as_writable_bytes(std::span(&command, 1)), 0);
  parts.resize(static_cast<std::size_t>(command.n_parts));
  if (!parts.empty()) world.broadcast(Point::kStep, std::as_writable_bytes(std::span(parts)), 0);
  ids.resize(static_cast<std::size_t>(command.n_ids));
  if (ids.size() <= Command::kInlineIds) {
    std::copy_n(command.inline_ids.begin(), ids.size(), ids.begin());
  } else {
    world.broadcast(Point::kStep, std::as_writable_bytes(std::span(ids)), 0);
  }
  return command;
}

std::vector<std::byte> to_bytes(const Answer& a) {
  std::vector<std::byte> out;
  put(out, &a.stop_requested, 1);
  const std::uint64_t n_parts = a.first_nonfinite.size();
  put(out, &n_parts, 1);
  put(out, a.first_nonfinite.data(), n_parts);
  const std::uint64_t n_results = a.candidates.size(), n_logits = a.logits.size();
  put(out, &n_results, 1);
  for (const CandidateResult& c : a.candidates) {
    put(out, &c.max_logit, 1);
    put(out, &c.sum_exp, 1);
    put(out, &c.sum_exp_scaled, 1);
    const std::uint64_t n_best = c.best.size();
    put(out, &n_best, 1);
    put(out, c.best.data(), n_best);
  }
  put(out, &n_logits, 1);
  put(out, a.logits.data(), n_logits);
  return out;
}

Answer answer_from_bytes(std::span<const std::byte> bytes) {
  Reader in(bytes);
  Answer a;
  in.take(&a.stop_requested, 1);
  in.take_list(a.first_nonfinite);
  std::uint64_t n_results = 0;
  in.take(&n_results, 1);
  for (std::uint64_t i = 0; i < n_results; ++i) {
    CandidateResult& c = a.candidates.emplace_back();
    in.take(&c.max_logit, 1);
    in.take(&c.sum_exp, 1);
    in.take(&c.sum_exp_scaled, 1);
    in.take_list(c.best);
  }
  in.take_list(a.logits);
  return a;
}

}  // namespace k3
