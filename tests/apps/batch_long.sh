#!/usr/bin/env bash
# A long batch under many kills: what is there at the end equals, as a set, what an undisturbed run gives; its memory is bounded.
#   batch_long.sh <launch/mpirun.sh> <bin> <tests/data> [requests [kills [folder for the undisturbed run's log and a summary]]]
source "$(dirname "$0")/common.sh"
source "$(dirname "$0")/batch_common.sh"
n=${4:-10000} kills=${5:-24} keep=${6:-$scratch}
requests "$n" >"$input"

# watch: until the job is over. Sets peak, kB.
watch() {
  local now
  peak=0
  while kill -0 "$job" 2>/dev/null; do
    now=$(sed -n 's/^VmHWM:[^0-9]*\([0-9]*\).*/\1/p' "/proc/$job/status" 2>/dev/null)
    peak=${now:-$peak}
    sleep 0.2
  done
}

# ---- undisturbed --------------------------------------------------------------------------------------------------------
begin=$SECONDS
start 1 --log "$keep/batch.h5"
watch
wait "$job" || fail "undisturbed: exit code $?"
undisturbed_s=$((SECONDS - begin)) undisturbed_kb=$peak
summary=$(tail -n 1 "$scratch/err")
answers "$output" >"$scratch/expected"
[ "$(lines "$scratch/expected")" -eq "$n" ] || fail "undisturbed: $(lines "$scratch/expected") lines, expected $n"
errors=$(grep -c '"error"' "$output")

# ---- killed -------------------------------------------------------------------------------------------------------------
rm -f "$output"*
begin=$SECONDS done_kills=0 ended=0 torn=0 most_kb=0 warned=0 moments=""
mean=$((n * 3 / 4 / (kills + 1)))  # the rest is what is answered while a kill is on its way
while [ "$done_kills" -lt "$kills" ]; do
  start 1 --resume --grace 1
  await_lines $(($(lines "$output") + mean / 2 + RANDOM % mean))
  sleep "0.$((RANDOM % 10))"
  now=$(sed -n 's/^VmHWM:[^0-9]*\([0-9]*\).*/\1/p' "/proc/$job/status" 2>/dev/null)
  [ "${now:-0}" -gt "$most_kb" ] && most_kb=$now
  # Every sixth is warned first, as a scheduler does, and given no time.
  if [ $((done_kills % 6)) -eq 5 ]; then
    kill -USR1 "$job" && warned=$((warned + 1))
    sleep "0.$((RANDOM % 3))"
  fi
  if ! kill -KILL "$job" 2>/dev/null; then
    wait "$job"
    rc=$?
    [ "$rc" -eq 5 ] && ended=$((ended + 1)) && continue  # warned, and done before the kill
    fail "the job was over after $done_kills kills, $(lines "$output") lines: exit code $rc"
    break
  fi
  wait "$job" 2>/dev/null
  done_kills=$((done_kills + 1))
  moments+=" $(lines "$output")"
  [ "$(tail -c 1 "$output")" = "" ] || torn=$((torn + 1))
  if [ $((done_kills % 4)) -eq 0 ]; then
    # What is written in one piece seldom breaks, so it is broken here.
    truncate -s -$((1 + RANDOM % 90)) "$output"
  fi
done
start 1 --resume
watch
wait "$job" || fail "resumed to the end: exit code $?"
[ "$peak" -gt "$most_kb" ] && most_kb=$peak
killed_s=$((SECONDS - begin))
same "after $done_kills kills"
[ "$most_kb" -le $((undisturbed_kb + 20000)) ] || fail "peak of $most_kb kB, undisturbed $undisturbed_kb kB"

# ---- a million lines ----------------------------------------------------------------------------------------------------
# Nearly all of them bad: those pass through reader, parser and writer, and cost nothing else.
million=$((100 * n))
awk -v n=$million 'BEGIN { for (i = 1; i <= n; ++i) if (i % 20000 == 1) print "{\"prompt\": \"a\", \"max_tokens\": 1}"; else
  printf "{\"id\": %d, \"prompt\": 7, \"metadata\": \"%100d\"}\n", i, i }' >"$input"
rm -f "$output"*
begin=$SECONDS
start 1
watch
wait "$job" || fail "a million lines: exit code $?"
[ "$(lines "$output")" -eq $million ] || fail "a million lines: $(lines "$output") answers"
million_s=$((SECONDS - begin)) million_kb=$peak
[ "$million_kb" -le $((undisturbed_kb + 30000)) ] || fail "peak of $million_kb kB at $million lines, $undisturbed_kb kB at $n"

tee "$keep/batch.txt" <<END
requests: $n, of which $errors are lines with an error on purpose
undisturbed: $undisturbed_s s, peak memory $undisturbed_kb kB
  $summary
kills (SIGKILL): $done_kills, of which $warned after SIGUSR1; $ended more ended by SIGUSR1 alone; lines there at each:$moments
last lines found broken off: $torn by a kill, $((done_kills / 4)) by hand
killed and resumed: $killed_s s, peak memory $most_kb kB
answers as a set: $(cmp -s "$scratch/expected" "$scratch/got" && echo equal || echo DIFFERENT)
$million lines: $million_s s, peak memory $million_kb kB
END
finish
