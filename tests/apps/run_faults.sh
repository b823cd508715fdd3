#!/usr/bin/env bash
# What happens to a run that is interrupted, killed, or whose disk or peers fail.
#   run_faults.sh <launch/mpirun.sh> <bin> <tests/data>
source "$(dirname "$0")/common.sh"
log=$scratch/run.h5

state() { h5dump -a state "$log" 2>&1 | sed -n 's/.*(0): "\(.*\)"/\1/p'; }

# Pids of this script's ranks. By their log's path, for other tests may run the same program at the same time.
our_ranks() {
  local process
  for process in /proc/[0-9]*; do
    [ "$(readlink "$process/exe" 2>/dev/null)" = "$bin/k3run" ] && grep -qzxF "$log" "$process/cmdline" 2>/dev/null &&
      echo "${process#/proc/}"
  done
}

# Those that are still there at the end; mpirun's victims get a moment to go.
orphans() {
  local found
  for _ in $(seq 30); do
    found=$(our_ranks)
    [ -z "$found" ] && return
    sleep 0.1
  done
  echo "$found"
}

# start <n> <arguments of k3run ...>: in the background, until text comes. Sets job, and ranks to the ranks' pids.
start() {
  local n=$1 launch=()
  shift
  [ "$n" -eq 1 ] || launch=("$mpirun" -n "$n")
  rm -f "$log" "$log".*.tmp  # a rank that was killed while it wrote leaves half a snapshot
  : >"$scratch/out"  # here: the redirection below happens in the background, and perhaps later than our first look
  "${launch[@]}" "$bin/k3run" --threads 1 --prompt 'Once upon a time' --ignore-eos -n 4000 --log "$log" "$@" \
    >"$scratch/out" 2>"$scratch/err" </dev/null &
  job=$!
  for _ in $(seq 300); do
    [ -s "$scratch/out" ] && break
    sleep 0.1
  done
  [ -s "$scratch/out" ] || fail "no text after 30 s"
  ranks=$(our_ranks)
  [ "$(echo "$ranks" | wc -w)" -eq "$n" ] || fail "not $n ranks"
}

# ended <name> <exit code or "any failure">: waits for the job.
ended() {
  local begin=$SECONDS left
  for _ in $(seq 200); do
    kill -0 "$job" 2>/dev/null || break
    sleep 0.1
  done
  kill -KILL "$job" 2>/dev/null && fail "$1: had to be killed"
  wait "$job"
  rc=$?
  [ $((SECONDS - begin)) -le 10 ] || fail "$1: took $((SECONDS - begin)) s to end"
  if [ "$2" = "any failure" ]; then
    [ "$rc" -ne 0 ] || fail "$1: exit code 0"
  else
    [ "$rc" -eq "$2" ] || fail "$1: exit code $rc, expected $2"
  fi
  left=$(orphans)
  [ -z "$left" ] || fail "$1: processes are left: $left"
}

# interrupted <name>: the text is there, the log is closed, and one line says why.
interrupted() {
  [ "$(grep -cE '^rank 0/[0-9]+: stopped on request after [0-9]+ tokens$' "$scratch/err")" -eq 1 ] || fail "$1: no line"
  [ "$(state)" = interrupted ] || fail "$1: state of the log is '$(state)'"
}

# ---- interruption -----------------------------------------------------------------------------------------------------
start 1
kill -INT "$job"
ended "Ctrl-C without mpirun" 5
interrupted "Ctrl-C without mpirun"

start 2
kill -USR1 "$job"  # mpirun passes it on
ended "SIGUSR1 to mpirun" 5
interrupted "SIGUSR1 to mpirun"

start 2
kill -TERM "$(echo "$ranks" | tail -1)"  # one rank is told, all stop
ended "SIGTERM to one rank" 5
interrupted "SIGTERM to one rank"

start 2
kill -INT "$job"  # mpirun ends the ranks itself, and with its own exit code
ended "Ctrl-C with mpirun" "any failure"
interrupted "Ctrl-C with mpirun"

start 1
kill -STOP "$job"  # so that both arrive together
kill -INT "$job"
kill -TERM "$job"
kill -CONT "$job"
ended "a second signal" "any failure"

# ---- death ------------------------------------------------------------------------------------------------------------
start 2
sleep 4  # a snapshot is due every 3 s
kill -KILL "$(echo "$ranks" | tail -1)"
ended "kill -9 of one rank" "any failure"

grep -qE '^rank 0/2 \(.+\): asked to end while waiting, for [0-9.]+ s, in [a-z_]+\([A-Za-z]+\) call [0-9]+' "$scratch/err" ||
  fail "kill -9 of one rank: the other does not say what it waits for"

# pid_of <rank>
pid_of() {
  local pid
  for pid in $ranks; do
    grep -qzxF "OMPI_COMM_WORLD_RANK=$1" "/proc/$pid/environ" && echo "$pid"
  done
}
# told <name> <the rank that speaks> <the rank that is stuck>: one line, with the call.
told() {
  local line="^rank $2/2 \(.+\): waited 2[0-9.]* s in [a-z_]+\([A-Za-z]+\) call [0-9]+(, layer [0-9]+)? (for|to send to) rank $3$"
  [ "$(grep -cE "$line" "$scratch/err")" -eq 1 ] || fail "$1: no line, or not one"
}
start 2 --time-limit 2
kill -STOP "$(pid_of 1)"
ended "SIGSTOP of rank 1" 3
told "SIGSTOP of rank 1" 0 1

start 2 --time-limit 2
kill -STOP "$(pid_of 0)"
ended "SIGSTOP of rank 0" 3
told "SIGSTOP of rank 0" 1 0

start 1
sleep 6
kill -KILL "$job"
ended "kill -9" 137
[ "$(state)" = running ] || fail "kill -9: state of the log is '$(state)'"
n=$(h5dump -H -d tokens/id "$log" 2>/dev/null | sed -n 's|.*SIMPLE { ( \([0-9]*\) ).*|\1|p')
[ "${n:-0}" -gt 0 ] || fail "kill -9: the log holds no tokens"

# ---- one rank cannot do its share -------------------------------------------------------------------------------------
mkdir -p "$scratch/here"
cp "$nano" "$scratch/here/model.gguf"
timeout 60 "$mpirun" -n 1 -wdir "$scratch/here" "$bin/k3run" --model model.gguf --prompt x : \
  -n 1 -wdir / "$bin/k3run" >"$scratch/out" 2>"$scratch/err" </dev/null
rc=$?
seconds=0
refuses "a rank without the file" 2 'model.gguf: no such file'
grep -qE '^rank 1/2: ' "$scratch/err" || fail "the rank without the file is not named"

# ---- full disks -------------------------------------------------------------------------------------------------------
# A limit on the size of files stands in for the disk: the first snapshot was written before it, the last is not.
start 1
prlimit --pid "$job" --fsize=65536
kill -USR1 "$job"
ended "full disk" 3
[ -s "$scratch/out" ] || fail "full disk: the text is lost"
[ "$(grep -cE "^rank 0/1: $log" "$scratch/err")" -eq 1 ] || fail "full disk: not one line that names the log"
[ "$(state)" = running ] || fail "full disk: the snapshot before is gone"
compgen -G "$log.*tmp" >/dev/null && fail "full disk: half a snapshot is left"

if [ -w /dev/full ]; then
  timeout 60 "$bin/k3run" --threads 1 --prompt x -n 4 >/dev/full 2>"$scratch/err" </dev/null
  rc=$?
  : >"$scratch/out"
  refuses "full standard output" 3 'standard output: No space left on device'
fi
finish
