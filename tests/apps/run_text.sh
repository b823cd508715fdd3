#!/usr/bin/env bash
# Prompts in all their forms give the text that the model has to say, and nothing else on standard output.
#   run_text.sh <launch/mpirun.sh> <bin> <tests/data>
source "$(dirname "$0")/common.sh"
question='The capital of France is'

# says <name> <text>: the last run ended well and standard output is exactly this.
says() {
  [ "$rc" -eq 0 ] || fail "$1: exit code $rc"
  [ "$(cat "$scratch/out")" = "$2" ] || fail "$1: said '$(cat "$scratch/out")', expected '$2'"
}

run 1 "$bin/k3run" --threads 1 --prompt "$question" -n 5 --temp 0
says "--prompt, default model" ' Paris. The'
grep -qE 'prompt [0-9]+ tokens, TTFT .* ms, prefill .* tok/s, generated 5 tokens, TPOT .* ms, decode .* tok/s, ended by: length$' \
  "$scratch/err" || fail "no summary"
grep -qE '^k3run .*, 1 rank: --model .*--predict 5 .*--temp 0 ' "$scratch/err" || fail "the options are not printed"

run 2 "$bin/k3run" --model "$nano" --prompt "$question" -n 5 --temp 0 --chunk 2 --cache f32 --reproducible --log "$scratch/run.h5"
says "two ranks, chunks of 2" ' Paris. The'
grep -qE '^k3run .* --reproducible ' "$scratch/err" || fail "--reproducible is not printed"
h5dump -d tokens/id "$scratch/run.h5" | grep -q '(0): ' || fail "the log holds no ids"
[ "$(h5dump -a state "$scratch/run.h5" | grep -c '"finished"')" -eq 1 ] || fail "the log is not finished"

printf '%s\n' "$question" >"$scratch/question.txt"
run 1 "$bin/k3run" --threads 1 --prompt-file "$scratch/question.txt" -n 5 --temp 0
says "--prompt-file" ' Paris. The'

cp "$scratch/question.txt" "$scratch/in"
run 2 "$bin/k3run" -n 5 --temp 0
says "standard input" ' Paris. The'
run 1 "$bin/k3run" --threads 1 --prompt - -n 5 --temp 0
says "--prompt -" ' Paris. The'
rm "$scratch/in"

# Any bytes make a prompt: invalid UTF-8 is tokenized byte by byte, and what comes out is valid UTF-8.
printf 'caf\xc3 \xff\xfe' >"$scratch/in"
run 1 "$bin/k3run" --threads 1 -n 8 --temp 0
[ "$rc" -eq 0 ] || fail "invalid UTF-8: exit code $rc"
iconv -f UTF-8 -t UTF-8 "$scratch/out" >/dev/null || fail "the output is not UTF-8"
rm "$scratch/in"

run 1 "$bin/k3run" --threads 1 --prompt "$question" -n 0 --temp 0
says "no tokens" ''
run 1 "$bin/k3run" --threads 1 --prompt "$question" --ctx 8 --temp 0
grep -q 'ended by: context full$' "$scratch/err" || fail "a full context is not said"
run 1 "$bin/k3run" --threads 1 --prompt "$question" -n 16 --seed 5
cp "$scratch/out" "$scratch/first"
run 1 "$bin/k3run" --threads 1 --prompt "$question" -n 16 --seed 5
cmp -s "$scratch/out" "$scratch/first" || fail "same seed, other text"

for program in k3run "k3eval logits" "k3eval compare"; do
  run 1 $bin/$program --help
  [ "$rc" -eq 0 ] && grep -q '^usage:' "$scratch/out" && grep -q '^Exit codes:' "$scratch/out" || fail "$program --help"
  [ -s "$scratch/err" ] && fail "$program --help writes to standard error"
done
for command in "logits" "compare" "greedy-agreement"; do
  run 1 "$bin/k3eval" $command --help
  tr -s ' \n' ' ' <"$scratch/out" | grep -q 'generated tokens together. 0: as many as ' || fail "k3eval $command: default of --ctx"
done
run 1 "$bin/k3eval" ppl --help
tr -s ' \n' ' ' <"$scratch/out" | grep -q 'generated tokens together. 0: --window \[default: 0\]' || fail "k3eval ppl: default of --ctx"
run 2 "$bin/k3run" --help
[ "$(grep -c '^usage:' "$scratch/out")" -eq 1 ] || fail "two ranks print their page twice"
run 2 "$bin/k3run" --version
[ "$rc" -eq 0 ] && [ "$(grep -c '^k3run ' "$scratch/out")" -eq 1 ] && grep -q '^mpi: ' "$scratch/out" || fail "--version"
finish
