// What ranks may do together. One object per group of ranks; every rank of the group makes the same
// calls in the same order. Backends: MpiComm (processes), ThreadComm (ranks as threads, for tests),
// NcclComm and PeerComm (devices).
//
// Two kinds of calls:
//  - data calls (sum, gather_rows, send, recv) work on the memory of the rank's device and are
//    ordered on `stream` (null on CPU ranks: the call has finished when it returns);
//  - control calls (broadcast, gather_bytes, agree, barrier) work on host memory and have finished
//    when they return.
// A failed call throws CommError, which names the Point, its number and the peer where known; the
// group is unusable from then on.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm/call_board.h"
#include "comm/points.h"

namespace k3 {

using StreamHandle = void*;  // a device stream as its backend knows it; null on CPU ranks

struct PointStats {
  std::uint64_t calls = 0;
  // Payload of this rank, once: sum, send, recv, broadcast: the data; gather_rows,
  // all_gather_bytes: the whole result; gather_bytes: the whole result on the root, its own bytes
  // elsewhere; agree and barrier: nothing.
  std::uint64_t bytes = 0;
  double seconds = 0;  // host time inside the call
};

// A call between ranks failed or waited too long. The line starts with "rank R/W" (numbers of the
// whole world), so who prints it adds nothing in front.
class CommError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// What ended a rank's work: one line for people, and the exit code that goes with its kind.
struct Fault {
  int exit_code = 1;
  std::string line;
};

// Thrown by agree() on every rank alike; `from` is the rank the fault came from.
class AgreedFault : public std::runtime_error {
 public:
  AgreedFault(int from, int world, const Fault& fault);
  int from() const { return from_; }
  const Fault& fault() const { return fault_; }

 private:
  int from_;
  Fault fault_;
};

// What a call is told beside its arguments.
struct CallContext {
  Place place;
  std::shared_ptr<CallBoard> board;  // null: nobody asks
};

struct PeerView;  // peer_view.h

class Comm {
 public:
  virtual ~Comm() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  // The number that rank r of this group has in the world.
  virtual int world_rank(int r) const { return r; }
  // "rank 1/8 (node7, cuda 1)", in numbers of the world: how error lines begin.
  virtual std::string who() const;

  // data[i] <- sum over ranks of data[i]; f32; added in rank order 0, 1, ..., so every rank holds
  // the same bits whatever the message size. size() == 1: returns at once and does not count.
  virtual void sum(Point point, float* data, std::size_t count, StreamHandle stream) = 0;

  // Column-wise gather for banded rows. Rank r holds mine[n_row, widths[r]] (contiguous);
  // afterwards every rank holds all[n_row, sum(widths)] with rank r's columns at sum(widths[0..r)).
  // `mine` must not overlap `all`. Widths may be 0.
  virtual void gather_rows(Point point, const float* mine, float* all, std::size_t n_row,
                           std::span<const std::size_t> widths, StreamHandle stream) = 0;

  // Point to point, f32, matched in order per pair of ranks. send() may or may not wait for the
  // matching recv().
  virtual void send(Point point, const float* data, std::size_t count, int to,
                    StreamHandle stream) = 0;
  virtual void recv(Point point, float* data, std::size_t count, int from, StreamHandle stream) = 0;

  // Root's bytes to all; every rank passes the same size.
  virtual void broadcast(Point point, std::span<std::byte> data, int root) = 0;

  // Every rank's bytes (any length, also 0) to root, in rank order; empty result elsewhere.
  virtual std::vector<std::vector<std::byte>> gather_bytes(Point point,
                                                           std::span<const std::byte> mine,
                                                           int root) = 0;

  // Every rank's bytes (same length on all ranks) to every rank, in rank order.
  virtual std::vector<std::vector<std::byte>> all_gather_bytes(Point point,
                                                               std::span<const std::byte> mine) = 0;

  // All ranks say whether they are well (nullopt) or what went wrong. Where at least one failed,
  // every rank throws AgreedFault with the lowest failing rank's fault. Collective.
  virtual void agree(const std::optional<Fault>& fault) = 0;

  virtual void barrier(Point point) = 0;

  // A new group of the ranks that pass the same colour >= 0, ordered by key then by rank.
  // Collective.
  virtual std::unique_ptr<Comm> split(int colour, int key) = 0;

  // Whether data calls may be recorded with Backend::capture and repeated without being made again.
  virtual bool capturable() const { return size() == 1; }
  // A recording that made these calls was repeated.
  void count_replay(std::span<const PointStats> once) {
    for (std::size_t p = 0; p < once.size(); ++p) {
      stats_[p].calls += once[p].calls;
      stats_[p].bytes += once[p].bytes;
    }
  }
  // A long stretch of work in which the ranks do not speak, such as loading: each says now and then how far it is (`done`
  // only grows), and learns whether the others still move. finish_pulses() ends the stretch, returns when all ranks have
  // called it, and is collective; pulse() is not. A rank that has not moved for the time limit makes the others throw
  // CommError naming it. Backends whose ranks cannot get stuck alone do nothing.
  virtual void pulse(std::uint64_t /*done*/, std::uint64_t /*total*/) {}
  virtual void finish_pulses() {}

  // The host is about to wait for `stream`, on which a graph with this object's data calls was launched: they count as
  // one call under way, for the time limit.
  virtual void replayed(StreamHandle /*stream*/) {}

  // Peer memory, for kernels that make a data call themselves; null: this backend has none.
  virtual const PeerView* peer_view() const { return nullptr; }
  // Counts such a call, and gives the number its waits are told by.
  virtual std::uint64_t count_fused(Point point, std::size_t bytes);

  // Reduce-scatter, in place: data[n_row, sum(widths)]; afterwards rank r's columns, those of gather_rows(), hold the sum over
  // ranks on rank r, with the bits of sum(); the other columns there mean nothing. Counts as a sum of one band's bytes or,
  // where the backend has no better way, of all.
  virtual void sum_bands(Point point, float* data, std::size_t n_row,
                         std::span<const std::size_t> widths, StreamHandle stream);

  // The place in the caller's work that calls belong to from now on.
  void set_place(Place place) { context_.place = place; }

  // Shows what this rank waits for, in any group of the world; null where nobody asks.
  const std::shared_ptr<CallBoard>& board() const { return context_.board; }

  const PointStats& stats(Point point) const { return stats_[static_cast<std::size_t>(point)]; }
  // Calls of every Point together.
  std::uint64_t total_calls() const;

  // How long one call may wait for other ranks before it throws CommError; 0, the default, is for
  // ever. Shared with the groups split from this one. A broadcast at Point::kStep is exempt: there
  // ranks wait for a person.
  void set_time_limit(double seconds) { *time_limit_s_ = seconds; }
  double time_limit() const { return *time_limit_s_; }

 protected:
  PointStats& stats_of(Point point) { return stats_[static_cast<std::size_t>(point)]; }

  CallContext context_;
  std::shared_ptr<double> time_limit_s_ = std::make_shared<double>(0);
  std::array<PointStats, static_cast<std::size_t>(Point::kCount)> stats_{};
};

}  // namespace k3
