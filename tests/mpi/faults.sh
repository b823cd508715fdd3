#!/usr/bin/env bash
# What happens to a job when one rank fails: everyone ends, within ten seconds, not with zero, after one clear line.
#   faults.sh <launch/mpirun.sh> <fault_driver>
set -uo pipefail
mpirun=$1
driver=$(readlink -f "$2")
out=$(mktemp)
trap 'rm -f "$out"' EXIT
failures=0

fail() {
  echo "FAILED: $1"
  sed 's/^/    /' "$out"
  failures=$((failures + 1))
}

# Processes of this driver that are still there; those that mpirun has just killed get a moment to go.
orphans() {
  local exe found
  for _ in $(seq 20); do
    found=""
    for exe in /proc/[0-9]*/exe; do
      [ "$(readlink "$exe" 2>/dev/null)" = "$driver" ] && found="$found $exe"
    done
    [ -z "$found" ] && return
    sleep 0.1
  done
  echo "$found"
}

# run_job <ranks> <mode>: sets rc and seconds; output in $out.
run_job() {
  local begin=$SECONDS
  timeout 30 "$mpirun" -n "$1" "$driver" "$2" >"$out" 2>&1
  rc=$?
  seconds=$((SECONDS - begin))
}

# expect <name> <exit code, or "any failure"> <line, a regular expression> <how many times>
expect() {
  local n
  n=$(grep -cE "$3" "$out")
  if [ "$2" = "any failure" ]; then
    [ "$rc" -ne 0 ] && [ "$rc" -ne 124 ] || fail "$1: exit code $rc"
  else
    [ "$rc" -eq "$2" ] || fail "$1: exit code $rc, expected $2"
  fi
  [ "$n" -eq "$4" ] || fail "$1: $n lines match '$3', expected $4"
  [ "$seconds" -le 10 ] || fail "$1: took $seconds s"
  local left
  left=$(orphans)
  [ -z "$left" ] || fail "$1: processes are left: $left"
}

run_job 3 fine
expect "all well" 0 '^done$' 1

run_job 3 throw
expect "a rank throws while the others wait" 1 '^rank 2/3: model.gguf: blk.3.attn_q.weight: made to fail$' 1

run_job 3 unwind
expect "the World is unwound by an exception" "any failure" '^done$' 0

run_job 4 agree
expect "several ranks fail and agree" 2 '^rank 1/4: blk.1: made to fail$' 1
[ "$(grep -c 'made to fail' "$out")" -eq 1 ] || fail "agree: more than one fault is shown"

# Each rank that waited may speak before the first one's abort reaches it; the culprit itself says nothing.
run_job 2 stuck
expect "a rank is stuck" 1 '^rank 0/2 \(.+\): waited 1[0-9.]* s in sum\(AttnOut\) call 1 for rank 1$' 1

run_job 3 load
expect "a rank stands still while it loads" 1 \
  '^rank 0/3 \(.+\): waited 1[0-9.]* s in loading for rank 2, which stands at [0-9]+ %$' 1

run_job 3 slow
expect "a rank is slow to load, but moves" 0 '^done$' 1

run_job 2 stopped
expect "rank 0 is stopped while the others wait for its next step" 1 \
  '^rank 1/2 \(.+\): waited 1[0-9.]* s in broadcast\(Step\) call [0-9]+ for rank 0$' 1

run_job 2 idle
expect "rank 0 takes its time between two steps" 0 '^done$' 1

# kill -9 of one rank.
begin=$SECONDS
timeout 30 "$mpirun" -n 3 "$driver" wait >"$out" 2>&1 &
job=$!
for _ in $(seq 100); do
  [ "$(grep -c '^pid ' "$out")" -eq 3 ] && break
  sleep 0.1
done
victim=$(sed -n 's/^pid //p' "$out" | head -1)
if [ -z "$victim" ]; then
  fail "kill -9: no rank started"
else
  begin=$SECONDS
  kill -9 "$victim"
fi
wait "$job"
rc=$?
seconds=$((SECONDS - begin))
expect "a rank is killed" "any failure" 'signal 9' 1

# Started without mpirun where the scheduler says four.
begin=$SECONDS
env -u OMPI_COMM_WORLD_SIZE -u PMI_SIZE -u SLURM_STEP_NUM_TASKS SLURM_NTASKS=4 timeout 30 "$driver" fine >"$out" 2>&1
rc=$?
seconds=$((SECONDS - begin))
expect "four singletons" 3 'SLURM_NTASKS=4.*world of 1: start with srun --mpi=pmix' 1
grep -q '^done$' "$out" && fail "four singletons: the run went on"

# One process on purpose.
env -u SLURM_NTASKS timeout 30 "$driver" fine >"$out" 2>&1
rc=$?
seconds=0
expect "one process without a launcher" 0 '^done$' 1

[ "$failures" -eq 0 ] && echo "all faults end as they should"
exit $((failures > 0))
