#include "comm/launcher.h"

#include <unistd.h>

#include <array>
#include <charconv>
#include <cstdlib>

namespace k3 {
namespace {

// A variable that is not a plain number is treated as absent: sites put all sorts of things there,
// and SLURM's "2(x3)" lists are not counts.
std::optional<int> number(const Environment& environment, const char* name) {
  const std::optional<std::string> text = environment(name);
  if (!text || text->empty()) return std::nullopt;
  int value = 0;
  const char* end = text->data() + text->size();
  const auto [ptr, error] = std::from_chars(text->data(), end, value);
  if (error != std::errc() || ptr != end || value < 0) return std::nullopt;
  return value;
}

struct Dialect {
  const char* launcher;
  const char* world;
  const char* rank;
  const char* local_rank;
  const char* local_size;
};

// In order of trust. mpirun inside a Slurm job passes SLURM_* on, and there they describe the job
// or mpirun's own daemons; SLURM_STEP_NUM_TASKS counts the tasks of this srun, SLURM_NTASKS perhaps
// only those of the job.
constexpr std::array<Dialect, 4> kDialects{{
    {"mpirun (Open MPI)", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK",
     "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"mpiexec (PMI)", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    {"srun (Slurm)", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID",
     "SLURM_NTASKS_PER_NODE"},
    {"srun (Slurm)", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"},
}};

std::string host_name() {
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) != 0) return "unknown host";
  return name.data();
}

}  // namespace

LaunchError::LaunchError(std::string line)
    : std::system_error(std::make_error_code(std::errc::operation_not_permitted), line),
      line_(std::move(line)) {}

LaunchFacts read_launch_facts() {
  return read_launch_facts([](const char* name) -> std::optional<std::string> {
    const char* value = std::getenv(name);
    if (value == nullptr) return std::nullopt;
    return std::string(value);
  });
}

LaunchFacts read_launch_facts(const Environment& environment) {
  LaunchFacts facts;
  facts.host = host_name();
  facts.job = environment("SLURM_JOB_ID").value_or("");
  facts.nodes = number(environment, "SLURM_NNODES");
  for (const Dialect& dialect : kDialects) {
    const std::optional<int> world = number(environment, dialect.world);
    if (!world) continue;
    facts.launcher = dialect.launcher;
    facts.source = dialect.world;
    facts.scheduler_world = world;
    facts.scheduler_rank = number(environment, dialect.rank);
    facts.local_rank = number(environment, dialect.local_rank);
    facts.local_size = number(environment, dialect.local_size);
    return facts;
  }
  // Open MPI 5 and Slurm's PMIx name the rank and not the size.
  if (environment("PMIX_NAMESPACE")) {
    facts.launcher = "PMIx";
    facts.scheduler_rank = number(environment, "PMIX_RANK");
  }
  return facts;
}

void check_singletons(const LaunchFacts& facts, int mpi_world) {
  if (mpi_world != 1 || facts.scheduler_world.value_or(1) <= 1) return;
  const std::string n = std::to_string(*facts.scheduler_world);
  throw LaunchError(
      facts.host + ": " + facts.launcher + " started " + n + " processes (" + facts.source + "=" +
      n +
      ") but MPI sees a world of 1: start with srun --mpi=pmix, or with the mpirun of the Open MPI "
      "that this program was built with (one process on purpose: srun -n 1, mpirun -n 1)");
}

}  // namespace k3
