# Sourced by the tests of k3batch after common.sh: their input, and how its answers are compared.
k3batch=$bin/k3batch
input=$scratch/in.jsonl output=$scratch/out.jsonl
RANDOM=${BATCH_SEED:-$$}
echo "BATCH_SEED=$RANDOM"

# requests <n>: of mixed kinds; some begin alike, every 25th is no request, every 40th line is blank.
requests() {
  awk -v n="$1" 'BEGIN {
    split("France Italy Senegal Spain Peru", place, " ")
    for (i = 1; i <= n; ++i) {
      p = place[i % 5 + 1]
      if (i % 40 == 0) print ""
      if (i % 25 == 0) printf "{\"id\": \"r%d\", \"prompt\": \"broken\n", i
      else if (i % 50 == 1) { printf "{\"id\": \"r%d\", \"max_tokens\": 9, \"prompt\": \"", i; for (k = 0; k < 60; ++k) printf "%s %d ", p, i * k; print "\"}" }
      else if (i % 10 == 0) printf "{\"id\": \"r%d\", \"messages\": [{\"role\": \"user\", \"content\": \"Capital of %s?\"}], \"max_tokens\": %d}\n", i, p, 2 + i % 5
      else if (i % 3 == 0) printf "{\"id\": \"r%d\", \"prompt\": \"The capital of %s is\", \"max_tokens\": %d, \"temperature\": 0.9, \"seed\": %d, \"logprobs\": true}\n", i, p, 1 + i % 8, i
      else if (i % 7 == 0) printf "{\"id\": \"r%d\", \"prompt\": \"Once upon a time in %s there lived a king who had a daughter. %d\", \"max_tokens\": %d, \"stop\": [\".\"]}\n", i, p, i, 1 + i % 12
      else printf "{\"id\": \"r%d\", \"prompt\": \"%d and %s\", \"max_tokens\": %d}\n", i, i, p, 1 + i % 6
    }
  }'
}

# Answers without what depends on the clock, in order of the input.
answers() { sed 's/, "timings": {[^}]*}//' "$1" | sort; }
lines() { [ -f "$1" ] && wc -l <"$1" || echo 0; }

# start <n> <arguments ...>: in the background. Sets job.
start() {
  local n=$1 launch=()
  shift
  [ "$n" -eq 1 ] || launch=("$mpirun" -n "$n")
  "${launch[@]}" "$k3batch" --threads 1 --temp 0 --input "$input" --output "$output" "$@" >"$scratch/out" 2>"$scratch/err" </dev/null &
  job=$!
}

# await_lines <count>: until the output has them, or the job is over; a minute at most.
await_lines() {
  for _ in $(seq 3000); do
    [ "$(lines "$output")" -ge "$1" ] && return
    kill -0 "$job" 2>/dev/null || return
    sleep 0.02
  done
}

# same <name>: the output is, as a set, that of the undisturbed run.
same() {
  answers "$output" >"$scratch/got"
  cmp -s "$scratch/expected" "$scratch/got" || fail "$1: other answers: $(diff "$scratch/expected" "$scratch/got" | head -4)"
}
