#!/usr/bin/env bash
# Everything a change is held to: installs, builds, tests (preset cpu), the same under sanitizers and the fuzzers (asan, with
# clang), and compiles the CUDA part where nvcc is. Every stage runs even if an earlier one failed; the last line says how many tests passed.
#   launch/test.sh [--no-install] [--full] [--dry-run]
# --full: the whole golden product and the thread sanitizer too; --dry-run: print the commands and stop
set -uo pipefail
cd "$(dirname "$0")/.." || exit

install=yes full=no dry=no
for a in "$@"; do
  case "$a" in
    --no-install) install=no ;;
    --full) full=yes ;;
    --dry-run) dry=yes ;;
    *) echo "test.sh: unknown option $a (known: --no-install, --full, --dry-run)" >&2 && exit 2 ;;
  esac
done
if [ $install = yes ]; then
  if [ $dry = yes ]; then echo "launch/install-deps.sh --tests"; else launch/install-deps.sh --tests || exit; fi
fi

total_passed=0 total_failed=0 total_skipped=0
summary=()

# count STAGE PASSED FAILED SKIPPED SECONDS
count() {
  total_passed=$((total_passed + $2)) total_failed=$((total_failed + $3)) total_skipped=$((total_skipped + $4))
  summary+=("$(printf '%-5s %4d passed, %d failed, %d skipped (%d s)' "$@")")
}

# build CONFIGURE_PRESET BUILD_PRESET
build() {
  local log="build/$1.configure.log"
  cmake --preset "$1" >"$log" 2>&1 || { cat "$log"; return 1; }
  grep 'CUDA part' "$log"
  cmake --build --preset "$2"
}

# stage NAME CONFIGURE_PRESET BUILD_PRESET TEST_PRESET: builds and tests. One that does not build counts as one failure.
stage() {
  local name=$1 from=$SECONDS report="build/$1.junit.xml" status=0
  printf '\n== %s\n' "$name"
  if [ $dry = yes ]; then
    printf 'cmake --preset %s\ncmake --build --preset %s\nctest --preset %s -j %s\n' "$2" "$3" "$4" "$(nproc)"
    return
  fi
  rm -f "$report"
  if ! build "$2" "$3"; then
    count "$name" 0 1 0 $((SECONDS - from))
    return
  fi
  ctest --preset "$4" -j "$(nproc)" --output-junit "$PWD/$report" || status=$?
  local n f s
  n=$(number tests "$report") f=$(number failures "$report")
  s=$(($(number skipped "$report") + $(number disabled "$report")))
  # ctest also fails for a test it could not start or a preset that selects nothing.
  [ $status -ne 0 ] && [ "$f" -eq 0 ] && f=1
  count "$name" $((n - f - s > 0 ? n - f - s : 0)) "$f" "$s" $((SECONDS - from))
}

# number ATTRIBUTE REPORT: an attribute of the report's <testsuite>, 0 without one.
number() {
  local value
  value=$(sed -n "s/^[[:space:]]*$1=\"\([0-9]*\)\".*/\1/p" "$2" 2>/dev/null | head -n 1)
  echo "${value:-0}"
}

[ $dry = yes ] || mkdir -p build
stage cpu cpu cpu cpu
stage asan asan asan asan
stage fuzz asan fuzz fuzz
if command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ]; then
  stage cuda cuda gpu gpu
else
  printf '\n== cuda\nCUDA part: not built (nvcc not found)\n'
fi
if [ $full = yes ]; then
  stage tsan tsan tsan tsan
  stage full cpu cpu full
fi

[ $dry = yes ] && exit 0
printf '\n'
printf '%s\n' "${summary[@]}"
echo "$total_passed passed, $total_failed failed, $total_skipped skipped"
[ "$total_failed" -eq 0 ]
