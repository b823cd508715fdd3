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
  kPolite,  // poll a moment, then sleep between polls; no limit: the other side may be a person
};

class MpiExchange {
 public:
  // Owns `comm`. world_rank[r] is the number that rank r of the group has in the world.
  MpiExchange(MPI_Comm comm, std::vector<int> world_rank, int world_size, std::string host,
              std::size_t max_message_bytes, std::shared_ptr<const double> time_limit_s);
  ~MpiExchange();
  MpiExchange(const MpiExchange&) = delete;
  MpiExchange& operator=(const MpiExchange&) = delete;

  MPI_Comm comm() const { return comm_; }
  const std::vector<int>& world_rank() const { return world_rank_; }
  int world_size() const { return world_size_; }
  const std::string& host() const { return host_; }

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
  std::string peer_name(int peer) const { return "rank " + std::to_string(world_rank_[peer]); }
  std::string me() const;

  MPI_Comm comm_;
  int rank_ = 0;
  std::vector<int> world_rank_;
  int world_size_;
  std::string host_;
  std::size_t max_message_bytes_;
  std::shared_ptr<const double> time_limit_s_;
  bool broken_ = false;
  // Parallel arrays; they grow to the largest exchange and are then reused.
  std::vector<MPI_Request> requests_;
  std::vector<MPI_Status> statuses_;
  std::vector<Posted> posted_;
};

}  // namespace k3
