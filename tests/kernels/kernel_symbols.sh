#!/usr/bin/env bash
# Objects that are compiled for one instruction set share no function with the rest of the program: the linker keeps one copy
# of a shared one, and where it keeps theirs, processors without those instructions stop.
#   kernel_symbols.sh NM libk3_kernels.a
set -euo pipefail
found=$("$1" -C "$2" | awk '
  /^kernel_(avx2|avx512).*:$/ { inside = 1; next }
  /:$/ { inside = 0 }
  inside && / [TW] / { print }')
tables=$(grep -c ' T k3::cpu::avx.*_table()$' <<<"$found" || true)
if [ "$tables" -ne 2 ]; then
  echo "expected two objects with a table each, found $tables:" "$found" >&2
  exit 1
fi
shared=$(grep ' W ' <<<"$found" || true)
if [ -n "$shared" ]; then
  echo "shared functions in objects for one instruction set:" >&2
  echo "$shared" >&2
  exit 1
fi
