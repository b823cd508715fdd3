# Sourced by the scripts here, which are called with: <launch/mpirun.sh> <folder of the programs> <tests/data> [more]
set -uo pipefail
mpirun=$1 bin=$(readlink -f "$2") data=$3
nano=$data/k3-nano/k3-nano.gguf
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
failures=0

fail() {
  echo "FAILED: $1"
  sed 's/^/    /' "$scratch/err" | cut -c1-300
  failures=$((failures + 1))
}

# run <n> <command ...>: on one rank without mpirun, as a newcomer starts it. Sets rc and seconds; output in $scratch/out
# and $scratch/err; standard input is $scratch/in where there is one.
run() {
  local begin=$SECONDS n=$1 input=/dev/null launch=()
  shift
  [ "$n" -eq 1 ] || launch=("$mpirun" -n "$n")
  [ -f "$scratch/in" ] && input=$scratch/in
  timeout 60 "${launch[@]}" "$@" >"$scratch/out" 2>"$scratch/err" <"$input"
  rc=$?
  seconds=$((SECONDS - begin))
}


# refuses <name> <exit code> <line, a regular expression>: judges the last run: one line, nothing on standard output.
refuses() {
  local n
  n=$(grep -cE "^(rank [0-9]+/[0-9]+|k3[a-z]+): " "$scratch/err")
  [ "$rc" -eq "$2" ] || fail "$1: exit code $rc, expected $2"
  [ "$n" -eq 1 ] || fail "$1: $n lines, expected one"
  grep -qE "^(rank [0-9]+/[0-9]+|k3[a-z]+): $3" "$scratch/err" || fail "$1: no line like '$3'"
  [ -s "$scratch/out" ] && fail "$1: standard output is not empty"
  [ "$seconds" -le 20 ] || fail "$1: took $seconds s"
}

finish() {
  [ "$failures" -eq 0 ] || { echo "$failures failures"; exit 1; }
  echo "all well"
}
