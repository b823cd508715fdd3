#!/usr/bin/env bash
# What launch/mpirun.sh makes of its own options, without starting anything.
#   settings.sh <launch/mpirun.sh>
set -uo pipefail
mpirun=$1
failures=0
fail() {
  echo "FAILED: $1"
  sed 's/^/    /' <<<"$text"
  failures=$((failures + 1))
}
# shown <name> <exit code> <line, a regular expression> <options ...>
shown() {
  local name=$1 code=$2 line=$3 rc=0
  shift 3
  text=$("$mpirun" "$@" 2>&1) || rc=$?
  [ "$rc" -eq "$code" ] || fail "$name: exit code $rc, expected $code"
  grep -qE -- "$line" <<<"$text" || fail "$name: no line like '$line'"
}
export OMPI_ALLOW_RUN_AS_ROOT=1

shown "a plain job" 0 '^mpirun --oversubscribe --bind-to none .*-x NCCL_NVLS_ENABLE -x HWLOC_COMPONENTS -n 2 true ' --dry-run -n 2 true
grep -q '^OMPI_MCA_pml=' <<<"$text" && fail "a plain job: the network is chosen"
shown "tcp" 0 '^OMPI_MCA_pml=ob1$' --net tcp --dry-run -n 2 true
shown "ucx" 0 '^OMPI_MCA_pml=ucx$' --net ucx --dry-run -n 2 true
shown "an interface" 0 '^OMPI_MCA_btl_tcp_if_include=lo$' --if lo --dry-run -n 2 true
grep -q -- '-x UCX_NET_DEVICES -x NCCL_SOCKET_IFNAME ' <<<"$text" || fail "an interface: UCX and NCCL are not told"
shown "a device of UCX's" 0 '^UCX_NET_DEVICES=mlx5_0:1$' --net ucx --if mlx5_0:1 --dry-run -n 2 true
grep -q '^OMPI_MCA_btl_tcp' <<<"$text" && fail "a device of UCX's: TCP is told of it"
shown "no such interface" 2 '^--if none0: no such interface on .*: .*lo' --net tcp --if none0 --dry-run -n 2 true
shown "no such network" 2 '^--net snail: expected tcp or ucx$' --net snail --dry-run -n 2 true
shown "no value" 2 '^mpirun.sh: --net: no value$' --net
shown "many ranks" 0 '^OMPI_MCA_mpi_yield_when_idle=1$' --dry-run -n 4096 true

# as_root <yes or no> <in a container: true or false>
as_root() {
  (
    unset OMPI_ALLOW_RUN_AS_ROOT
    # shellcheck source=launch/mpi-env.sh
    . "$(dirname "$mpirun")/mpi-env.sh"
    eval "in_container() { $2; }"
    id() { echo 0; }
    root_is_meant "$1"
  ) 2>&1
}
text=$(as_root no false) && fail "root: not refused"
grep -q '^running as root, .* give --as-root' <<<"$text" || fail "root: no line"
text=$(as_root yes false) || fail "root: refused though asked for"
text=$(as_root no true) || fail "root: refused in a container"

[ "$failures" -eq 0 ] || { echo "$failures failures"; exit 1; }
echo "all well"
