#include "comm/launcher.h"

#include <doctest/doctest.h>

#include <map>

namespace k3 {
namespace {

LaunchFacts facts_of(const std::map<std::string, std::string>& variables) {
  return read_launch_facts([&](const char* name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    if (found == variables.end()) return std::nullopt;
    return found->second;
  });
}

std::string refusal(const LaunchFacts& facts, int mpi_world) {
  try {
    check_singletons(facts, mpi_world);
  } catch (const std::system_error& error) {
    return error.what();
  }
  return "";
}

TEST_CASE("without a launcher nothing is known but the host, and a world of one is right") {
  const LaunchFacts facts = facts_of({});
  CHECK(facts.launcher == "none");
  CHECK_FALSE(facts.host.empty());
  CHECK_FALSE(facts.scheduler_world.has_value());
  CHECK(refusal(facts, 1).empty());
}

TEST_CASE("mpirun of Open MPI is believed over the Slurm job around it") {
  const LaunchFacts facts = facts_of({{"OMPI_COMM_WORLD_SIZE", "2"},
                                      {"OMPI_COMM_WORLD_RANK", "1"},
                                      {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                                      {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"},
                                      {"SLURM_NTASKS", "16"},
                                      {"SLURM_PROCID", "7"},
                                      {"SLURM_JOB_ID", "4711"},
                                      {"SLURM_NNODES", "2"}});
  CHECK(facts.launcher == "mpirun (Open MPI)");
  CHECK(facts.scheduler_world == 2);
  CHECK(facts.scheduler_rank == 1);
  CHECK(facts.local_rank == 0);
  CHECK(facts.local_size == 1);
  CHECK(facts.nodes == 2);
  CHECK(facts.job == "4711");
}

TEST_CASE("the size of a Slurm step is believed over that of the job") {
  CHECK(facts_of({{"SLURM_NTASKS", "16"}, {"SLURM_STEP_NUM_TASKS", "4"}}).scheduler_world == 4);
}

TEST_CASE("srun that started several singletons is refused with both numbers and the way out") {
  const LaunchFacts facts = facts_of({{"SLURM_NTASKS", "4"}, {"SLURM_PROCID", "2"}});
  const std::string line = refusal(facts, 1);
  CHECK(line.find("SLURM_NTASKS=4") != std::string::npos);
  CHECK(line.find("world of 1") != std::string::npos);
  CHECK(line.find("srun --mpi=pmix") != std::string::npos);
  CHECK(line.find('\n') == std::string::npos);
  CHECK(refusal(facts, 4).empty());
  CHECK(refusal(facts_of({{"SLURM_NTASKS", "1"}}), 1).empty());
}

TEST_CASE("mpirun or mpiexec of another MPI is refused too") {
  CHECK(refusal(facts_of({{"PMI_SIZE", "8"}}), 1).find("PMI_SIZE=8") != std::string::npos);
  CHECK(refusal(facts_of({{"OMPI_COMM_WORLD_SIZE", "3"}}), 1).find("3 processes") !=
        std::string::npos);
}

TEST_CASE("a value that is no count is treated as absent") {
  for (const char* odd : {"", "abc", "-4", "2(x3)", "4 ", "99999999999999"}) {
    CHECK_FALSE(facts_of({{"SLURM_NTASKS", odd}}).scheduler_world.has_value());
  }
}

}  // namespace
}  // namespace k3
