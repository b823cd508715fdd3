#include "comm/mpi_exchange.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <exception>
#include <fstream>
#include <thread>

namespace k3 {
namespace {

// A polite wait polls this long before it starts to sleep: longer than rank 0 needs between two
// steps of a busy run.
constexpr double kPoliteSpin_s = 0.004;
constexpr std::chrono::microseconds kShortestNap{20};
constexpr std::chrono::microseconds kLongestNap{1000};
constexpr double kLookInterval_s = 0.25;

// A process of this host that SIGSTOP holds. Where the system does not say: false.
bool is_stopped(int pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return false;
  const std::size_t name_end = line.rfind(')');  // the name may hold anything
  return name_end != std::string::npos && line.compare(name_end, 3, ") T") == 0;
}

std::string error_text(int error) {
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  if (MPI_Error_string(error, text.data(), &length) != MPI_SUCCESS) {
    return "MPI error " + std::to_string(error);
  }
  return std::string(text.data(), static_cast<std::size_t>(length));
}

}  // namespace

std::string WorldFacts::number_and_host(int rank) const {
  const std::string& elsewhere = other_host[static_cast<std::size_t>(rank)];
  return std::to_string(rank) + (elsewhere.empty() ? "" : " on " + elsewhere);
}

MpiExchange::MpiExchange(MPI_Comm comm, std::vector<int> world_rank,
                         std::shared_ptr<const WorldFacts> world, std::size_t max_message_bytes,
                         std::shared_ptr<const double> time_limit_s)
    : comm_(comm),
      world_rank_(std::move(world_rank)),
      world_(std::move(world)),
      max_message_bytes_(max_message_bytes),
      time_limit_s_(std::move(time_limit_s)) {
  MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
  MPI_Comm_rank(comm_, &rank_);
}

MpiExchange::~MpiExchange() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  // Freeing is collective; a rank that fails cannot count on the others.
  if (!finalized && !broken_ && std::uncaught_exceptions() == 0) MPI_Comm_free(&comm_);
}

// Ranks that are at different Points never take each other's messages for their own.
int MpiExchange::tag(const Call& call) const { return static_cast<int>(call.point()); }

std::string MpiExchange::me() const {
  const std::string device = world_->board->device();
  return "rank " + std::to_string(world_rank_[rank_]) + "/" + std::to_string(world_->size) + " (" +
         world_->host + (device.empty() ? "" : ", ") + device + ")";
}

void MpiExchange::fail(const Call& call, const std::string& text) {
  broken_ = true;
  throw CommError(me() + ": " + call.name() + ": " + text);
}

void MpiExchange::check(const Call& call, int error) {
  if (error != MPI_SUCCESS) fail(call, error_text(error));
}

void MpiExchange::check_usable(const Call& call) const {
  if (broken_)
    throw CommError(me() + ": " + call.name() + ": the group is unusable after an earlier failure");
}

void MpiExchange::send(const Call& call, const void* data, std::size_t bytes, int to) {
  check_usable(call);
  const char* at = static_cast<const char*>(data);
  do {
    const std::size_t piece = std::min(bytes, max_message_bytes_);
    MPI_Request request = MPI_REQUEST_NULL;
    const int error =
        MPI_Isend(at, static_cast<int>(piece), MPI_BYTE, to, tag(call), comm_, &request);
    if (error != MPI_SUCCESS) fail(call, "to " + peer_name(to) + ": " + error_text(error));
    requests_.push_back(request);
    posted_.push_back({to, static_cast<int>(piece), false});
    at += piece;
    bytes -= piece;
  } while (bytes > 0);
}

void MpiExchange::recv(const Call& call, void* data, std::size_t bytes, int from) {
  check_usable(call);
  char* at = static_cast<char*>(data);
  do {
    const std::size_t piece = std::min(bytes, max_message_bytes_);
    MPI_Request request = MPI_REQUEST_NULL;
    const int error =
        MPI_Irecv(at, static_cast<int>(piece), MPI_BYTE, from, tag(call), comm_, &request);
    if (error != MPI_SUCCESS) fail(call, "from " + peer_name(from) + ": " + error_text(error));
    requests_.push_back(request);
    posted_.push_back({from, static_cast<int>(piece), true});
    at += piece;
    bytes -= piece;
  } while (bytes > 0);
}

void MpiExchange::finish(const Call& call, Patience patience) {
  check_usable(call);
  statuses_.resize(requests_.size());
  const int n = static_cast<int>(requests_.size());
  const double limit_s = patience == Patience::kBusy ? *time_limit_s_ : 0;
  const bool watch_clock = limit_s > 0 || patience == Patience::kPolite;
  auto nap = kShortestNap;
  double next_look_s = kLookInterval_s;
  stopped_since_s_ = -1;
  for (unsigned polls = 1;; ++polls) {
    int done = 0;
    const int error = MPI_Testall(n, requests_.data(), &done, statuses_.data());
    if (error != MPI_SUCCESS) fail_messages(call, error);
    if (done) break;
    // Reading the clock costs as much as a poll; a limit need not be kept to the microsecond.
    if (!watch_clock || polls % 16 != 0) continue;
    const double waited_s = call.seconds();
    if (limit_s > 0 && waited_s > limit_s) wait_expired(call);
    if (patience == Patience::kPolite && waited_s > kPoliteSpin_s) {
      std::this_thread::sleep_for(nap);
      nap = std::min(nap * 2, kLongestNap);
      polls = 15;  // from now on one poll for each nap
      if (waited_s < next_look_s) continue;
      next_look_s = waited_s + kLookInterval_s;
      look_for_stopped(call);
    }
  }
  check_lengths(call);
  requests_.clear();
  posted_.clear();
}

void MpiExchange::look_for_stopped(const Call& call) {
  const double limit_s = *time_limit_s_;
  if (limit_s <= 0) return;
  const bool stopped = std::any_of(posted_.begin(), posted_.end(), [&](const Posted& m) {
    const auto peer = static_cast<std::size_t>(world_rank_[static_cast<std::size_t>(m.peer)]);
    return m.is_recv && world_->pid[peer] != 0 && is_stopped(world_->pid[peer]);
  });
  if (!stopped) {
    stopped_since_s_ = -1;
  } else if (stopped_since_s_ < 0) {
    stopped_since_s_ = call.seconds();
  } else if (call.seconds() - stopped_since_s_ > limit_s) {
    wait_expired(call);
  }
}

void MpiExchange::fail_messages(const Call& call, int error) {
  if (error == MPI_ERR_IN_STATUS) {
    for (std::size_t i = 0; i < posted_.size(); ++i) {
      const int own = statuses_[i].MPI_ERROR;
      if (own == MPI_SUCCESS || own == MPI_ERR_PENDING) continue;
      fail(call, (posted_[i].is_recv ? "from " : "to ") + peer_name(posted_[i].peer) + ": " +
                     error_text(own));
    }
  }
  fail(call, error_text(error));
}

void MpiExchange::check_lengths(const Call& call) {
  for (std::size_t i = 0; i < posted_.size(); ++i) {
    const Posted& message = posted_[i];
    if (!message.is_recv) continue;
    // A longer message is MPI's own error (truncation); a shorter one is none, and would leave old
    // bytes behind.
    int bytes = 0;
    check(call, MPI_Get_count(&statuses_[i], MPI_BYTE, &bytes));
    if (bytes == message.bytes) continue;
    fail(call, peer_name(message.peer) + " sent " + std::to_string(bytes) + " bytes, expected " +
                   std::to_string(message.bytes));
  }
}

void MpiExchange::wait_expired(const Call& call) {
  // Which messages are still missing; receives first: a rank that does not send is the one to look
  // at.
  std::vector<int> silent;
  std::vector<int> deaf;
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    int done = 1;
    MPI_Status status;
    if (requests_[i] != MPI_REQUEST_NULL) MPI_Test(&requests_[i], &done, &status);
    if (done) continue;
    std::vector<int>& list = posted_[i].is_recv ? silent : deaf;
    const int peer = world_rank_[posted_[i].peer];
    if (std::find(list.begin(), list.end(), peer) == list.end()) list.push_back(peer);
    if (posted_[i].is_recv)
      MPI_Cancel(&requests_[i]);  // our memory may go away as the exception unwinds
    MPI_Request_free(&requests_[i]);
  }
  const bool to_send = silent.empty();
  std::string who;
  for (int peer : to_send ? deaf : silent)
    who += (who.empty() ? "" : ", ") + world_->number_and_host(peer);
  std::array<char, 32> waited{};
  std::snprintf(waited.data(), waited.size(), "%.3g", call.seconds());
  broken_ = true;
  throw CommError(me() + ": waited " + waited.data() + " s in " + call.name() +
                  (to_send ? " to send to rank " : " for rank ") + who);
}

}  // namespace k3
