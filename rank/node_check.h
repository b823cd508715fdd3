// What would make a job fail, hang or crawl, found before it starts: each rank reports what it sees, and the reports together
// are judged. No rule guesses: each fault is a fact with its number, and what to do about it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/host_status.h"
#include "kernels/gpu_status.h"

namespace k3 {

// What one rank sees.
struct NodeReport {
  std::string host;
  std::string version;    // of k3: number and commit
  std::string mpi;        // library, one line
  std::string transport;  // what Open MPI chose; empty: not known
  std::string nccl;       // empty: no CUDA part in this build
  int local_rank = 0;     // among the ranks of this host
  int local_size = 1;
  std::vector<int> cpus;  // this rank may use
  int machine_cpus = 0;   // of the host
  double unix_s = 0;      // its clock, at the same moment as the others', but for a message's time
  std::string model;      // fingerprint; empty: none was asked for, or none could be had
  std::string model_trouble;  // why not
  HostStatus status;
  GpuReport gpu;
  std::vector<int> gpu_cpus;  // CPUs near this rank's GPU, where the system knows
};

std::string to_json(const NodeReport& report);
// Throws std::invalid_argument where it is not what to_json() writes.
NodeReport node_report_from_json(const std::string& text);

// A pair of ranks on different hosts, measured.
struct LinkTest {
  int from = 0;
  int to = 0;
  double latency_us = 0;   // half of the way there and back, 4 bytes
  double gb_s = 0;         // one direction, large messages
  double moved_bytes = 0;  // what the test itself sent and received on the first rank's host
  std::vector<NetCounter> carried;  // by how much the first rank's counters rose
};

struct NodeCheckRequest {
  bool gpus = false;       // the job is to run on GPUs
  bool share_gpu = false;  // several ranks a GPU are meant
  bool bind = true;
};

// One sentence a fault, ranks and hosts named; the same fault of several hosts is told for each. Empty: nothing is wrong.
std::vector<std::string> node_faults(const std::vector<NodeReport>& ranks,
                                     const NodeCheckRequest& request);

// What there is, a line a host, and how its ranks are placed.
std::vector<std::string> node_summary(const std::vector<NodeReport>& ranks);

// "rank 0 (h1) - rank 2 (h3): 45.1 us, 0.93 GB/s, over eth0", by the network whose counters rose; where none did: "over memory
// or a device that counts nothing".
std::string link_line(const std::vector<NodeReport>& ranks, const LinkTest& test);

}  // namespace k3
