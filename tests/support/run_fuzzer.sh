#!/usr/bin/env bash
# run_fuzzer.sh PROGRAM SECONDS [CORPUS ...]: fuzzes for SECONDS from the corpus. New inputs go to a scratch folder, so a
# run leaves the tree as it was; a crash is printed in base64, ready to be saved into the corpus.
set -euo pipefail
program=$1 seconds=$2
shift 2
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/found" "$scratch/seeds"
# libFuzzer takes folders; single files are gathered into one.
folders=()
for c in "$@"; do
  if [ -d "$c" ]; then folders+=("$c"); else cp "$c" "$scratch/seeds/"; fi
done
cd "$scratch"
if ! "$program" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
  found seeds "${folders[@]}"; then
  for f in crash-* oom-* timeout-*; do
    [ -f "$f" ] && echo "$f ($(stat -c %s "$f") bytes): $(head -c 4096 "$f" | base64 -w0)"
  done
  exit 1
fi
