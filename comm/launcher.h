// What mpirun or srun told this process through its environment. The only code that reads the
// environment.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <system_error>

namespace k3 {

// The process was started in a way it cannot work in (exit code 3). what() is the line alone.
class LaunchError : public std::system_error {
 public:
  explicit LaunchError(std::string line);
  const char* what() const noexcept override { return line_.c_str(); }

 private:
  std::string line_;
};

// Every number is absent where nothing was said about it.
struct LaunchFacts {
  std::string launcher = "none";  // "mpirun (Open MPI)", "mpiexec (PMI)", "srun (Slurm)" or "none"
  std::string source;             // the variable that scheduler_world came from
  std::string host;               // of this process
  std::string job;                // the scheduler's job id, or empty
  std::optional<int> scheduler_world;  // processes started together
  std::optional<int> scheduler_rank;
  std::optional<int> local_rank;  // among the processes of this host
  std::optional<int> local_size;
  std::optional<int> nodes;
};

using Environment = std::function<std::optional<std::string>(const char* name)>;

// The variables of this process. Read them before MPI starts: a singleton's MPI_Init writes some of
// its own.
LaunchFacts read_launch_facts();
LaunchFacts read_launch_facts(const Environment& environment);

// Throws LaunchError where MPI sees a world of one and the launcher started several: N processes
// that each believe to be rank 0 of 1 would all load the whole model and print the same answer.
void check_singletons(const LaunchFacts& facts, int mpi_world);

}  // namespace k3
