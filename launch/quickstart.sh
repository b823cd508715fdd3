#!/usr/bin/env bash
# From a fresh machine to text: installs, builds, and runs the small model over two ranks. Safe to run again.
#   launch/quickstart.sh [--no-install]
set -euo pipefail
cd "$(dirname "$0")/.."
[ "${1:-}" = --no-install ] || launch/install-deps.sh

preset=cpu
if { command -v nvcc || [ -x /usr/local/cuda/bin/nvcc ]; } >/dev/null; then preset=cuda; fi
cmake --preset "$preset"
cmake --build --preset "$preset" --target k3run

prompt="The capital of France is"
run=(launch/mpirun.sh --as-root -n 2 "build/$preset/bin/k3run" --model tests/data/k3-nano/k3-nano.gguf
  --prompt "$prompt" -n 24 --temp 0)
printf '\n$'
printf ' %q' "${run[@]}"
printf '\n\n%s' "$prompt"

# mpirun forwards the two outputs in no fixed order, so the lines about loading and speed follow the text.
notes=$(mktemp)
trap 'rm -f "$notes"' EXIT
status=0
"${run[@]}" 2>"$notes" || status=$?
printf '\n'
cat "$notes" >&2
exit $status
