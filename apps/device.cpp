#include "apps/device.h"

#include <sched.h>

#include <algorithm>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include <fmt/core.h>

#include "apps/cpus.h"
#include "apps/local_main.h"
#include "comm/nccl_comm.h"
#include "comm/peer_comm.h"
#include "kernels/cpu/places.h"
#include "kernels/cuda_devices.h"
#include "kernels/gpu_status.h"
#include "rank/fault.h"

namespace k3 {
namespace {

// One device shown to each rank (Slurm's --gpus-per-task), or one list shown to all.
int pick_device(const RunConfig& config, const LocalGroup& local) {
  const auto n_device = static_cast<int>(cuda_devices().size());
  if (n_device == 0) {
    throw DeviceError(
        "--backend cuda: no CUDA device (driver missing, or CUDA_VISIBLE_DEVICES empty)");
  }
  if (n_device == 1) return 0;
  if (local.rank < n_device) return local.rank;
  if (config.share_gpu) return local.rank % n_device;
  throw std::invalid_argument(
      fmt::format("--backend cuda: {} ranks on this node, {} devices: start at most one rank a "
                  "device, or give --share-gpu",
                  local.size, n_device));
}

// "GPU-5f2c01a9-..." as 32 hex digits, which end a CUDA backend's memory_domain().
std::string digits_of(const std::string& uuid) {
  std::string out;
  for (const char c : uuid.substr(uuid.find('-') + 1)) {
    if (c != '-') out += c;
  }
  return out;
}

// This thread, and those it starts from now on, keep to CPUs near the device, among those that the launcher allows: what they
// pin lies near it then. Where the system does not know which are near, or none of them is allowed, nothing happens.
void stay_near(const Backend& backend) {
  const std::string domain = backend.memory_domain();
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  cpu_set_t near;
  CPU_ZERO(&near);
  for (const GpuStatus& gpu : gpu_report().gpus) {
    const std::string digits = digits_of(gpu.uuid);
    if (digits.empty() || !domain.ends_with(digits)) continue;
    for (const int c : cpu::cpus_near(gpu.bus_id)) {
      if (CPU_ISSET(c, &allowed)) CPU_SET(c, &near);
    }
  }
  if (CPU_COUNT(&near) > 0) sched_setaffinity(0, sizeof near, &near);
}

// Ranks that would use the same device, unless they were told to.
void refuse_sharing(const RunConfig& config, const Backend& backend, Comm& control) {
  const std::size_t mine = std::hash<std::string>{}(backend.memory_domain());
  const auto all = control.all_gather_bytes(Point::kAgree, std::as_bytes(std::span(&mine, 1)));
  together(control, [&] {
    if (config.share_gpu) return;
    for (int r = 0; r < control.size(); ++r) {
      const auto& other = all[static_cast<std::size_t>(r)];
      if (r == control.rank() ||
          !std::equal(other.begin(), other.end(), std::as_bytes(std::span(&mine, 1)).begin())) {
        continue;
      }
      throw std::invalid_argument(
          fmt::format("{}: rank {} has the same device; give each rank its own, or --share-gpu",
                      backend.describe(), r));
    }
  });
}

}  // namespace

RankDevice make_rank_device(const RunConfig& config, World& world, Comm& control) {
  RankDevice d;
  if (config.backend == "cpu") {
    const CpuOptions options = cpu_options(config, world, control);
    together(control, [&] { d.backend = make_cpu_backend(options); });
    return d;
  }
  const LocalGroup local = local_group(world);
  // Drivers may take their time, and not the same on every rank.
  constexpr double kStart_s = 60;
  const double limit_s = control.time_limit();
  control.set_time_limit(limit_s > 0 ? std::max(limit_s, kStart_s) : 0);
  together(control, [&] {
    d.backend =
        make_cuda_backend(pick_device(config, local), config.precision, config.reproducible);
  });
  if (config.bind) together(control, [&] { stay_near(*d.backend); });
  refuse_sharing(config, *d.backend, control);
  const std::string device = d.backend->describe();
  world.board()->set_device(device.substr(0, device.find(':')));
  if (control.size() == 1) return d;
  std::string what;
  const auto messages = [&] {
    auto comm = make_mpi_comm(world);
    comm->set_time_limit(control.time_limit());
    return comm;
  };
  if (config.comm == "mpi" || config.share_gpu) {
    d.stage = std::make_unique<DeviceStage>(*d.backend);
    d.own = make_mpi_comm(world, d.stage.get());
    what = "MPI, through the host";
  } else if (config.comm == "peer") {
    d.own = make_peer_comm(messages());
    what = "peer memory";
  } else {
    d.own = make_nccl_comm(messages());
    what = nccl_library_version();
  }
  control.set_time_limit(limit_s);
  d.own->set_time_limit(limit_s);
  if (control.rank() == 0) print_line("data between ranks: " + what);
  return d;
}

}  // namespace k3
