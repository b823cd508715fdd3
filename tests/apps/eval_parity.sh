#!/usr/bin/env bash
# k3eval parity passes what agrees, refuses what does not, and says where.
#   eval_parity.sh <launch/mpirun.sh> <bin> <tests/data>
source "$(dirname "$0")/common.sh"
ids='1 400 7 7 33 250 19 3 88 401 2 76'
tiny=tiny,layers=3
# number <name>: of the last JSON.
number() { tr -d '\n ' <"$scratch/out" | grep -oE "\"$1\":(\[[^]]*\]|[^,}]*)" | head -1 | sed -E 's/^"[^"]*"://'; }

for ranks in 1 2; do
  run "$ranks" "$bin/k3eval" parity --synthetic $tiny --threads 1 --ids "$ids"
  [ "$rc" -eq 0 ] || fail "the exact path against itself on $ranks: exit code $rc"
  [ "$(number depths)" = '[4,8,12]' ] || fail "depths $(number depths)"
  [ "$(number worst_top1)" = 1.0 ] && [ "$(number pass)" = true ] || fail "not equal to itself on $ranks"
done
run 1 "$bin/k3eval" logits --synthetic $tiny --threads 1 --ids "$ids" --out "$scratch/ref.f32"
run 2 "$bin/k3eval" parity --synthetic $tiny --threads 1 --ids "$ids" --ref "$scratch/ref.f32" --chunk 5
[ "$rc" -eq 0 ] || fail "against a file: exit code $rc"

# Another model's logits: the first prefix alone is right where only later rows are changed.
run 1 "$bin/k3eval" logits --synthetic $tiny,heads=6 --threads 1 --ids "$ids" --out "$scratch/other.f32"
row=$(($(stat -c %s "$scratch/ref.f32") / 12))
{ head -c $((4 * row)) "$scratch/ref.f32"; tail -c $((8 * row)) "$scratch/other.f32"; } >"$scratch/mixed.f32"
run 1 "$bin/k3eval" parity --synthetic $tiny --threads 1 --ids "$ids" --ref "$scratch/mixed.f32"
[ "$rc" -eq 1 ] || fail "logits of another model: exit code $rc"
grep -q 'parity: worst top-1 .* at depth 12 ' "$scratch/err" || fail "the worst depth is not told"
[ "$(number pass)" = false ] || fail "passed"
tr -d '\n ' <"$scratch/out" | grep -q '"top1":\[1.0,' || fail "the first prefix does not agree"
run 1 "$bin/k3eval" parity --synthetic $tiny --threads 1 --ids "$ids" --ref "$scratch/mixed.f32" --min-top1 0 --max-kld 100
[ "$rc" -eq 0 ] || fail "gates wide open: exit code $rc"

run 1 "$bin/k3eval" parity --synthetic $tiny --ids '1 2 3'
refuses "three ids" 2 'parity: 3 ids, expected at least 4'
run 1 "$bin/k3eval" parity --synthetic $tiny --ids '1 2 3 4' --ref "$scratch/ref.f32"
refuses "more rows than ids" 2 '.*ref.f32: 12 rows, there are 4 ids'
run 1 "$bin/k3eval" parity --synthetic $tiny --ids '1 2 3 4' --min-top1 1.5
refuses "a share over 1" 2 '--min-top1 1.5: outside 0 to 1'
finish
