# Sourced by mpirun.sh and k3.sbatch: what the ranks' environment needs, however they are started.

# mpi_environment <ranks on a node>
mpi_environment() {
  # More ranks than cores: a rank that spins in a collective takes the core from the rank it waits for.
  if [ "$1" -gt "$(nproc)" ]; then export OMPI_MCA_mpi_yield_when_idle=1; fi

  # Containers usually forbid process_vm_readv, and Open MPI complains once per message instead of doing without.
  if [ -f /.dockerenv ] || [ -f /run/.containerenv ]; then export OMPI_MCA_btl_vader_single_copy_mechanism=none; fi

  # hwloc's OpenGL plugin asks ten X displays for GPUs in every process; where localhost does not resolve that takes seconds.
  export HWLOC_COMPONENTS="${HWLOC_COMPONENTS:--gl}"

  # NVLink multicast (NVLS) gains nothing for the small messages of decoding, and some sites forbid it, for a program that
  # ends badly can leave the host's GPUs unusable. Set it to 1 to let NCCL use it.
  export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}"
}
