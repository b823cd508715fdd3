#!/usr/bin/env bash
# mpirun with the flags that a small machine, a container or root needs; everything else is passed on:
#   launch/mpirun.sh [--net tcp|ucx] [--if eth0] [--as-root] [--dry-run] -n 2 build/cpu/bin/k3run --model ...
# --net, --if: what data between nodes travel over, and by which interface; without them Open MPI chooses.
# The one place where these flags are written: the tests, quickstart.sh, k3.sbatch and the README all come through here.
set -euo pipefail
# shellcheck source=launch/mpi-env.sh
. "$(dirname "${BASH_SOURCE[0]}")/mpi-env.sh"

net="" interface="" dry=no as_root=no
while :; do
  case "${1:-}" in
    --net) net=${2:-} ;;
    --if) interface=${2:-} ;;
    --dry-run) dry=yes && shift && continue ;;
    --as-root) as_root=yes && shift && continue ;;
    *) break ;;
  esac
  [ $# -ge 2 ] || { echo "mpirun.sh: $1: no value" >&2; exit 2; }
  shift 2
done
mpi_network "$net" "$interface"

flags=(--oversubscribe --bind-to none)

root_is_meant $as_root
[ "$(id -u)" -eq 0 ] && flags+=(--allow-run-as-root)

# A host that is gone without a word (a cut link, no power): Open MPI looks after five minutes, and ranks that give up waiting
# before it does leave mpirun hanging. 10 s of silence and five questions are 20 s, well below the ranks' --time-limit.
flags+=(--mca oob_tcp_keepalive_time 10 --mca oob_tcp_keepalive_intvl 2 --mca oob_tcp_keepalive_probes 5)

ranks=1 previous=""
for word in "$@"; do
  case "$previous" in -n | -np | -c | --n | --np) ranks=$word && break ;; esac
  previous=$word
done
mpi_environment "$ranks"
# mpirun passes OMPI_MCA_ on by itself.
for name in NCCL_NVLS_ENABLE HWLOC_COMPONENTS UCX_NET_DEVICES NCCL_SOCKET_IFNAME; do
  [ -z "${!name+set}" ] || flags+=(-x "$name")
done
if [ $dry = yes ]; then
  env | grep -E '^(OMPI_MCA_|UCX_|NCCL_|HWLOC_)' | sort
  printf '%q ' mpirun "${flags[@]}" "$@"
  printf '\n'
  exit
fi
exec mpirun "${flags[@]}" "$@"
