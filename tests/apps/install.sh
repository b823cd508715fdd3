#!/usr/bin/env bash
# What is installed runs from where it lies.
#   install.sh <launch/mpirun.sh> <bin> <tests/data>
source "$(dirname "$0")/common.sh"
to=$scratch/k3
run 1 cmake --install "$(dirname "$bin")" --prefix "$to"
[ "$rc" -eq 0 ] || fail "cmake --install: exit code $rc"
cd / || exit
for program in k3batch k3bench k3eval k3plan k3report k3run k3synth k3tok; do
  run 1 "$to/bin/$program" --version
  [ "$rc" -eq 0 ] && grep -q "^$program " "$scratch/out" || fail "$program: exit code $rc"
done
run 1 "$to/share/k3/launch/mpirun.sh" -n 2 "$to/bin/k3run" --model "$to/share/k3/k3-nano.gguf" --prompt 'The capital of France is' -n 3 --temp 0
[ "$rc" -eq 0 ] && grep -q '^ Paris$' "$scratch/out" || fail "two ranks: exit code $rc, $(cat "$scratch/out")"
finish
