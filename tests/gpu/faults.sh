#!/usr/bin/env bash
# What happens to a job on two GPUs when one rank is killed or stopped, in load, prefill and decode, over every communicator:
# it ends in time, not with zero, after a line that says who waited in which call; no process and no GPU memory is left.
# Then short jobs, many times: each ends with 0, and soon.
#   faults.sh <launch/mpirun.sh> <folder of the programs> <k3-nano.gguf> [<a model that takes seconds to load>]
# With one GPU the ranks share it, over mpi alone. Prints a table of what was seen. Exit 77 without a GPU.
set -uo pipefail
mpirun=$1 bin=$(readlink -f "$2") nano=$3 large=${4:-}
limit=${K3_FAULT_LIMIT:-4}  # seconds that a rank may wait
jobs=${K3_FAULT_JOBS:-17}  # short ones over each communicator
comms=${K3_FAULT_COMMS:-nccl peer mpi}
parts=${K3_FAULT_PARTS:-faults jobs}
alone=${K3_FAULT_ALONE:-yes}  # no: others use the GPUs too, so the memory in use says nothing of this job
share=() devices=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
[ "$devices" -ge 1 ] || exit 77
[ "$devices" -ge 2 ] || { share=(--share-gpu) && comms=mpi; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
failures=0
for _ in $(seq 450); do printf 'Once upon a time there was '; done >"$scratch/prompt"

now() { date +%s.%N; }
since() { awk -v a="$1" -v b="$(now)" 'BEGIN { printf "%.1f", b - a }'; }
fail() {
  echo "FAILED: $1"
  sed 's/^/    /' "$scratch/err" | cut -c1-300 | tail -12
  failures=$((failures + 1))
}
gpu_memory() { nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | awk '{ sum += $1 } END { print sum }'; }
our_ranks() {
  local process
  for process in /proc/[0-9]*; do
    [ "$(readlink "$process/exe" 2>/dev/null)" = "$bin/k3run" ] && echo "${process#/proc/}"
  done
}
pid_of() {
  local pid
  for pid in $(our_ranks); do
    tr '\0' '\n' <"/proc/$pid/environ" 2>/dev/null | grep -qx "OMPI_COMM_WORLD_RANK=$1" && echo "$pid"
  done
}
# until_seen <seconds> <regular expression>: in the job's output
until_seen() {
  for _ in $(seq $(($1 * 50))); do
    grep -qE "$2" "$scratch/err" "$scratch/out" && return
    sleep 0.02
  done
  fail "never saw '$2'"
}
# gone: processes and memory of the last job
gone() {
  local left=""
  for _ in $(seq 50); do
    left=$(our_ranks)
    [ -z "$left" ] && { [ "$alone" = no ] || [ "$(gpu_memory)" -le $((idle + 64)) ]; } && return
    sleep 0.1
  done
  fail "$1: left behind: processes '$left', $(($(gpu_memory) - idle)) MiB on the GPUs"
}

# fault <comm> <phase> <signal> <rank>
fault() {
  local name="$1, $2, SIG$3 of rank $4" model=$nano other=$((1 - $4)) line
  local options=("${share[@]}" --prompt 'Once upon a time' -n 3500)
  [ "$2" = prefill ] && options=("${share[@]}" --prompt-file "$scratch/prompt" --chunk 1 -n 1)
  [ "$2" = load ] && model=$large
  : >"$scratch/out" && : >"$scratch/err"
  timeout 60 "$mpirun" -n 2 "$bin/k3run" --backend cuda --comm "$1" --model "$model" --ignore-eos --ctx 4096 \
    --time-limit "$limit" "${options[@]}" >"$scratch/out" 2>"$scratch/err" </dev/null &
  local job=$! begin rc seconds
  case "$2" in
    load) until_seen 30 '^data between ranks' && sleep 0.3 ;;
    prefill) until_seen 30 '^loading: ' && sleep 0.5 ;;
    decode) until_seen 30 'upon|[a-z]{2}' && until_seen 30 '^loading: ' && sleep 1 ;;
  esac
  begin=$(now)
  kill "-$3" "$(pid_of "$4")" || fail "$name: no such rank"
  wait "$job"
  rc=$? seconds=$(since "$begin")
  [ "$rc" -ne 0 ] && [ "$rc" -ne 124 ] || fail "$name: exit code $rc"
  awk -v s="$seconds" 'BEGIN { exit !(s < 15) }' || fail "$name: took $seconds s"
  local what="(waited [0-9.]+ s|asked to end while waiting, for [0-9.]+ s,) in (loading|[a-z_]+\\([A-Za-z]+\\) call [0-9]+)"
  line=$(grep -E "^rank $other/2 \\(.+, cuda $((other % devices))\\): $what" "$scratch/err" | head -1)
  [ -n "$line" ] || fail "$name: rank $other does not say what it waited for"
  [ "$3" = STOP ] && [ "$(grep -cE '^rank [0-9]/2 ' "$scratch/err")" -ne 1 ] && fail "$name: not one line"
  gone "$name"
  echo "| $1 | $2 | SIG$3 of rank $4 | $seconds | $rc | $line |"
}

idle=$(gpu_memory)
echo "| comm | phase | fault | s to the end | exit | the survivor's line |"
echo "|---|---|---|---|---|---|"
for comm in $comms; do
  [[ $parts == *faults* ]] || break
  for signal in KILL STOP; do
    [ -n "$large" ] && fault "$comm" load $signal 1
    fault "$comm" prefill $signal 1
    fault "$comm" decode $signal 1
    [ $signal = STOP ] && fault "$comm" decode STOP 0
  done
done

# short_jobs <comm>: side by side with those of the other communicators, to save time
short_jobs() {
  local err=$scratch/err.$1 slowest=0 i job begin rc seconds bad=0
  for i in $(seq "$jobs"); do
    : >"$err"
    timeout 60 "$mpirun" -n 2 "$bin/k3run" --backend cuda --comm "$1" "${share[@]}" --model "$nano" --ignore-eos --prompt x -n 1 --temp 0 \
      2>"$err" </dev/null >/dev/null &
    job=$!
    until grep -q 'ended by: length' "$err" || ! kill -0 "$job" 2>/dev/null; do sleep 0.02; done
    begin=$(now)
    wait "$job"
    rc=$? seconds=$(since "$begin")
    [ "$rc" -eq 0 ] && awk -v s="$seconds" 'BEGIN { exit !(s <= 1) }' || {
      echo "FAILED: job $i over $1: exit code $rc, $seconds s from its last line to its end"
      sed 's/^/    /' "$err" | tail -5
      bad=1
    }
    slowest=$(awk -v a="$slowest" -v b="$seconds" 'BEGIN { print (b > a ? b : a) }')
  done
  echo "$jobs jobs of one token over $1: the slowest took $slowest s from its last line to its end"
  return $bad
}
pids=()
for comm in $comms; do
  [[ $parts == *jobs* ]] || break
  short_jobs "$comm" &
  pids+=($!)
done
for pid in "${pids[@]}"; do
  wait "$pid" || failures=$((failures + 1))
done
: >"$scratch/err"
gone "short jobs"
[ "$failures" -eq 0 ] && echo "all faults end as they should"
exit $((failures > 0))
