#include "rank/partial_comm.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

namespace k3 {
namespace {

constexpr std::size_t kScratchFloats = std::size_t{4} << 20;

std::int64_t columns_before(std::span<const std::size_t> widths, int rank) {
  return static_cast<std::int64_t>(
      std::accumulate(widths.begin(), widths.begin() + rank, std::size_t{0}));
}

}  // namespace

PartialComm::PartialComm(Comm& present, int first, int world, Backend& backend)
    : present_(&present), first_(first), world_(world), backend_(backend) {
  if (first < 0 || first + present.size() > world) {
    throw std::invalid_argument("ranks " + std::to_string(first) + " to " +
                                std::to_string(first + present.size() - 1) + ": the world has " +
                                std::to_string(world));
  }
  scratch_ = backend.allocate(kScratchFloats * sizeof(float));
}

std::unique_ptr<Comm> PartialComm::split(int colour, int key) {
  std::unique_ptr<Comm> part = present_->split(colour, key);
  auto out = std::make_unique<PartialComm>(*part, first_, world_, backend_);
  out->owned_ = std::move(part);
  return out;
}

void PartialComm::count(Point point, std::size_t n_float) {
  PointStats& s = stats_of(point);
  ++s.calls;
  s.bytes += n_float * sizeof(float);
}

int PartialComm::present_root(int root) const {
  return root >= first_ && root < first_ + present_->size() ? root - first_ : 0;
}

void PartialComm::stand_in(const float* data, std::size_t count) {
  for (std::size_t at = 0; at < count; at += kScratchFloats) {
    const auto n = static_cast<std::int64_t>(std::min(kScratchFloats, count - at));
    backend_.copy_rows({reinterpret_cast<float*>(scratch_->data()), 1, n}, {data + at, 1, n});
  }
}

void PartialComm::sum(Point point, float* data, std::size_t n, StreamHandle stream) {
  if (world_ == 1) return;
  count(point, n);
  if (present_->size() > 1) return present_->sum(point, data, n, stream);
  stand_in(data, n);
}

void PartialComm::gather_rows(Point point, const float* mine, float* all, std::size_t n_row,
                              std::span<const std::size_t> widths, StreamHandle stream) {
  const std::int64_t total = columns_before(widths, world_);
  count(point, n_row * static_cast<std::size_t>(total));
  const auto rows = static_cast<std::int64_t>(n_row);
  const std::span<const std::size_t> here =
      widths.subspan(static_cast<std::size_t>(first_), static_cast<std::size_t>(present_->size()));
  const std::int64_t width = columns_before(here, present_->size());
  float* to = all + columns_before(widths, first_);
  fill(mine, all, rows, widths);
  if (present_->size() == 1) return;
  if (rows == 1) return present_->gather_rows(point, mine, to, n_row, here, stream);
  // Theirs lie side by side only where all are there: some rows at a time by way of the scratch.
  const std::int64_t most =
      static_cast<std::int64_t>(kScratchFloats) / std::max<std::int64_t>(1, width);
  if (most < 1) throw std::logic_error("gather_rows: a row is longer than the scratch");
  const auto own = static_cast<std::int64_t>(here[static_cast<std::size_t>(present_->rank())]);
  auto* joined = reinterpret_cast<float*>(scratch_->data());
  for (std::int64_t at = 0; at < rows; at += most) {
    const std::int64_t n = std::min(most, rows - at);
    present_->gather_rows(point, mine + at * own, joined, static_cast<std::size_t>(n), here,
                          stream);
    backend_.copy_rows({to + at * total, n, width, total}, {joined, n, width});
  }
}

// Every rank's columns, the caller's at their place.
void PartialComm::fill(const float* mine, float* all, std::int64_t n_row,
                       std::span<const std::size_t> widths) {
  const auto own = static_cast<std::int64_t>(widths[static_cast<std::size_t>(rank())]);
  const std::int64_t total = columns_before(widths, world_);
  const bool even = std::all_of(widths.begin(), widths.end(),
                                [&](std::size_t w) { return static_cast<std::int64_t>(w) == own; });
  // One token's gather of even bands is one copy, as the real one is one call.
  if (even && n_row == 1)
    return backend_.copy_rows({all, world_, own, own}, {mine, world_, own, 0});
  for (int r = 0; r < world_; ++r) {
    const std::int64_t n =
        std::min(own, static_cast<std::int64_t>(widths[static_cast<std::size_t>(r)]));
    backend_.copy_rows({all + columns_before(widths, r), n_row, n, total}, {mine, n_row, n, own});
  }
}

void PartialComm::send(Point, const float*, std::size_t, int, StreamHandle) {
  throw std::logic_error("send: a partial world has one stage");
}
void PartialComm::recv(Point, float*, std::size_t, int, StreamHandle) {
  throw std::logic_error("recv: a partial world has one stage");
}

void PartialComm::broadcast(Point point, std::span<std::byte> data, int root) {
  present_->broadcast(point, data, present_root(root));
}
std::vector<std::vector<std::byte>> PartialComm::gather_bytes(Point point,
                                                              std::span<const std::byte> mine,
                                                              int root) {
  return present_->gather_bytes(point, mine, present_root(root));
}
std::vector<std::vector<std::byte>> PartialComm::all_gather_bytes(Point point,
                                                                  std::span<const std::byte> mine) {
  return present_->all_gather_bytes(point, mine);
}

}  // namespace k3
