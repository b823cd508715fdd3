#!/usr/bin/env bash
# launch/timed-run lets an honest benchmark pass and finds each kind of lie.
#   timed_run.sh <launch/mpirun.sh> <bin> <tests/data>
source "$(dirname "$0")/common.sh"
timed=$(dirname "$mpirun")/timed-run

run 1 "$timed" "$bin/k3bench" decode --synthetic tiny --threads 1 --depth 4 -n 4 --warmup 0
[ "$rc" -eq 0 ] || fail "an honest run: exit code $rc"
grep -q '^RESULT_JSON' "$scratch/out" || fail "an honest run: its output is gone"
[ "$(grep -c 'holds$' "$scratch/err")" -eq 5 ] || fail "an honest run: not five checks"

# lies <name> <what does not hold> <RESULT_JSON>: a command that says so after 0.2 s.
lies() {
  run 1 "$timed" -b 1 bash -c "sleep 0.2; echo 'RESULT_JSON $3'"
  [ "$rc" -eq 1 ] || fail "$1: exit code $rc"
  [ "$(grep -c 'DOES NOT HOLD' "$scratch/err")" -eq 1 ] || fail "$1: not one check fails"
  grep -q "$2.*DOES NOT HOLD" "$scratch/err" || fail "$1: not told"
}
lies "more inside than passed outside" 'is no more than outside' '{"inside_s":5,"outside_s":5}'
lies "steps longer than the clock around them" 'fit into the second clock' '{"inside_s":0.15,"outside_s":0.1}'
lies "nothing measured" 'something was measured' '{"inside_s":0,"outside_s":0}'
lies "another day" 'between start and end' '{"inside_s":0.1,"outside_s":0.1,"began_unix_s":1000,"ended_unix_s":1001}'
run 1 "$timed" -b 0.05 bash -c "sleep 0.4; echo 'RESULT_JSON {\"inside_s\":0.1,\"outside_s\":0.1}'"
[ "$rc" -eq 1 ] && grep -q 'unaccounted.*DOES NOT HOLD' "$scratch/err" || fail "time that nobody accounts for"
run 1 "$timed" bash -c 'exit 4'
[ "$rc" -eq 4 ] || fail "a command that fails: exit code $rc"
run 1 "$timed" true
[ "$rc" -eq 1 ] || fail "a command without a result: exit code $rc"
finish
