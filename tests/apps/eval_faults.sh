#!/usr/bin/env bash
# k3eval logits, interrupted: the rows of whole steps are kept under the file's name.
#   eval_faults.sh <launch/mpirun.sh> <bin> <tests/data>
source "$(dirname "$0")/common.sh"
out=$scratch/x.f32
echo old >"$out"
{ seq 0 2047 && seq 0 2047; } >"$scratch/ids.txt"
"$bin/k3eval" logits --threads 1 --model "$nano" --ids-file "$scratch/ids.txt" --out "$out" --chunk 1 \
  >"$scratch/out" 2>"$scratch/err" </dev/null &
job=$!
for _ in $(seq 600); do
  [ -n "$(find "$scratch" -name 'x.f32.*.tmp' -size +0)" ] && break
  kill -0 "$job" 2>/dev/null || break
  sleep 0.1
done
[ "$(cat "$out")" = old ] || fail "the file was replaced before its time"
kill -USR1 "$job"
wait "$job"
rc=$?
[ "$rc" -eq 5 ] || fail "exit code $rc, expected 5"
grep -qE '^rank 0/1: stopped on request after [0-9]+ of 4096 tokens$' "$scratch/err" || fail "no line"
rows=$(sed -n 's/^rank 0.*after \([0-9]*\) of.*/\1/p' "$scratch/err")
[ "$(stat -c %s "$out")" -eq $((rows * 4 * 2048)) ] || fail "$(stat -c %s "$out") bytes for $rows rows"
compgen -G "$out.*" >/dev/null && fail "half a file is left"
finish
