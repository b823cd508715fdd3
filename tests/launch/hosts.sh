#!/usr/bin/env bash
# Jobs over three hosts, over TCP and over UCX: one text whatever the layout; a cut link ends the job in half a minute and names
# the host; a rank that stands still is named with its host; a slow link makes the job slow and nothing else.
#   hosts.sh <launch/mpirun.sh> <bin> <k3-nano.gguf>
set -uo pipefail
mpirun=$(readlink -f "$1") bin=$(readlink -f "$2") nano=$(readlink -f "$3")
# shellcheck source=tests/launch/hosts_site.sh
. "$(dirname "$0")/hosts_site.sh"
reason=$(missing_for_hosts)
[ -z "$reason" ] || { echo "SKIP: $reason"; exit 77; }

scratch=$(mktemp -d)
failures=0
trap 'stop_hosts; rm -rf "$scratch"' EXIT
start_hosts "$scratch/site" 3 || { echo "FAILED: the hosts do not come up"; exit 1; }

fail() {
  echo "FAILED: $1"
  sed 's/^/    /' "$scratch/err" | cut -c1-300
  failures=$((failures + 1))
}

# The hosts share this machine's memory, of which UCX would make use between them.
declare -A network=(
  [tcp]="--net tcp --if eth0"
  [ucx]="--net ucx --if eth0 -x UCX_TLS=tcp,self -x UCX_LOG_LEVEL=info -x UCX_LOG_FILE=$scratch/ucx.log"
)
k3run=("$bin/k3run" --model "$nano" --threads 1 --temp 0 --ignore-eos --prompt "Once upon a time")
program=("${k3run[@]}")

# over <network> <hosts and slots> <ranks> <more of k3run>: mpirun on h1. More ranks than cores on this machine, if not on a host.
over() {
  local net=$1 hosts=$2 n=$3
  shift 3
  # shellcheck disable=SC2086
  in_host h1 timeout 90 "$mpirun" ${network[$net]} --mca plm_rsh_agent "$rsh_agent" --mca mpi_yield_when_idle 1 -H "$hosts" -n "$n" \
    "${program[@]}" "$@" >"$scratch/out" 2>"$scratch/err"
}

# received <host>: bytes so far. /sys shows the networks of whoever mounted it.
received() { in_host "$1" awk '$1 == "eth0:" { print $2 }' /proc/net/dev; }

tpot() { sed -nE 's/.* TPOT ([0-9.]+) ms.*/\1/p' "$scratch/err"; }

"${k3run[@]}" -n 8 >"$scratch/reference" 2>/dev/null || fail "the reference does not run"

# What mpirun's own daemons say to h3 in a job without ranks that speak.
before=$(received h3)
over tcp h1:1,h2:1,h3:1 3 --version
idle=$(($(received h3) - before))

# ---- one text ---------------------------------------------------------------------------------------------------------
for net in tcp ucx; do
  for layout in "h1:1,h2:1,h3:1 3 --tp 3" "h1:1,h2:1,h3:1 3 --tp 1 --pp 3" "h1:2,h2:1,h3:1 4 --tp 2 --pp 2"; do
    before=$(received h3)
    # shellcheck disable=SC2086
    over $net $layout -n 8 || fail "$net $layout: exit code $?"
    cmp -s "$scratch/out" "$scratch/reference" || fail "$net $layout: another text"
    moved=$(($(received h3) - before))
    [ "$moved" -gt $((idle + 10000)) ] || fail "$net $layout: $moved bytes went to h3, $idle without a model"
  done
done

grep -q 'tcp/eth0' "$scratch/ucx.log" || fail "ucx: UCX does not say that it was used"

# ---- what they say of themselves ---------------------------------------------------------------------------------------
program=("$bin/k3plan" check-node --model "$nano")
for net in tcp ucx; do
  over $net h1:1,h2:1,h3:1 3 || fail "$net: check-node: exit code $?"
  grep -qE '^rank 0/3 \(h1\) - rank 2/3 \(h3\): [0-9.]+ us, [0-9.]+ GB/s, over eth0$' "$scratch/out" ||
    { cat "$scratch/out" && fail "$net: check-node: no line about h1 and h3"; }
done
grep -q ', ucx$' "$scratch/out" || fail "ucx: check-node does not say so"
program=("${k3run[@]}")

# ---- a slow link ------------------------------------------------------------------------------------------------------
over tcp h1:1,h2:1,h3:1 3 --tp 3 -n 8
quick=$(tpot)
slow="netem delay 10ms"
in_host switch tc qdisc add dev h3 root netem delay 10ms 2>/dev/null ||
  { slow="tbf rate 2mbit" && in_host switch tc qdisc add dev h3 root tbf rate 2mbit burst 8kb latency 400ms 2>/dev/null; } || slow=""
if [ -n "$slow" ]; then
  over tcp h1:1,h2:1,h3:1 3 --tp 3 -n 8 --time-limit 10 || fail "a slow link: exit code $?"
  cmp -s "$scratch/out" "$scratch/reference" || fail "a slow link: another text"
  echo "a slow link ($slow): $(tpot) ms a token, without $quick"
  awk -v a="$quick" -v b="$(tpot)" 'BEGIN { exit !(b > 1.5 * a) }' || fail "a slow link: it was not slow"
  in_host switch tc qdisc del dev h3 root
else
  echo "not tried: a slow link: this kernel has neither netem nor tbf"
fi

# ---- a rank that stands still -----------------------------------------------------------------------------------------
# begin <more>: in the background until there is text. Sets job.
begin() {
  : >"$scratch/out"
  over tcp h1:1,h2:1,h3:1 3 --tp 3 -n 4000 "$@" &
  job=$!
  for _ in $(seq 300); do
    [ -s "$scratch/out" ] && return
    sleep 0.1
  done
  fail "no text after 30 s"
}

# ends_within <seconds> <name>: the job does, not with 0, and nothing is left anywhere; sets took.
ends_within() {
  local begin=$SECONDS left
  wait "$job" && fail "$2: exit code 0"
  took=$((SECONDS - begin))
  for _ in $(seq 100); do
    left=$(for h in h1 h2 h3; do processes_on $h "$bin/k3run"; done)
    [ -z "$left" ] && break
    sleep 0.1
  done
  [ -z "$left" ] || fail "$2: ranks are left: $left"
  [ "$took" -le "$1" ] || fail "$2: took $took s to end"
}

begin --time-limit 2
kill -STOP "$(processes_on h3 "$bin/k3run")"
ends_within 10 "a rank stands still"
[ "$(grep -cE '^rank 0/3 \(h1\): waited 2[0-9.]* s in [a-z_]+\([A-Za-z]+\) call [0-9]+, layer [0-9]+ for rank 2 on h3$' "$scratch/err")" -eq 1 ] ||
  fail "a rank stands still: no line that names it and its host"

# ---- a cut link -------------------------------------------------------------------------------------------------------
begin
in_host switch ip link set h3 down
ends_within 30 "a cut link"
grep -q 'Remote daemon: .* on node h3$' "$scratch/err" || fail "a cut link: the host is not named"
grep -qE '^rank [01]/3 \(h[12]\): asked to end while waiting, for [0-9.]+ s, in ' "$scratch/err" || fail "a cut link: no rank says where it waited"
echo "a cut link: the job ended after $took s"

[ "$failures" -eq 0 ] || { echo "$failures failures"; exit 1; }
echo "all well in $SECONDS s"
