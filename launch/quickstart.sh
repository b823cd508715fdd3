#!/usr/bin/env bash
# From a fresh machine to text: installs, builds, and runs the small model over two ranks. Safe to run again.
#   launch/quickstart.sh [--no-install] [--dry-run]      --dry-run: print the commands and stop
set -euo pipefail
cd "$(dirname "$0")/.."
install=yes dry=no
for option in "$@"; do
  case "$option" in
    --no-install) install=no ;;
    --dry-run) dry=yes ;;
    *) echo "quickstart.sh: unknown option $option (known: --no-install, --dry-run)" >&2 && exit 2 ;;
  esac
done
# A command; with --dry-run only its words.
run() {
  if [ $dry = yes ]; then printf '%q ' "$@" && echo; else "$@"; fi
}
if [ $install = yes ]; then run launch/install-deps.sh; fi

preset=cpu
if { command -v nvcc || [ -x /usr/local/cuda/bin/nvcc ]; } >/dev/null; then preset=cuda; fi
run cmake --preset "$preset"
run cmake --build --preset "$preset" --target k3run

prompt="The capital of France is"
command=(launch/mpirun.sh --as-root -n 2 "build/$preset/bin/k3run" --model tests/data/k3-nano/k3-nano.gguf
  --prompt "$prompt" -n 24 --temp 0)
if [ $dry = yes ]; then
  run "${command[@]}"
  exit
fi
printf '\n$'
printf ' %q' "${command[@]}"
printf '\n\n%s' "$prompt"

# mpirun forwards the two outputs in no fixed order, so the lines about loading and speed follow the text.
notes=$(mktemp)
trap 'rm -f "$notes"' EXIT
status=0
"${command[@]}" 2>"$notes" || status=$?
printf '\n'
cat "$notes" >&2
exit $status
