#!/usr/bin/env bash
# launch/k3.sbatch in a real Slurm: it gives mpirun's text, on one node and on two; scancel and a time that runs out leave
# complete lines and a job that can be resumed; it is queued again where that was asked for.
#   slurm.sh <launch> <bin> <k3-nano.gguf>
set -uo pipefail
launch=$(readlink -f "$1") bin=$(readlink -f "$2") nano=$(readlink -f "$3")
# shellcheck source=tests/launch/slurm_site.sh
. "$(dirname "$0")/slurm_site.sh"
reason=$(missing_for_slurm)
[ -z "$reason" ] || { echo "SKIP: $reason"; exit 77; }

scratch=$(mktemp -d)
failures=0
cleanup() {
  stop_slurm
  [ -z "$(daemons)" ] || { echo "FAILED: daemons are left: $(daemons)"; failures=1; }
  rm -rf "$scratch"
  [ "$failures" -eq 0 ] || exit 1
}
trap cleanup EXIT
start_slurm "$scratch/slurm" || { echo "FAILED: Slurm does not start"; failures=1; exit; }
# The two nodes are one machine.
export OMPI_MCA_mpi_yield_when_idle=1

fail() {
  echo "FAILED: $1"
  [ -z "${job:-}" ] || sed 's/^/    /' "$scratch/$job.err" | cut -c1-300
  failures=$((failures + 1))
}

# submit <sbatch options> -- <options of k3.sbatch, program>: sets job; its output goes to $scratch/$job.{out,err}.
submit() {
  local options=()
  while [ "$1" != -- ]; do options+=("$1") && shift; done
  shift
  job=$(cd "$scratch" && sbatch --parsable -o "$scratch/%j.out" -e "$scratch/%j.err" "${options[@]}" "$launch/k3.sbatch" "$@")
}

# ended <name> <state> <exit code>: waits for $job.
ended() {
  local state
  wait_for_jobs 40 "$job" || fail "$1: not done after 40 s"
  state=$(scontrol show job "$job" | sed -nE 's/^ *JobState=([A-Z]+).*/\1/p; s/.* ExitCode=([0-9]+):.*/\1/p' | paste -sd' ')
  [ "$state" = "$2 $3" ] || fail "$1: ended $state, expected $2 $3"
}

# requests <n> <tokens>
requests() { for i in $(seq "$1"); do echo "{\"id\": \"r$i\", \"prompt\": \"$i and the capital of Senegal\", \"max_tokens\": $2, \"ignore_eos\": true}"; done; }

# batch <name>: sets the command whose answers go to $scratch/<name>.jsonl.
batch() {
  k3batch=("$bin/k3batch" --model "$nano" --threads 1 --temp 0 --slots 4 --reproducible --grace 0 --resume
    --input "$scratch/$1.in" --output "$scratch/$1.jsonl")
  [ -f "$scratch/$1.in" ] || cp "$scratch/requests" "$scratch/$1.in"
}

# answers_come <name> <count>: until so many lines are there.
answers_come() {
  for _ in $(seq 300); do
    [ -f "$scratch/$1.jsonl" ] && [ "$(wc -l <"$scratch/$1.jsonl")" -ge "$2" ] && return
    sleep 0.1
  done
  fail "$1: no $2 answers after 30 s"
}

# complete_lines <name>: whole answers and nothing else.
complete_lines() {
  [ "$(tail -c 1 "$scratch/$1.jsonl")" = "" ] || fail "$1: the last line has no end"
  grep -qvE '^\{"id": "r[0-9]+", .*"timings": \{[^}]*\}.*\}$' "$scratch/$1.jsonl" && fail "$1: a line is no answer"
  [ -z "$(grep -oE '^\{"id": "r[0-9]+"' "$scratch/$1.jsonl" | sort | uniq -d)" ] || fail "$1: an answer is there twice"
}

# same_answers <name>: as a set those of the undisturbed run; the times differ.
same_answers() {
  cmp -s <(sed 's/, "timings": {[^}]*}//' "$scratch/$1.jsonl" | sort) "$scratch/expected" || fail "$1: other answers"
}

# text_comes: until $job has written some.
text_comes() {
  for _ in $(seq 300); do
    [ -s "$scratch/$job.out" ] && return
    sleep 0.1
  done
  fail "no text after 30 s"
}

log_state() { h5dump -a state "$scratch/$1.h5" 2>&1 | sed -n 's/.*(0): "\(.*\)"/\1/p'; }

k3run=("$bin/k3run" --model "$nano" --threads 1 --temp 0 --ignore-eos --prompt "Once upon a time")
"$launch/mpirun.sh" -n 4 "${k3run[@]}" -n 8 >"$scratch/reference" 2>/dev/null || fail "the reference does not run"

requests 24 12 >"$scratch/requests"
batch undisturbed
"$launch/mpirun.sh" -n 2 "${k3batch[@]}" >/dev/null 2>&1 || fail "the undisturbed batch does not run"
sed 's/, "timings": {[^}]*}//' "$scratch/undisturbed.jsonl" | sort >"$scratch/expected"

# ---- signals that come later ------------------------------------------------------------------------------------------
# Slurm looks at the time twice a minute, and warns when 55 s are left of one: within half a minute. Until then this job is
# to be no hindrance, and not to be done.
requests 2000 60 >"$scratch/late.in"
batch late
submit -n 1 -t 1 --signal=B:USR1@55 -- nice -n 19 "${k3batch[@]}" --log "$scratch/late.h5"
late=$job

# Queued again after the warning, which takes Slurm some seconds.
batch again
submit -n 2 -- --again 1 "${k3batch[@]}"
answers_come again 3
scancel --signal=USR1 --batch "$job"
again=$job

# ---- the same text ----------------------------------------------------------------------------------------------------
for where in "-n 4" "-N 2 --ntasks-per-node 2"; do
  for by in pmix mpirun; do
    # shellcheck disable=SC2086
    submit $where -- --by $by "${k3run[@]}" -n 8
    ended "$where by $by" COMPLETED 0
    cmp -s "$scratch/$job.out" "$scratch/reference" || fail "$where by $by: another text than mpirun's"
  done
done
grep -q 'on n\[1-2\]' "$scratch/$job.err" || fail "the last job did not run on two nodes"

submit -n 3 -- --dry-run "${k3run[@]}"
ended "--dry-run" COMPLETED 0
grep -q ': srun --mpi=pmix ' "$scratch/$job.err" || fail "--dry-run: not by PMIx, or the command is not shown"
[ -s "$scratch/$job.out" ] && fail "--dry-run: it ran"

# ---- the end before the end -------------------------------------------------------------------------------------------
batch cancelled
submit -n 2 -- "${k3batch[@]}" --log "$scratch/cancelled.h5"
answers_come cancelled 2
scancel "$job"
ended scancel CANCELLED 5
[ "$(log_state cancelled)" = interrupted ] || fail "scancel: the log is not closed"
[ "$(wc -l <"$scratch/cancelled.jsonl")" -lt 24 ] || fail "scancel: it came too late to tell"
complete_lines cancelled
submit -n 2 -- "${k3batch[@]}"
ended "scancel, submitted again" COMPLETED 0
same_answers cancelled

submit -n 2 -- "${k3run[@]}" -n 4000
text_comes
for process in /proc/[0-9]*; do
  grep -qzxF "SLURM_JOB_ID=$job" "$process/environ" 2>/dev/null && grep -qzxF SLURM_PROCID=1 "$process/environ" &&
    [ "$(readlink "$process/exe")" = "$bin/k3run" ] && kill -KILL "${process#/proc/}"
done
begin=$SECONDS
ended "a rank is killed" FAILED 137
[ $((SECONDS - begin)) -le 10 ] || fail "a rank is killed: the job took $((SECONDS - begin)) s to end"

# ---- refused ----------------------------------------------------------------------------------------------------------
submit -n 1 -- --by hand "${k3run[@]}"
ended "--by hand" FAILED 2
grep -qxF 'k3.sbatch: --by hand: expected pmix, pmi2 or mpirun' "$scratch/$job.err" || fail "--by hand: no line"

submit -n 1 -- "$scratch/k3none"
ended "no program" FAILED 2
grep -q "^k3.sbatch: $scratch/k3none: no such program on n1" "$scratch/$job.err" || fail "no program: no line"

# ---- signals that came ------------------------------------------------------------------------------------------------
job=$again
ended "--again 1" COMPLETED 0
scontrol show job "$job" | grep -q ' Restarts=1 ' || fail "--again 1: not queued again"
grep -q '^k3.sbatch: out of time, queued again (1 of 1)$' "$scratch/$job.err" || fail "--again 1: no line about the queue"
same_answers again

job=$late
ended "out of time" FAILED 5
grep -q '^k3.sbatch: out of time; to go on' "$scratch/$job.err" || fail "out of time: no line"
[ "$(log_state late)" = interrupted ] || fail "out of time: the log is not closed"
complete_lines late

[ "$failures" -eq 0 ] && echo "all well in $SECONDS s"
