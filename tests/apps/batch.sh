#!/usr/bin/env bash
# k3batch from outside: kills and --resume, signals, a full disk, bad lines, pipes, memory.
#   batch.sh <launch/mpirun.sh> <bin> <tests/data>
source "$(dirname "$0")/common.sh"
source "$(dirname "$0")/batch_common.sh"

batch=("$k3batch" --threads 1 --temp 0 --input "$input" --output "$output")
requests 300 >"$input"

# ---- undisturbed --------------------------------------------------------------------------------------------------------
run 1 "${batch[@]}" --log "$scratch/log.h5"
[ "$rc" -eq 0 ] || fail "undisturbed: exit code $rc"
answers "$output" >"$scratch/expected"
[ "$(lines "$scratch/expected")" -eq 300 ] || fail "undisturbed: $(lines "$scratch/expected") lines, expected 300"
[ "$(grep -c '"error"' "$output")" -eq 12 ] || fail "undisturbed: $(grep -c '"error"' "$output") errors, expected 12"
[ "$(grep -o '"line": [0-9]*' "$output" | sort -u | wc -l)" -eq 300 ] || fail "undisturbed: a line is answered twice"
for name in requests ttft_p50_ms ttft_p99_ms tpot_p90_ms generated_tok_s; do
  h5dump -a "summary/$name" "$scratch/log.h5" 2>/dev/null | grep -q DATA || fail "the log's summary lacks $name"
done

run 1 "${batch[@]}"
refuses "the output is there already" 2 ".*out.jsonl: holds [0-9]+ bytes already; --resume continues it"
run 1 "${batch[@]}" --resume --top-p 0.5
refuses "resumed with another top-p" 2 "--resume: top-p is '0.5', the answers that are there were made with \"0.95\""
sed 's/king/queen/' "$input" >"$scratch/other.jsonl"
run 1 "$k3batch" --threads 1 --temp 0 --output "$output" --resume --input "$scratch/other.jsonl"
refuses "resumed with another input" 2 ".*other.jsonl: line 7 is another than the one that the output answers"
run 1 "${batch[@]}" --resume
[ "$rc" -eq 0 ] || fail "resumed at the end: exit code $rc"
same "resumed at the end"

# ---- kills --------------------------------------------------------------------------------------------------------------
rm -f "$output"*
kills=0
for _ in $(seq 3); do
  before=$(lines "$output")
  start 1 --resume
  await_lines $((before + 1 + RANDOM % 60))
  sleep "0.0$((RANDOM % 10))"
  kill -KILL "$job" 2>/dev/null && kills=$((kills + 1))
  wait "$job" 2>/dev/null
done
[ "$kills" -eq 3 ] || fail "kills: $kills, expected 3"
[ "$(lines "$output")" -lt 300 ] || fail "kills: they came too late"
# A line that a kill broke off: what is written in one piece seldom breaks, so it is broken here.
truncate -s -7 "$output"
run 1 "${batch[@]}" --resume
[ "$rc" -eq 0 ] || fail "after the kills: exit code $rc"
grep -qE ' [0-9]+ bytes of a line that broke off are cut' "$scratch/err" || fail "nothing is said of the line that broke off"
same "after three kills"

# ---- signals: end in order, to be resumed -------------------------------------------------------------------------------
# The beginning of the same input: what stood around them does not change the answers.
requests 90 >"$input"
cp "$scratch/expected" "$scratch/all"
awk -F'"line": ' '$2 + 0 <= 92' "$scratch/all" >"$scratch/expected"
[ "$(lines "$scratch/expected")" -eq 90 ] || fail "the first 90 are $(lines "$scratch/expected")"
rm -f "$output"*
start 1 --grace 30
await_lines 20
kill -TERM "$job"
wait "$job"
rc=$?
[ "$rc" -eq 5 ] || fail "SIGTERM: exit code $rc, expected 5"
grep -qE '^rank 0/1: stopped on request after [0-9]+ lines; --resume answers the rest$' "$scratch/err" || fail "SIGTERM: no line"
n=$(lines "$output")
[ "$n" -ge 20 ] && [ "$n" -lt 90 ] || fail "SIGTERM: $n lines"

# ---- a disk that fills up -----------------------------------------------------------------------------------------------
start 1 --resume
await_lines $((n + 10))
# Not by ulimit before the start: MPI's own files are larger.
prlimit --fsize=$(($(stat -c %s "$output") + 1000)) --pid "$job" || fail "a full disk: it came too late"
wait "$job"
rc=$? seconds=0
refuses "a full disk" 3 ".*out.jsonl: write: File too large"
[ "$(tail -c 1 "$output")" = "" ] || fail "a full disk: the last line is not whole"
[ "$(lines "$output")" -lt 90 ] || fail "a full disk: it came too late"
run 1 "${batch[@]}" --resume
[ "$rc" -eq 0 ] || fail "after the full disk: exit code $rc"
same "after SIGTERM and a full disk"
run 1 "$k3batch" --threads 1 --input "$input" --output /dev/full
refuses "/dev/full" 3 "/dev/full: write: No space left on device"

# ---- two ranks, whose sums end in other bits than one's -------------------------------------------------------------------
rm -f "$output"*
run 2 "${batch[@]}"
[ "$rc" -eq 0 ] || fail "two ranks: exit code $rc"
answers "$output" >"$scratch/expected"
rm -f "$output"*
start 2 --grace 0
await_lines 20
kill -USR1 "$job"  # mpirun passes it on
wait "$job"
rc=$?
[ "$rc" -eq 5 ] || fail "SIGUSR1 to two ranks: exit code $rc, expected 5"
[ "$(tail -c 1 "$output")" = "" ] || fail "SIGUSR1 to two ranks: the last line is not whole"
[ "$(lines "$output")" -lt 90 ] || fail "SIGUSR1 to two ranks: it came too late"
run 2 "${batch[@]}" --resume
[ "$rc" -eq 0 ] || fail "two ranks resumed: exit code $rc"
same "two ranks after SIGUSR1"

# ---- bad lines ----------------------------------------------------------------------------------------------------------
cat >"$scratch/in" <<'END'
{"id": 1, "prompt": "a", "max_tokens": 1}
[1, 2]
"text"
null
17
{"id": 2, "prompt": "a
{"id": 3}
{"id": 4, "prompt": "a", "messages": []}
{"id": 5, "prompt": "a", "temprature": 1}
{"id": 6, "prompt": 7}
{"id": 7, "prompt": ""}
{"id": 8, "prompt": "a", "max_tokens": 0}
{"id": 9, "prompt": "a", "max_tokens": 1e3}
{"id": 10, "prompt": "a", "max_tokens": 99999999999999999999}
{"id": 11, "prompt": "a", "temperature": -1}
{"id": 12, "prompt": "a", "temperature": 1e999}
{"id": 13, "prompt": "a", "stop": [""]}
{"id": 14, "prompt": "a", "stop": 3}
{"id": 15, "prompt": "a", "seed": -1}
{"id": 16, "messages": [{"role": "nobody", "content": "a"}]}
{"id": 17, "messages": "a"}
{"id": 18, "prompt": "a", "tools": []}
{"id": {}, "prompt": "a"}
{"id": 20, "prompt": "a"} {"id": 21, "prompt": "a"}
END
printf '{"id": 22, "prompt": "\xff\xfe"}\n' >>"$scratch/in"
printf '{"id": 23, "prompt": "a\0b", "max_tokens": 1}\n' >>"$scratch/in"
awk 'BEGIN { printf "{\"id\": 24, \"prompt\": \""; for (i = 0; i < 9000; ++i) printf "word "; print "\"}" }' >>"$scratch/in"
awk 'BEGIN { printf "{\"id\": 25, \"prompt\": "; for (i = 0; i < 100000; ++i) printf "["; print "" }' >>"$scratch/in"
printf '\n   \r\n' >>"$scratch/in"
printf '{"id": 26, "prompt": "a", "max_tokens": 1}\r\n{"id": 27, "prompt": "a", "max_tokens": 1}' >>"$scratch/in"
run 1 "$k3batch" --threads 1 --temp 0
[ "$rc" -eq 0 ] || fail "bad lines: exit code $rc"
[ "$(lines "$scratch/out")" -eq 30 ] || fail "bad lines: $(lines "$scratch/out") answers, expected 30"
[ "$(grep -c '"error"' "$scratch/out")" -eq 27 ] || fail "bad lines: $(grep -c '"error"' "$scratch/out") errors, expected 27"
for id in 1 26 27; do
  grep -q "^{\"id\": $id, .*\"finish_reason\"" "$scratch/out" || fail "bad lines: $id is not answered"
done
for expected in '3, .*"neither prompt nor messages' '5, .*temprature: unknown member' '24, .*"prompt_too_long"' '20, .*"bad_json"'; do
  grep -q "^{\"id\": \(null\|$expected\)" "$scratch/out" || fail "bad lines: none like $expected"
done
rm "$scratch/in"

run 1 "$k3batch" --input "$scratch/none.jsonl"
refuses "no input" 2 ".*none.jsonl: no such file"
run 1 "$k3batch" --input "$input" --output "$input" --resume
refuses "the output is the input" 2 "--output .*: would replace the input .*"
run 1 "$k3batch" --input "$input" --output "$scratch/none/out.jsonl"
refuses "no folder" 2 ".*no such folder.*"

# ---- a pipe: each answer comes as soon as it is there -------------------------------------------------------------------
mkfifo "$scratch/pipe"
"$k3batch" --threads 1 --temp 0 <"$scratch/pipe" >"$scratch/out" 2>"$scratch/err" &
job=$!
exec 9>"$scratch/pipe"
echo '{"id": "first", "prompt": "The capital of France is", "max_tokens": 3}' >&9
for _ in $(seq 200); do
  [ "$(lines "$scratch/out")" -eq 1 ] && break
  sleep 0.05
done
[ "$(lines "$scratch/out")" -eq 1 ] || fail "a pipe: no answer while the input is open"
echo '{"id": "second", "prompt": "The capital of France is", "max_tokens": 3}' >&9
exec 9>&-
wait "$job" || fail "a pipe: exit code $?"
[ "$(lines "$scratch/out")" -eq 2 ] || fail "a pipe: not two answers"

# ---- memory does not grow with the input ---------------------------------------------------------------------------------
# peak_mb <lines>: of a run that reads so many, most of them bad, for those cost nothing else.
peak_mb() {
  awk -v n="$1" 'BEGIN { for (i = 1; i <= n; ++i) if (i % 2000 == 1) print "{\"prompt\": \"a\", \"max_tokens\": 1}"; else
    printf "{\"id\": %d, \"prompt\": 7, \"metadata\": \"%200d\"}\n", i, i }' |
    "$k3batch" --threads 1 --slots 2 --log "$scratch/peak.h5" 2>"$scratch/err" | wc -l >"$scratch/out"
  [ "$(cat "$scratch/out")" -eq "$1" ] || fail "$1 lines: $(cat "$scratch/out") answers"
  echo $(($(h5dump -d ranks/ended/peak_rss_bytes "$scratch/peak.h5" | sed -n 's/.*(0): \([0-9]*\).*/\1/p') / 1000000))
}
small=$(peak_mb 2000)
large=$(peak_mb 100000)
echo "peak of 2000 lines $small MB, of 100000 $large MB"
[ "$large" -le $((small + 12)) ] || fail "memory grows with the input: $small MB, then $large MB"

finish
