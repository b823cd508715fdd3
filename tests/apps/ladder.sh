#!/usr/bin/env bash
# The committed ladder and pictures are those that the committed runs and words make.
#   ladder.sh <k3report> <results>
set -uo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$1" ladder --results "$2" --out "$scratch/ladder.md" || exit 1
diff -u "$2/ladder.md" "$scratch/ladder.md" || { echo "FAILED: run k3report ladder --results results --out results/ladder.md"; exit 1; }
"$1" plot --results "$2" --out "$scratch/plots" 2>/dev/null || exit 1
diff -rq "$2/plots" "$scratch/plots" || { echo "FAILED: run k3report plot --results results --out results/plots"; exit 1; }
# Another word, another page: the comparison sees it.
cp "$2"/*.h5 "$scratch" && sed 's/guess/hunch/' "$2/ladder.json" >"$scratch/ladder.json"
"$1" ladder --results "$scratch" | diff -q "$2/ladder.md" - >/dev/null && { echo "FAILED: a changed word goes unseen"; exit 1; }
sed 's/"log": "h200-k3-8l-load/"log": "none/' "$2/ladder.json" >"$scratch/ladder.json"
"$1" ladder --results "$scratch" >/dev/null 2>&1 && { echo "FAILED: a log that is not there goes unseen"; exit 1; }
echo "all well"
