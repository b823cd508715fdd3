#include "rank/node_check.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <set>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace k3 {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(GpuProcess, pid, bytes)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(GpuStatus, index, name, uuid, bus_id, memory_bytes, used_bytes,
                                   processes, sm_mhz, most_sm_mhz, application_mhz, slowed_by,
                                   ecc_errors, exclusive, split, no_peer)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(GpuReport, driver, trouble, gpus)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(NetInterface, name, address, prefix, subnet, is_virtual,
                                   link_local)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(HostStatus, shm_bytes, shm_free_bytes, memlock_bytes, open_files,
                                   interfaces, rdma)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(NodeReport, host, version, mpi, transport, nccl, local_rank,
                                   local_size, cpus, machine_cpus, unix_s, model, model_trouble,
                                   status, gpu, gpu_cpus)

namespace {

constexpr double kMiB = 1024.0 * 1024;
constexpr double kGiB = 1024 * kMiB;
// Open MPI and NCCL keep buffers between the ranks of a host in /dev/shm. A container's usual 64 MiB is known to be too small
// for eight ranks (NVIDIA/nccl issues 290 and 342); the same a rank is the smallest that was not complained of.
constexpr double kShmPerRank = 64 * kMiB;
// Below this, InfiniBand cannot register a rank's messages.
constexpr double kMemlock = kGiB;
constexpr std::uint64_t kOpenFiles = 1024;
// A device that nobody uses holds some for its driver; more than this share is somebody's.
constexpr double kUsedShare = 0.02;
constexpr double kClockSkew_s = 2;

using Ranks = std::vector<NodeReport>;
using Faults = std::vector<std::string>;

// The first rank of each host, in rank order.
std::vector<const NodeReport*> hosts_of(const Ranks& ranks) {
  std::vector<const NodeReport*> out;
  for (const NodeReport& r : ranks) {
    if (std::none_of(out.begin(), out.end(), [&](auto* o) { return o->host == r.host; }))
      out.push_back(&r);
  }
  return out;
}

std::string rank_name(const Ranks& ranks, std::size_t r) {
  return fmt::format("rank {}/{} ({})", r, ranks.size(), ranks[r].host);
}

// "ob1" of "ob1 over tcp, vader": over what, depends on whether a host has several ranks.
std::string first_word(const std::string& text) { return text.substr(0, text.find(' ')); }

std::string or_none(const std::string& text) { return text.empty() ? "none" : text; }

void same_everywhere(const Ranks& ranks, Faults& faults) {
  struct Field {
    const char* name;
    std::function<std::string(const NodeReport&)> of;
  };
  const Field fields[] = {
      {"k3", [](const NodeReport& r) { return r.version; }},
      {"MPI", [](const NodeReport& r) { return r.mpi; }},
      {"the MPI transport", [](const NodeReport& r) { return first_word(r.transport); }},
      {"NCCL", [](const NodeReport& r) { return r.nccl; }},
      {"the GPU driver", [](const NodeReport& r) { return r.gpu.driver; }},
  };
  for (const NodeReport* host : hosts_of(ranks)) {
    for (const Field& f : fields) {
      const std::string first = f.of(ranks[0]);
      if (f.of(*host) != first) {
        faults.push_back(fmt::format("{}: {} is {}, on {} it is {}: they must be the same",
                                     host->host, f.name, or_none(f.of(*host)), ranks[0].host,
                                     or_none(first)));
      }
    }
    if (std::abs(host->unix_s - ranks[0].unix_s) > kClockSkew_s) {
      faults.push_back(fmt::format("{}: its clock is {:.1f} s {} that of {}: logs will not agree",
                                   host->host, std::abs(host->unix_s - ranks[0].unix_s),
                                   host->unix_s > ranks[0].unix_s ? "ahead of" : "behind",
                                   ranks[0].host));
    }
  }
}

void limits(const Ranks& ranks, Faults& faults) {
  for (const NodeReport* h : hosts_of(ranks)) {
    const HostStatus& s = h->status;
    const double need = kShmPerRank * h->local_size;
    if (h->local_size > 1 && static_cast<double>(s.shm_free_bytes) < need) {
      faults.push_back(
          fmt::format("{}: /dev/shm has {:.0f} MiB free of {:.0f}, {} ranks may need {:.0f}: free "
                      "it or make it "
                      "larger (docker run --shm-size)",
                      h->host, static_cast<double>(s.shm_free_bytes) / kMiB,
                      static_cast<double>(s.shm_bytes) / kMiB, h->local_size, need / kMiB));
    }
    if (!s.rdma.empty() && static_cast<double>(s.memlock_bytes) < kMemlock) {
      faults.push_back(fmt::format(
          "{}: a process may lock {:.1f} MiB of memory, {} needs more: ulimit -l unlimited (docker "
          "run --ulimit memlock=-1)",
          h->host, static_cast<double>(s.memlock_bytes) / kMiB, s.rdma[0]));
    }
    if (s.open_files < kOpenFiles) {
      faults.push_back(
          fmt::format("{}: a process may have {} files open, expected {} or more: "
                      "ulimit -n {}",
                      h->host, s.open_files, kOpenFiles, kOpenFiles));
    }
  }
}

void networks(const Ranks& ranks, Faults& faults) {
  const auto hosts = hosts_of(ranks);
  if (hosts.size() < 2) return;
  std::map<std::string, std::set<std::string>> hosts_in;  // by subnet
  std::map<std::string, const NodeReport*> owner;         // by address
  for (const NodeReport* h : hosts) {
    for (const NetInterface& i : h->status.interfaces) {
      const auto [first, is_new] = owner.emplace(i.address, h);
      if (!is_new && first->second != h) {
        faults.push_back(
            fmt::format("{}: {} has the address {}, which {} has too: keep MPI and NCCL off it "
                        "(launch/mpirun.sh --if NAME names the right one)",
                        h->host, i.name, i.address, first->second->host));
      }
      if (!i.is_virtual && !i.link_local) hosts_in[i.subnet].insert(h->host);
    }
  }
  const bool joined = std::any_of(hosts_in.begin(), hosts_in.end(), [&](const auto& subnet) {
    return subnet.second.size() == hosts.size();
  });
  if (joined) return;
  std::string seen;
  for (const auto& [subnet, names] : hosts_in)
    seen += fmt::format("{}{} ({})", seen.empty() ? "" : ", ", subnet, fmt::join(names, ", "));
  faults.push_back(fmt::format("no network has all {} hosts: {}", hosts.size(),
                               seen.empty() ? "none has an address" : seen));
}

void model(const Ranks& ranks, Faults& faults) {
  const auto first = std::find_if(ranks.begin(), ranks.end(),
                                  [](const NodeReport& r) { return !r.model.empty(); });
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    if (!ranks[r].model_trouble.empty()) {
      faults.push_back(rank_name(ranks, r) + ": " + ranks[r].model_trouble);
    } else if (first != ranks.end() && !ranks[r].model.empty() && ranks[r].model != first->model) {
      faults.push_back(fmt::format(
          "{}: its model has the fingerprint {}, that of rank {} has {}: they are other files",
          rank_name(ranks, r), ranks[r].model, first - ranks.begin(), first->model));
    }
  }
}

void cpus(const Ranks& ranks, const NodeCheckRequest& request, Faults& faults) {
  for (const NodeReport* h : hosts_of(ranks)) {
    std::set<int> together;
    for (const NodeReport& r : ranks) {
      if (r.host == h->host) together.insert(r.cpus.begin(), r.cpus.end());
    }
    const auto n = static_cast<int>(together.size());
    if (n < h->local_size) {
      faults.push_back(
          fmt::format("{}: {} ranks may use {} CPUs together: they wait for each other's CPU",
                      h->host, h->local_size, n));
    }
    if (n < h->machine_cpus / 2) {
      faults.push_back(fmt::format(
          "{}: its ranks may use {} of {} CPUs: the launcher bound them; mpirun --bind-to none, or "
          "sbatch --cpus-per-task",
          h->host, n, h->machine_cpus));
    }
  }
  if (!request.bind) return;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const NodeReport& me = ranks[r];
    if (me.gpu_cpus.empty() || me.cpus.empty()) continue;
    const bool near = std::any_of(me.cpus.begin(), me.cpus.end(), [&](int c) {
      return std::find(me.gpu_cpus.begin(), me.gpu_cpus.end(), c) != me.gpu_cpus.end();
    });
    if (!near) {
      faults.push_back(
          fmt::format("{}: its GPU is near CPUs {} to {}, and the launcher gave it none of them",
                      rank_name(ranks, r), me.gpu_cpus.front(), me.gpu_cpus.back()));
    }
  }
}

std::string gpu_name(const NodeReport& h, const GpuStatus& g) {
  return fmt::format("{}: GPU {} ({})", h.host, g.index, g.bus_id);
}

void gpu_faults(const NodeReport& h, const GpuStatus& g, Faults& faults) {
  const std::string name = gpu_name(h, g);
  if (static_cast<double>(g.used_bytes) > kUsedShare * static_cast<double>(g.memory_bytes)) {
    std::string who = "of processes that are not shown here";
    if (!g.processes.empty()) {
      who = "of process";
      for (const GpuProcess& p : g.processes) who += fmt::format(" {}", p.pid);
    }
    faults.push_back(fmt::format("{}: {:.1f} of {:.1f} GiB are in use already, {}", name,
                                 static_cast<double>(g.used_bytes) / kGiB,
                                 static_cast<double>(g.memory_bytes) / kGiB, who));
  }
  if (!g.slowed_by.empty()) {
    faults.push_back(fmt::format("{}: held at {} MHz of {} by {}", name, g.sm_mhz, g.most_sm_mhz,
                                 fmt::join(g.slowed_by, ", ")));
  }
  // Devices have a few steps below their limit as the default; less than nine tenths was somebody's choice.
  if (g.application_mhz > 0 && g.application_mhz * 10 < g.most_sm_mhz * 9) {
    faults.push_back(fmt::format("{}: set to {} MHz, it can do {} (nvidia-smi -rac)", name,
                                 g.application_mhz, g.most_sm_mhz));
  }
  if (g.ecc_errors > 0) {
    faults.push_back(fmt::format(
        "{}: {} memory errors that could not be corrected: results may be wrong; have it reset",
        name, g.ecc_errors));
  }
  if (g.split) faults.push_back(name + ": split (MIG): its parts cannot read each other's memory");
  if (!g.no_peer.empty()) {
    faults.push_back(
        fmt::format("{}: cannot read the memory of GPU {} directly: --comm peer will not do", name,
                    fmt::join(g.no_peer, ", ")));
  }
}

void gpus(const Ranks& ranks, const NodeCheckRequest& request, Faults& faults) {
  for (const NodeReport* h : hosts_of(ranks)) {
    if (!h->gpu.trouble.empty())
      faults.push_back(h->host + ": the GPU driver does not answer: " + h->gpu.trouble);
    if (!request.gpus) continue;
    if (h->gpu.driver.empty() && h->gpu.trouble.empty())
      faults.push_back(h->host + ": no GPU driver (libnvidia-ml.so.1 is not there)");
    const auto n = static_cast<int>(h->gpu.gpus.size());
    if (n > 0 && n < h->local_size && !request.share_gpu) {
      faults.push_back(fmt::format("{}: {} ranks, {} GPUs: start at most one rank a GPU", h->host,
                                   h->local_size, n));
    }
    for (const GpuStatus& g : h->gpu.gpus) gpu_faults(*h, g, faults);
  }
}

std::string interface_list(const NodeReport& h) {
  std::string out;
  for (const NetInterface& i : h.status.interfaces)
    out += fmt::format("{}{} {}/{}", out.empty() ? "" : ", ", i.name, i.address, i.prefix);
  for (const std::string& d : h.status.rdma) out += (out.empty() ? "" : ", ") + d;
  return out.empty() ? "none" : out;
}

std::string limit_text(std::uint64_t bytes) {
  return bytes == ~std::uint64_t{0} ? "unlimited"
                                    : fmt::format("{:.0f} MiB", static_cast<double>(bytes) / kMiB);
}

// 0-3,8: as Linux writes sets of CPUs.
std::string ranges(const std::vector<int>& sorted) {
  std::string out;
  for (std::size_t i = 0; i < sorted.size();) {
    std::size_t end = i + 1;
    while (end < sorted.size() && sorted[end] == sorted[end - 1] + 1) ++end;
    out += (out.empty() ? "" : ",") + std::to_string(sorted[i]);
    if (end - i > 1) out += "-" + std::to_string(sorted[end - 1]);
    i = end;
  }
  return out.empty() ? "none" : out;
}

}  // namespace

std::string to_json(const NodeReport& report) { return nlohmann::json(report).dump(); }

NodeReport node_report_from_json(const std::string& text) {
  try {
    return nlohmann::json::parse(text).get<NodeReport>();
  } catch (const nlohmann::json::exception& e) {
    throw std::invalid_argument(std::string("report of a node: ") + e.what());
  }
}

std::vector<std::string> node_faults(const std::vector<NodeReport>& ranks,
                                     const NodeCheckRequest& request) {
  Faults faults;
  if (ranks.empty()) return faults;
  same_everywhere(ranks, faults);
  gpus(ranks, request, faults);
  limits(ranks, faults);
  networks(ranks, faults);
  cpus(ranks, request, faults);
  model(ranks, faults);
  return faults;
}

std::vector<std::string> node_summary(const std::vector<NodeReport>& ranks) {
  std::vector<std::string> out;
  for (const NodeReport* h : hosts_of(ranks)) {
    const HostStatus& s = h->status;
    out.push_back(
        fmt::format("{}: {} ranks, {} CPUs; /dev/shm {:.0f} MiB free; memlock {}; {}; {}{}",
                    h->host, h->local_size, h->machine_cpus,
                    static_cast<double>(s.shm_free_bytes) / kMiB, limit_text(s.memlock_bytes),
                    interface_list(*h), h->mpi, h->transport.empty() ? "" : ", " + h->transport));
    if (h->gpu.driver.empty()) continue;
    out.push_back(fmt::format("{}: driver {}, {} GPUs{}", h->host, h->gpu.driver,
                              h->gpu.gpus.size(), h->nccl.empty() ? "" : ", " + h->nccl));
    for (const GpuStatus& g : h->gpu.gpus) {
      out.push_back(fmt::format("{}: {}, {:.1f} GiB, SM clock up to {} MHz", gpu_name(*h, g),
                                g.name, static_cast<double>(g.memory_bytes) / kGiB, g.most_sm_mhz));
    }
  }
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const NodeReport& me = ranks[r];
    const auto local = static_cast<std::size_t>(me.local_rank);
    std::string line = fmt::format("{}: CPUs {}", rank_name(ranks, r), ranges(me.cpus));
    if (local < me.gpu.gpus.size()) {
      line += fmt::format(", GPU {}", me.gpu.gpus[local].bus_id);
      if (!me.gpu_cpus.empty()) line += fmt::format(" near CPUs {}", ranges(me.gpu_cpus));
    }
    out.push_back(std::move(line));
  }
  return out;
}

std::string link_line(const std::vector<NodeReport>& ranks, const LinkTest& test) {
  std::string over;
  for (const NetCounter& c : test.carried) {
    // Acknowledgements and what else goes on are less than half of it.
    if (c.name == "lo" || static_cast<double>(c.bytes) < test.moved_bytes / 2) continue;
    over += (over.empty() ? "" : ", ") + c.name;
  }
  return fmt::format("{} - {}: {:.1f} us, {:.2f} GB/s, over {}",
                     rank_name(ranks, static_cast<std::size_t>(test.from)),
                     rank_name(ranks, static_cast<std::size_t>(test.to)), test.latency_us,
                     test.gb_s, over.empty() ? "memory or a device that counts nothing" : over);
}

}  // namespace k3
