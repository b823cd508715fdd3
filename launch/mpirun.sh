#!/usr/bin/env bash
# mpirun with the flags that a small machine, a container or root needs; everything else is passed on:
#   launch/mpirun.sh -n 2 build/cpu/bin/k3run --model ...
# The one place where these flags are written: the tests, quickstart.sh and the README all come through here.
set -euo pipefail

flags=(--oversubscribe --bind-to none)

# Open MPI refuses root unless told; nobody else should be told.
[ "$(id -u)" -eq 0 ] && flags+=(--allow-run-as-root)

# More ranks than cores: a rank that spins in a collective takes the core from the rank it waits for.
ranks=1 previous=""
for word in "$@"; do
  case "$previous" in -n | -np | -c | --n | --np) ranks=$word && break ;; esac
  previous=$word
done
if [ "$ranks" -gt "$(nproc)" ]; then
  flags+=(--mca mpi_yield_when_idle 1)
fi

# Containers usually forbid process_vm_readv, and Open MPI complains once per message instead of doing without.
if [ -f /.dockerenv ] || [ -f /run/.containerenv ]; then
  flags+=(--mca btl_vader_single_copy_mechanism none)
fi

# hwloc's OpenGL plugin asks ten X displays for GPUs in every process; where localhost does not resolve that takes seconds.
export HWLOC_COMPONENTS="${HWLOC_COMPONENTS:--gl}"

# NVLink multicast (NVLS) gains nothing for the small messages of decoding, and some sites forbid it, for a program that ends
# badly can leave the host's GPUs unusable. Set it to 1 to let NCCL use it.
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}"
flags+=(-x NCCL_NVLS_ENABLE)

exec mpirun "${flags[@]}" "$@"
