#!/usr/bin/env bash
# k3plan check-node from outside: what it says of ranks that are well, and of ranks that are not.
#   check_node.sh <launch/mpirun.sh> <bin> <k3-nano.gguf> <folder with a stand-in of the GPU driver's library>
set -uo pipefail
mpirun=$1 k3plan=$(readlink -f "$2")/k3plan nano=$(readlink -f "$3") gpus=$4
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
failures=0
fail() {
  echo "FAILED: $1"
  sed 's/^/    /' "$scratch/out" "$scratch/err" | cut -c1-300
  failures=$((failures + 1))
}
# check <name> <exit code> <faults> <command ...>
check() {
  local name=$1 code=$2 n=$3 rc=0 found
  shift 3
  timeout 60 "$@" >"$scratch/out" 2>"$scratch/err" </dev/null || rc=$?
  [ "$rc" -eq "$code" ] || fail "$name: exit code $rc, expected $code"
  found=$(grep -c '^fault: ' "$scratch/out")
  [ "$found" -eq "$n" ] || fail "$name: $found faults, expected $n"
}
says() { grep -qE "$2" "$scratch/out" || fail "$1: no line like '$2'"; }

check "two ranks" 0 0 "$mpirun" -n 2 "$k3plan" check-node --model "$nano"
says "two ranks" '^[^:]+: 2 ranks, [0-9]+ CPUs; /dev/shm [0-9]+ MiB free; memlock .*; Open MPI v[0-9.]+, ob1 over self, '
says "two ranks" '^rank 1/2 \([^)]+\): CPUs [0-9]'
says "two ranks" '^no fault found$'

mkdir "$scratch/other"
cp "$nano" "$scratch/here.gguf" && cp "$(dirname "$nano")/../models/k3-iqmix.gguf" "$scratch/other/here.gguf"
check "another model" 3 1 "$mpirun" -n 1 -wdir "$scratch" "$k3plan" check-node --model here.gguf : \
  -n 1 -wdir "$scratch/other" "$k3plan" check-node --model here.gguf
says "another model" '^fault: rank 1/2 \([^)]+\): its model has the fingerprint [0-9a-f]{32}, that of rank 0 has [0-9a-f]{32}: they are other files$'
check "no model" 3 1 "$mpirun" -n 1 -wdir "$scratch" "$k3plan" check-node --model here.gguf : \
  -n 1 -wdir / "$k3plan" check-node --model here.gguf
says "no model" '^fault: rank 1/2 \([^)]+\): here.gguf: no such file'

check "few open files" 3 1 prlimit --nofile=200:200 "$k3plan" check-node
says "few open files" '^fault: [^:]+: a process may have 200 files open, expected 1024 or more: ulimit -n 1024$'
check "no driver" 3 1 "$k3plan" check-node --backend cuda
says "no driver" '^fault: [^:]+: no GPU driver '
check "a bad GPU" 3 6 env LD_LIBRARY_PATH="$gpus" "$k3plan" check-node --backend cuda
says "a bad GPU" '^[^:]+: driver 550.54.15, 2 GPUs'
says "a bad GPU" '^fault: [^:]+: GPU 1 \(00000000:AA:00.0\): 41.0 of 140.0 GiB are in use already, of process 4711$'
check "GPUs that the job does not use" 0 0 env LD_LIBRARY_PATH="$gpus" "$k3plan" check-node

check "an unknown backend" 2 0 "$mpirun" -n 2 "$k3plan" check-node --backend tpu
[ "$(grep -c '^rank 0/2: --backend tpu: valid: cpu, cuda$' "$scratch/err")" -eq 1 ] || fail "an unknown backend: not one line"

[ "$failures" -eq 0 ] || { echo "$failures failures"; exit 1; }
echo "all well in $SECONDS s"
