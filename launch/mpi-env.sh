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

# mpi_network <tcp, ucx or empty> <interface or empty>: what data between nodes travel over; empty leaves the choice to Open MPI.
mpi_network() {
  case "$1" in
    "") ;;
    tcp) export OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,vader,tcp ;;
    # Debian's Open MPI leaves UCX out, and takes it for InfiniBand alone.
    ucx) export OMPI_MCA_pml=ucx OMPI_MCA_opal_common_ucx_tls=any OMPI_MCA_opal_common_ucx_devices=any ;;
    *) echo "--net $1: expected tcp or ucx" >&2 && return 2 ;;
  esac
  [ -n "$2" ] || return 0
  export UCX_NET_DEVICES=$2
  # What is no interface of the system's is a device of UCX's (mlx5_0:1).
  if ! interfaces | grep -qxF "$2"; then
    [ "$1" = ucx ] && return 0
    echo "--if $2: no such interface on $(hostname): $(interfaces | paste -sd' ')" >&2
    return 2
  fi
  export OMPI_MCA_btl_tcp_if_include=$2 OMPI_MCA_oob_tcp_if_include=$2 NCCL_SOCKET_IFNAME="=$2"
}

interfaces() { sed -nE 's/^ *([^ ]+):.*/\1/p' /proc/net/dev; }

# A container's first process is its job's own, or it says what it is.
in_container() {
  [ -f /.dockerenv ] || [ -f /run/.containerenv ] || ! grep -qxE 'systemd|init|launchd|runit|s6-svscan|openrc-init' /proc/1/comm
}

# root_is_meant <yes: --as-root was given>: a job that runs away as root can take the machine along, so root has to be asked for:
# by --as-root, by Open MPI's own variable, or by being in a container, where everybody is root.
root_is_meant() {
  [ "$(id -u)" -ne 0 ] || [ "$1" = yes ] || [ "${OMPI_ALLOW_RUN_AS_ROOT:-0}" = 1 ] || in_container && return 0
  echo "running as root, which nothing here needs: log in as a user, or give --as-root if it is meant" >&2
  return 3
}
