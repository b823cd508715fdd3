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

run=(launch/mpirun.sh -n 2 "build/$preset/bin/k3run" --model tests/data/k3-nano/k3-nano.gguf
  --prompt "The capital of France is" -n 24 --temp 0)
printf '\n$'
printf ' %q' "${run[@]}"
printf '\n'
"${run[@]}"
