// Messages under way on one MPI communicator: post sends and receives, then wait for all of them at
// once. Everything MpiComm does between ranks is built from it, because a list of plain messages
// can be waited for with a time limit, politely, and, when the wait is over in vain, says whose
// message is missing; a collective of MPI can do none of these.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "comm/call.h"

namespace k3 {

enum class Patience {
  kBusy,    // poll all the time: the others are about to be ready
  kPolite,  // poll a moment, then sleep between polls; no limit: the other side may wait for a person. But a process
            // that is stopped (SIGSTOP) and on this host counts as lost after the time limit
};

// What is the same for all groups of a world.
struct WorldFacts {
  int size = 1;
  std::string host;
  std::shared_ptr<CallBoard> board;
  std::vector<int> pid;  // of each rank of the world that is on this host; 0: on another
  std::vector<std::string> other_host;  // of each rank that is on another; empty: on this

  // "2", or "2 on node7" where that is another host than this rank's.
  std::string number_and_host(int rank) const;
};

class MpiExchange {
 public:
  // Owns `comm`. world_rank[r] is the number that rank r of the group has in the world.
  MpiExchange(MPI_Comm comm, std::vector<int> world_rank, std::shared_ptr<const WorldFacts> world,
              std::size_t max_message_bytes, std::shared_ptr<const double> time_limit_s);
  ~MpiExchange();
  MpiExchange(const MpiExchange&) = delete;
  MpiExchange& operator=(const MpiExchange&) = delete;

  MPI_Comm comm() const { return comm_; }
  const std::vector<int>& world_rank() const { return world_rank_; }
  const std::shared_ptr<const WorldFacts>& world() const { return world_; }
  // "rank 1/8 (node7, cuda 1)"
  std::string me() const;

  // Both sides must post the same number of bytes (0 too), and the memory must stay until finish()
  // returns.
  void send(const Call& call, const void* data, std::size_t bytes, int to);
  void recv(const Call& call, void* data, std::size_t bytes, int from);
  // Returns when all posted messages are done. Throws CommError; after that every call on this
  // object throws.
  void finish(const Call& call, Patience patience = Patience::kBusy);

  // Throws unless `error` is MPI_SUCCESS.
  void check(const Call& call, int error);

 private:
  struct Posted {
    int peer;
    int bytes;
    bool is_recv;
  };

  int tag(const Call& call) const;
  void check_usable(const Call& call) const;
  void check_lengths(const Call& call);
  [[noreturn]] void fail_messages(const Call& call, int error);
  [[noreturn]] void wait_expired(const Call& call);
  [[noreturn]] void fail(const Call& call, const std::string& text);
  std::string peer_name(int peer) const {
    return "rank " + world_->number_and_host(world_rank_[peer]);
  }
  void look_for_stopped(const Call& call);

  MPI_Comm comm_;
  int rank_ = 0;
  std::vector<int> world_rank_;
  std::shared_ptr<const WorldFacts> world_;
  std::size_t max_message_bytes_;
  std::shared_ptr<const double> time_limit_s_;
  bool broken_ = false;
  double stopped_since_s_ = -1;  // of the call under way: when its peer was first seen stopped
  // Parallel arrays; they grow to the largest exchange and are then reused.
  std::vector<MPI_Request> requests_;
  std::vector<MPI_Status> statuses_;
  std::vector<Posted> posted_;
};

}  // namespace k3
