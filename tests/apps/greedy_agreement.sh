#!/usr/bin/env bash
# k3eval greedy-agreement: the same model agrees with itself wherever it runs, another text does not, and where is told.
#   greedy_agreement.sh <launch/mpirun.sh> <bin> <tests/data>
source "$(dirname "$0")/common.sh"

has() { grep -qE "\"$1\": $2,?\$" "$scratch/out" || fail "$3: $1 is not $2: $(grep "\"$1\"" "$scratch/out")"; }
agrees() { # <name> <steps>
  [ "$rc" -eq 0 ] || fail "$1: exit code $rc"
  has equal "$2" "$1"
  has steps "$2" "$1"
  has share 1.0 "$1"
  has until_divergence 1.0 "$1"
}

# ---- stored texts -----------------------------------------------------------------------------------------------------
for n in 1 2; do
  run "$n" "$bin/k3run" --threads 1 --prompt 'The capital of France is' --temp 0 -n 12 --log "$scratch/$n.h5"
  [ "$rc" -eq 0 ] || fail "k3run on $n"
done
run 1 "$bin/k3eval" greedy-agreement --run "$scratch/1.h5" --ref "$scratch/2.h5"
agrees "one rank and two, freely" 12
has forced false "one rank and two"
tr -d ' \n' <"$scratch/out" | grep -q '"wilson95":\[0.757[0-9]*,1.0\]' || fail "the interval: $(cat "$scratch/out")"
printf '1 2 3 4 5\n\n7 8 9\n' >"$scratch/a.ids"
printf '1 2 9 4 5\n7 8 9\n' >"$scratch/b.ids"
run 1 "$bin/k3eval" greedy-agreement --run "$scratch/a.ids" --ref "$scratch/b.ids"
has positions 8 "two files of ids"
has steps 6 "two files of ids"
has equal 5 "two files of ids"
has until_divergence 0.625 "two files of ids"
has sequences_equal 1 "two files of ids"
tr -d ' \n' <"$scratch/out" | grep -q '"first_divergence":\[2,null\]' || fail "where they part is not told"

# ---- a run along a stored text ----------------------------------------------------------------------------------------
run 2 "$bin/k3eval" greedy-agreement --threads 1 --model "$nano" --ref "$scratch/1.h5" --log "$scratch/eval.h5"
agrees "two ranks along one rank's text" 12
has forced true "along a text"
[ "$(h5dump -a state "$scratch/eval.h5" | grep -c '"finished"')" -eq 1 ] || fail "the log is not finished"
# A text with one token replaced: the run would not have chosen that one, and goes on agreeing afterwards or not, step by step.
ids=$(h5dump -d tokens/id -y -w 10000 "$scratch/1.h5" | sed -n 's/^ *\([0-9, ]*\)$/\1/p' | tr -d ',\n')
prompt=$(h5dump -d prompt/id -y -w 10000 "$scratch/1.h5" | sed -n 's/^ *\([0-9, ]*\)$/\1/p' | tr -d ',\n')
echo "$ids" | awk '{ $4 = ($4 == 5) ? 6 : 5; print }' >"$scratch/other.ids"
run 1 "$bin/k3eval" greedy-agreement --threads 1 --ref "$scratch/other.ids" --ids "$prompt"
has positions 12 "a changed text"
has steps 12 "a changed text"
tr -d ' \n' <"$scratch/out" | grep -q '"first_divergence":\[3\]' || fail "a changed text: $(cat "$scratch/out")"
grep -q '"margin": [0-9]' "$scratch/out" || fail "no margin"

# ---- two models -------------------------------------------------------------------------------------------------------
printf '%s\n%s\n' "$prompt" "1 2 3" >"$scratch/prompts.ids"
run 2 "$bin/k3eval" greedy-agreement --threads 1 --model "$nano" --ref-model "$nano" --ids-file "$scratch/prompts.ids" -n 6
agrees "a model and itself" 12
has sequences 2 "a model and itself"

# ---- what is refused --------------------------------------------------------------------------------------------------
greedy_refused() { # <name> <line> <arguments ...>
  local name=$1 line=$2
  shift 2
  run 1 "$bin/k3eval" greedy-agreement "$@"
  refuses "$name" 2 "$line"
}
greedy_refused "no reference" '--ref and --ref-model: give one' --run "$scratch/a.ids"
greedy_refused "other numbers of texts" '.*a.ids: 2 texts, but .*other.ids holds 1' --run "$scratch/a.ids" --ref "$scratch/other.ids"
greedy_refused "no prompt" '.*other.ids: holds no prompt' --ref "$scratch/other.ids"
greedy_refused "a log of something else" '.*eval.h5: ' --run "$scratch/eval.h5" --ref "$scratch/1.h5"
echo hello >"$scratch/text"
greedy_refused "not ids" '.*text: line 1: .*is not a token id' --run "$scratch/text" --ref "$scratch/text"
run 1 "$bin/k3run" --threads 1 --prompt x --temp 1 -n 2 --log "$scratch/warm.h5"
run 1 "$bin/k3eval" greedy-agreement --run "$scratch/warm.h5" --ref "$scratch/warm.h5"
grep -q 'warning: .*warm.h5: was sampled at temperature 1' "$scratch/err" || fail "a sampled text is not told"
finish
