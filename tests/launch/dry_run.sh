#!/usr/bin/env bash
# Every script in launch/ says with --dry-run what it would do, and does nothing: no program is started, nothing is installed,
# built or written, and neither a GPU nor a network, weights nor a build are needed.
#   dry_run.sh <source folder>
set -uo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
failures=0
fail() {
  echo "FAILED: $1"
  sed 's/^/    /' "$scratch/out" 2>/dev/null
  failures=$((failures + 1))
}

# The scripts alone, in a folder without sources, build or models.
cp -r "$1/launch" "$scratch/launch"
# Programs that do something, each replaced by one that tells on its caller.
mkdir "$scratch/bin"
for program in apt apt-get sudo cmake ctest ninja mpirun mpiexec srun sbatch scontrol nvidia-smi nvcc git curl wget ssh k3program; do
  printf '#!/bin/sh\necho "%s $*" >>"%s/called"\nexit 99\n' $program "$scratch" >"$scratch/bin/$program"
  chmod +x "$scratch/bin/$program"
done
listing() { (cd "$scratch" && find launch -printf '%p %s %T@\n' | sort); }
listing >"$scratch/before"

# says <script> <line, a regular expression> <arguments ...>: the script without and with what a job would have.
says() {
  local script=$1 line=$2 rc=0
  shift 2
  rm -f "$scratch/called"
  (cd "$scratch" && env -u SLURM_JOB_ID OMPI_ALLOW_RUN_AS_ROOT=1 PATH="$scratch/bin:$PATH" timeout 20 "launch/$script" "$@") \
    >"$scratch/out" 2>&1 </dev/null || rc=$?
  [ "$rc" -eq 0 ] || fail "$script $*: exit code $rc"
  grep -qE -- "$line" "$scratch/out" || fail "$script $*: no line like '$line'"
  [ -e "$scratch/called" ] && fail "$script $*: started $(head -1 "$scratch/called")"
  listing | cmp -s - "$scratch/before" || fail "$script $*: wrote something"
  [ -z "$(cd "$scratch" && ls -A | grep -vxE 'launch|bin|before|out|called')" ] || fail "$script $*: left something behind"
  tested="$tested $script"
}
tested=""
says install-deps.sh '^install-deps: [0-9]+ packages needed, [0-9]+ missing' --tests --dev --dry-run
says quickstart.sh '^launch/mpirun.sh .*-n 2 build/c.*/bin/k3run --model ' --dry-run
grep -q '^launch/install-deps.sh' "$scratch/out" || fail "quickstart.sh: does not say that it installs"
says quickstart.sh '^cmake --build --preset c' --no-install --dry-run
says test.sh '^ctest --preset asan -j ' --dry-run
says test.sh '^ctest --preset full -j ' --no-install --full --dry-run
says mpirun.sh '^mpirun .* -n 8 build/cuda/bin/k3run --model K3.gguf ' --dry-run -n 8 build/cuda/bin/k3run --model K3.gguf
says k3.sbatch 'k3.sbatch: job none on .*mpirun.sh.* -n 1 build/cuda/bin/k3batch --resume' --as-root --dry-run build/cuda/bin/k3batch --resume
says k3.sbatch ' srun --mpi=pmi2 -n 1 --kill-on-bad-exit=1 k3program' --as-root --by pmi2 --dry-run k3program
says timed-run '^k3program decode --depth 128 $' -b 5 --dry-run k3program decode --depth 128

# Whatever else can be started there, now or later.
for script in "$scratch"/launch/*; do
  name=${script##*/}
  [ -f "$script" ] && { [ -x "$script" ] || head -1 "$script" | grep -q '^#!'; } || continue
  grep -qw -- "$name" <<<"$tested" || fail "$name: has no dry run in this test"
done

[ "$failures" -eq 0 ] || { echo "$failures failures"; exit 1; }
echo "all well"
