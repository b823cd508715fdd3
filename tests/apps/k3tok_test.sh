#!/usr/bin/env bash
# k3tok from outside: what it prints, and exit code 2 with one line for input that cannot be used.
# usage: k3tok_test.sh K3TOK MODEL SCRATCH
set -euo pipefail
k3tok=$1 model=$2 scratch=$3
mkdir -p "$scratch"

fail() {
  echo "$*" >&2
  exit 1
}
# prints EXPECTED ARGS...: standard output is EXPECTED
prints() {
  local got
  got=$("$k3tok" --model "$model" "${@:2}") || fail "$*: exit code $?"
  [ "$got" = "$1" ] || fail "k3tok ${*:2}: printed '$got', expected '$1'"
}
# refuses PART ARGS...: exit code 2 and one line with PART in it, nothing on standard output
refuses() {
  local rc=0
  "$k3tok" "${@:2}" >"$scratch/out" 2>"$scratch/err" </dev/null || rc=$?
  [ "$rc" = 2 ] || fail "k3tok ${*:2}: exit code $rc, expected 2"
  [ "$(wc -l <"$scratch/err")" = 1 ] || fail "k3tok ${*:2}: not one line: $(cat "$scratch/err")"
  grep -qF -- "$1" "$scratch/err" || fail "k3tok ${*:2}: '$1' is not in: $(cat "$scratch/err")"
  [ ! -s "$scratch/out" ] || fail "k3tok ${*:2}: printed something"
}

prints "289 330 290 433 859 501 263" --prompt 'The capital of France is'
prints "The capital of" --decode 289 330 290
prints "The capital of" --decode --prompt '289 330 290'
prints '{"ids":[2021]}' --json --control-tokens --prompt '<|sep|>'
prints $'2021\t"<|sep|>"\tcontrol\n10\t"\\n"' --pieces --control-tokens --prompt $'<|sep|>\n'
prints '{"ids":[228],"text":"�","hex":"e4"}' --json --decode 228
[ "$("$k3tok" --model "$model" --prompt '<|sep|>' | wc -w)" -gt 1 ] || fail "a control token was recognised unasked"
[ "$(printf 'abc\n' | "$k3tok" --model "$model")" = "524 99" ] || fail "the last line end was kept"
[ "$(printf 'abc\n' | "$k3tok" --model "$model" --keep-line-end)" = "524 99 10" ] || fail "the last line end was dropped"
"$k3tok" --model "$model" --vocab-info | grep -qF 'stop     2018 "<|end_of_msg|>"' || fail "--vocab-info: no stop token"
"$k3tok" --help | grep -q -- --control-tokens || fail "--help does not list the options"

# Any bytes come back.
head -c 20000 "$model" >"$scratch/bytes"
"$k3tok" --model "$model" --keep-line-end --prompt-file "$scratch/bytes" >"$scratch/ids"
"$k3tok" --model "$model" --decode --prompt-file "$scratch/ids" | cmp - "$scratch/bytes"

refuses "2048 tokens" --model "$model" --decode 1 2048
refuses "'2x' is not a token id" --model "$model" --decode 1 2x
refuses "$scratch/none" --model "$scratch/none" --prompt x
refuses "not a GGUF file" --model "$scratch/ids" --prompt x
refuses "did you mean --prompt?" --promt x
refuses "only --decode takes words" --model "$model" hello
refuses "--prompt and --prompt-file" --model "$model" --prompt a --prompt-file b
refuses "--pieces" --model "$model" --decode --pieces 1
