#!/usr/bin/env bash
# k3eval writes the logits of the reference and says how far they are from it; a wrong reference shows.
#   eval_logits.sh <launch/mpirun.sh> <bin> <tests/data>
source "$(dirname "$0")/common.sh"
name=k3-tiny-f32
model=$data/models/$name.gguf
# The sidecar's first sequence, in the order of its file.
ids=$(tr -d '\n' <"$data/models/$name.json" | sed 's/.*"ids": *\[\([^]]*\)\].*/\1/' | tr ',' ' ')

number() { sed -n "s/.*\"$1\": \([^,]*\),*\$/\1/p" "$scratch/out"; }
below() { awk -v x="$1" -v limit="$2" 'BEGIN { exit !(x != "" && x + 0 <= limit) }'; }

echo "$ids" >"$scratch/ids.txt"
run 1 "$bin/k3eval" logits --threads 1 --model "$model" --ids-file "$scratch/ids.txt" --out "$scratch/one.f32" --chunk 5
[ "$rc" -eq 0 ] || fail "logits on one rank: exit code $rc"
run 2 "$bin/k3eval" logits --model "$model" --ids "$ids" --out "$scratch/two.f32" --log "$scratch/run.h5"
[ "$rc" -eq 0 ] || fail "logits on two ranks: exit code $rc"
[ "$(stat -c %s "$scratch/one.f32")" -eq $((4 * 352 * $(echo "$ids" | wc -w))) ] || fail "not one row a position"
[ "$(h5dump -a state "$scratch/run.h5" | grep -c '"finished"')" -eq 1 ] || fail "the log is not finished"

run 1 "$bin/k3eval" compare --run "$scratch/one.f32" --ref "$scratch/two.f32" --vocab 352
below "$(number max_abs)" 1e-3 || fail "one rank and two: max_abs $(number max_abs)"
[ "$(number top1)" = 1.0 ] || fail "one rank and two: top1 $(number top1)"

# Weights that no file holds are the same whatever makes them.
run 1 "$bin/k3eval" logits --threads 1 --synthetic tiny --ids '1 2 3' --out "$scratch/made.f32"
[ "$rc" -eq 0 ] || fail "logits of synthetic weights: exit code $rc"
vocab=$(($(stat -c %s "$scratch/made.f32") / 12))
run 2 "$bin/k3eval" logits --synthetic tiny --ids '1 2 3' --out "$scratch/made2.f32"
run 1 "$bin/k3eval" compare --run "$scratch/made.f32" --ref "$scratch/made2.f32" --vocab "$vocab"
below "$(number max_abs)" 1e-3 || fail "synthetic weights on one rank and two: max_abs $(number max_abs)"
run 1 "$bin/k3eval" logits --synthetic tiny --model "$model" --ids '1 2 3' --out "$scratch/both.f32"
refuses "a model and a shape" 2 '--model and --synthetic: give one of the two'

# However the prompt is cut: the same bytes.
run 1 "$bin/k3eval" logits --threads 1 --model "$model" --ids "$ids" --out "$scratch/whole.f32" --reproducible --log "$scratch/run.h5"
[ "$rc" -eq 0 ] || fail "--reproducible: exit code $rc"
for chunk in 1 3; do
  run 1 "$bin/k3eval" logits --threads 2 --model "$model" --ids "$ids" --out "$scratch/cut.f32" --reproducible --chunk $chunk
  cmp -s "$scratch/whole.f32" "$scratch/cut.f32" || fail "--reproducible: chunks of $chunk give other bits"
done
[ "$(h5dump -a chosen/reproducible "$scratch/run.h5" | grep -c '"yes"')" -eq 1 ] || fail "the log does not say --reproducible"

# Rows in another order are another model.
tail -c +1409 "$scratch/two.f32" >"$scratch/shifted.f32"
head -c -1408 "$scratch/one.f32" >"$scratch/short.f32"
run 1 "$bin/k3eval" compare --run "$scratch/short.f32" --ref "$scratch/shifted.f32" --vocab 352
below "$(number kld_mean)" 0.01 && fail "shifted rows pass"

run 1 "$bin/k3eval" compare --run "$scratch/one.f32" --ref "$scratch/shifted.f32" --vocab 352
refuses "a reference of another length" 2 '.*shifted.f32: .* rows, but the run has'
run 1 "$bin/k3eval" compare --run "$scratch/one.f32" --ref "$scratch/two.f32" --vocab 351
refuses "another vocabulary" 2 '.*one.f32: .* bytes, not a multiple of a row of 351 floats'
run 1 "$bin/k3eval" compare --run "$scratch/one.f32" --ref "$scratch/two.f32" --vocab 4611686018427387904
refuses "a vocabulary whose rows overflow" 2 '--vocab 4611686018427387904: must be given, from 1 to'
run 1 "$bin/k3eval" compare --run "$scratch/none.f32" --ref "$scratch/one.f32" --vocab 352
refuses "logits that are not there" 2 '.*none.f32: no such file'
run 1 "$bin/k3eval" compare --run "$scratch" --ref "$scratch/one.f32" --vocab 352
refuses "a folder of logits" 2 '.*: is no regular file'
run 2 "$bin/k3eval" compare --model "$model" --ids-file "$scratch/ids.txt" --ref "$scratch/one.f32"
[ "$rc" -eq 0 ] && below "$(number max_abs)" 1e-3 || fail "a run against a file: exit code $rc, $(number max_abs)"

head -c 3000 "$data/k3-nano/heldout.txt" >"$scratch/text.txt"
run 1 "$bin/k3eval" ppl --threads 1 --model "$nano" --file "$scratch/text.txt" --window 256
[ "$rc" -eq 0 ] || fail "ppl: exit code $rc"
one=$(number ppl)
[ "$(number tokens)" = $((127 * $(number windows))) ] || fail "ppl: $(number tokens) tokens in $(number windows) windows"
run 3 "$bin/k3eval" ppl --model "$nano" --file "$scratch/text.txt" --window 256
awk -v a="$one" -v b="$(number ppl)" 'BEGIN { d = a / b - 1; exit !(b > 1 && d < 1e-5 && d > -1e-5) }' ||
  fail "ppl on one rank and three: $one, $(number ppl)"
echo "Too short." >"$scratch/text.txt"
run 1 "$bin/k3eval" ppl --threads 1 --model "$nano" --file "$scratch/text.txt" --window 512
refuses "a text shorter than a window" 2 '.*text.txt: .* tokens, --window needs 512'
finish
