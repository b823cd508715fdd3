#!/usr/bin/env bash
# k3eval gate passes a run that only rounds differently, and refuses one that computes or chooses by other numbers.
#   eval_gate.sh <launch/mpirun.sh> <bin> <tests/data> <mutate_gguf>
source "$(dirname "$0")/common.sh"
mutate=$4
tiny=tiny,layers=4
# cells <column>: the table's, in the last JSON.
cells() { tr -d '\n ' <"$scratch/out" | grep -oE "\"$1\":\[[^]]*\]" | head -1 | sed -E 's/^"[^"]*"://'; }

# The exact path against itself, whatever the chunks: 20 rows of prefills, 24 after each, all the same bits; over
# two stages the choices of all layers arrive.
for layout in '1 --tp 1' '2 --tp 1 --pp 2'; do
  read -r ranks options <<<"$layout"
  run "$ranks" "$bin/k3eval" gate --synthetic $tiny --threads 1 --lengths 4,12,20 --before 8 --after 24 --chunk 7 \
    --ref-chunk 32 $options --log "$scratch/gate.h5"
  [ "$rc" -eq 0 ] || fail "the exact path against itself ($layout): exit code $rc"
  [ "$(cells rows)" = '[4,24,8,24,8,24,20,4,24,8,24,8,24,20]' ] || fail "$layout: rows $(cells rows)"
  [ "$(cells top1)" = '[1,1,1,1,1,1,1,1,1,1,1,1,1,1]' ] || fail "$layout: top-1 $(cells top1)"
  [ "$(cells changed)" = '[0,0,0,0,0,0,0,0,0,0,0,0,0,0]' ] || fail "$layout: choices changed $(cells changed)"
  layers=$(h5dump -d bench/gate_layers/layer "$scratch/gate.h5" | grep -oE '[0-9]+(, [0-9]+)*,?$' | tr -d ' \n' | cut -c 1-12)
  [ "$layers" = '1,2,3,1,2,3,' ] || fail "$layout: layers $layers"
done

# A cache in f16 is another rounding, and seen as such.
run 1 "$bin/k3eval" gate --synthetic $tiny --threads 1 --lengths 4,20 --before 8 --after 24 --cache f16
[ "$rc" -eq 0 ] || fail "an f16 cache: exit code $rc"
[ "$(cells kld_max)" != '[0,0,0,0,0,0,0,0,0,0]' ] || fail "an f16 cache changed nothing"
run 1 "$bin/k3eval" gate --synthetic $tiny --threads 1 --lengths 4,20 --before 8 --after 24 --cache f16 --max-kld 0
[ "$rc" -eq 1 ] || fail "an f16 cache with no divergence allowed: exit code $rc"
grep -q 'gate: held, inside a prefill of 4: mean KLD .* (expected 0 at most); and 4 more' "$scratch/err" ||
  fail "the first fault is not told"

# k3-nano with one tensor of one layer in another order. The router's bias chooses and does nothing else: held to the right
# choices the logits are right to the bit, and only what the layer would have chosen tells. The other tensor is in the arithmetic.
"$bin/k3tok" --prompt-file "$data/k3-nano/heldout.txt" | tr ' ' '\n' | head -96 >"$scratch/text.ids"
gate_nano() {
  run 1 "$bin/k3eval" gate --ids-file "$scratch/text.ids" --threads 1 --lengths 4,64 --before 16 --after 32 --ref-model "$nano" "$@"
}
gate_nano --model "$nano"
[ "$rc" -eq 0 ] || fail "k3-nano against itself: exit code $rc"
"$mutate" "$nano" "$scratch/bias.gguf" reverse blk.3.exp_probs_b.bias
gate_nano --model "$scratch/bias.gguf"
[ "$rc" -eq 1 ] || fail "another router bias: exit code $rc"
grep -q 'layer 3 would have chosen .* of its experts otherwise' "$scratch/err" || fail "the layer that chooses wrongly is not told"
cells kld_max | grep -q '^\[0,0,0,0,0,' || fail "a bias changed logits although choices were held"
"$mutate" "$nano" "$scratch/norm.gguf" reverse output_norm.weight
gate_nano --model "$scratch/norm.gguf"
[ "$rc" -eq 1 ] || fail "another norm: exit code $rc"
grep -q 'gate: held, .*: mean KLD' "$scratch/err" || fail "the divergence is not told"

run 1 "$bin/k3eval" gate --synthetic $tiny --lengths 4,4
refuses "a length twice" 2 '--lengths: 4 after 4: they must rise from 1'
run 1 "$bin/k3eval" gate --synthetic $tiny --lengths 4,x
refuses "no number" 2 '--lengths 4,x: expected numbers between commas'
run 1 "$bin/k3eval" gate --synthetic $tiny --ids '1 2 3'
refuses "too few ids" 2 '--after 256: there are 3 ids or positions, the shortest prefill is 4'
run 1 "$bin/k3eval" gate --synthetic $tiny --ids '1 2 3' --lengths 4
refuses "too few ids for a length" 2 '--lengths: 4 and 256 tokens after it, there are 3 ids'
run 1 "$bin/k3eval" gate --model "$nano" --ref-model "$data/models/k3-tiny-f32.gguf"
refuses "a reference of another shape" 2 '.*k3-tiny-f32.gguf: .* layers, '
finish
