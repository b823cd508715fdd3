#include "rank/session.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include <fmt/format.h>

#include "loader/atomic_file.h"
#include "rank/fault.h"
#include "rank/session_file.h"

namespace k3 {
namespace {

// Rank 0's text to all.
void share(Comm& world, std::string& text) {
  std::uint64_t size = text.size();
  world.broadcast(Point::kSession, std::as_writable_bytes(std::span(&size, 1)), 0);
  text.resize(size);
  if (size > 0) world.broadcast(Point::kSession, std::as_writable_bytes(std::span(text)), 0);
}

// Of this moment and process: no other session's.
std::string new_tag() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return fmt::format(
      "{:x}-{:x}", std::chrono::duration_cast<std::chrono::microseconds>(now).count(), ::getpid());
}

std::string cache_name(CacheType type) {
  return type == CacheType::kF32 ? "f32" : type == CacheType::kF16 ? "f16" : "bf16";
}

bool overlap(const Band& a, const Band& b) { return a.begin < b.end && b.begin < a.end; }

// Where ranks hold the same (heads under the policy that cuts experts only, the latent cache's rows), the first of them writes.
bool writes_heads(const Plan& plan, int rank, int layer) {
  const Band mine = plan.heads(rank, layer);
  for (int r = 0; r < rank; ++r)
    if (overlap(plan.heads(r, layer), mine)) return false;
  return mine.size() > 0;
}

bool writes_rows(const Plan& plan, int rank, int layer, const RowShard& deal) {
  if (deal.n_part > 1) return true;
  for (int r = 0; r < rank; ++r)
    if (plan.layers(r).begin <= layer && layer < plan.layers(r).end) return false;
  return true;
}

SessionPartSum write_part(const SessionPlace& p, const std::string& path) {
  const int rank = p.world.rank();
  const Band layers = p.plan.layers(rank);
  SessionPartWriter writer(path);
  for (auto layer = static_cast<int>(layers.begin); layer < layers.end; ++layer) {
    p.world.pulse(static_cast<std::uint64_t>(layer - layers.begin) + 1,
                  static_cast<std::uint64_t>(layers.size()) + 1);
    if (p.plan.config().layers[static_cast<std::size_t>(layer)].is_mla) {
      const RowShard& deal = p.shard.state().mla(layer).shard;
      if (writes_rows(p.plan, rank, layer, deal))
        writer.add_rows(layer, deal, p.shard.save_rows(p.slot, layer));
    } else if (writes_heads(p.plan, rank, layer)) {
      writer.add_heads(layer, p.plan.heads(rank, layer), p.shard.save_heads(p.slot, layer));
    }
  }
  return writer.commit();
}

void read_layer(const SessionPlace& p, SessionParts& parts, int layer, std::int64_t length) {
  const State& state = p.shard.state();
  if (p.plan.config().layers[static_cast<std::size_t>(layer)].is_mla) {
    const MlaCache& c = state.mla(layer);
    std::vector<std::byte> rows(state.row_bytes(layer) *
                                static_cast<std::size_t>(c.shard.rows(length)));
    parts.read_rows(layer, c.shard, length, state.row_bytes(layer), rows);
    p.shard.restore_rows(p.slot, layer, length, rows);
    return;
  }
  const Band heads = p.plan.heads(p.world.rank(), layer);
  const std::size_t each = state.head_bytes(layer);
  std::vector<std::byte> blob(each * static_cast<std::size_t>(heads.size()));
  for (std::int64_t h = 0; h < heads.size(); ++h) {
    parts.read_head(layer, heads.begin + h,
                    std::span(blob).subspan(static_cast<std::size_t>(h) * each, each));
  }
  p.shard.restore_heads(p.slot, layer, blob);
}

bool exists(const std::string& path) {
  struct stat st {};
  return ::stat(path.c_str(), &st) == 0;
}

}  // namespace

void store_session(const SessionPlace& p, std::string path, std::span<const std::int32_t> ids) {
  SessionHead before, head;
  std::string tag = new_tag();
  together(p.world, [&] {
    if (p.world.rank() != 0) return;
    if (static_cast<std::int64_t>(ids.size()) != p.shard.length(p.slot))
      throw std::logic_error("a session's ids are not those of its sequence");
    if (exists(path)) before = read_session_head(path);
  });
  share(p.world, path);
  share(p.world, tag);
  const auto part_path = [&](int rank) {
    return session_part_path(path, tag, static_cast<std::size_t>(rank));
  };
  SessionPartSum sum;
  try {
    together_at_length(p.world, [&] { sum = write_part(p, part_path(p.world.rank())); });
    for (const auto& bytes :
         p.world.gather_bytes(Point::kSession, std::as_bytes(std::span(&sum, 1)), 0)) {
      head.parts.emplace_back();
      std::memcpy(&head.parts.back(), bytes.data(), sizeof sum);
    }
    together(p.world, [&] {
      if (p.world.rank() != 0) return;
      head.fingerprint = p.fingerprint;
      head.cache = p.shard.state().shape().cache;
      head.tag = tag;
      head.ids.assign(ids.begin(), ids.end());
      head.seen = p.shard.seen(p.slot);
      head.generated = p.shard.generated(p.slot);
      AtomicFile file(path);
      const std::string text = session_head_text(head);
      file.write(std::as_bytes(std::span(text)));
      file.commit();
    });
  } catch (const AgreedFault&) {
    ::unlink(part_path(p.world.rank()).c_str());
    throw;
  }
  for (std::size_t i = 0; i < before.parts.size(); ++i)
    ::unlink(session_part_path(path, before.tag, i).c_str());
}

std::vector<std::int32_t> load_session(const SessionPlace& p, std::string path) {
  std::string text;
  together(p.world, [&] {
    if (p.world.rank() == 0) text = session_head_text(read_session_head(path));
  });
  share(p.world, path);
  share(p.world, text);
  SessionHead head;
  together_at_length(p.world, [&] {
    head = parse_session_head(text, path);
    const StateShape& shape = p.shard.state().shape();
    const auto length = static_cast<std::int64_t>(head.ids.size());
    if (head.fingerprint != p.fingerprint)
      throw std::invalid_argument(fmt::format("{}: of a model with fingerprint {}, this one has {}",
                                              path, head.fingerprint, p.fingerprint));
    if (head.cache != shape.cache)
      throw std::invalid_argument(
          fmt::format("{}: its cache is {}, this run's is {}: give --cache {}", path,
                      cache_name(head.cache), cache_name(shape.cache), cache_name(head.cache)));
    if (length > shape.n_ctx)
      throw std::invalid_argument(
          fmt::format("--ctx {}: {} holds {} positions", shape.n_ctx, path, head.ids.size()));
    p.shard.reset(p.slot);
    SessionParts parts(path, head);
    const Band layers = p.plan.layers(p.world.rank());
    for (auto layer = static_cast<int>(layers.begin); layer < layers.end; ++layer) {
      p.world.pulse(static_cast<std::uint64_t>(layer - layers.begin) + 1,
                    static_cast<std::uint64_t>(layers.size()) + 1);
      read_layer(p, parts, layer, length);
    }
    p.shard.set_sequence(p.slot, length, head.seen, head.generated);
  });
  return head.ids;
}

}  // namespace k3
