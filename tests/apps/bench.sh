#!/usr/bin/env bash
# k3bench draws the tokens that k3run draws, and its numbers fit together.
#   bench.sh <launch/mpirun.sh> <bin> <tests/data>
source "$(dirname "$0")/common.sh"
question='The capital of France is'
n=10 warmup=3

# field <name>: the first number, text or list of that name in the last run's RESULT_JSON; lists without brackets.
field() {
  sed -n 's/^RESULT_JSON //p' "$scratch/out" | grep -oE "\"$1\":(\[[^]]*\]|\"[^\"]*\"|[^,}]*)" | head -1 |
    sed -E 's/^"[^"]*"://; s/^["[]//; s/[]"]$//'
}
# holds <name> <condition of awk over the fields named in it as {name}>
holds() {
  local expression=$2 name
  for name in $(grep -oE '\{[a-z0-9_]+\}' <<<"$2" | tr -d '{}'); do
    expression=${expression//"{$name}"/"($(field "$name"))"}
  done
  awk "BEGIN { exit !($expression) }" 2>/dev/null || fail "$1: not $2 ($expression)"
}
is() { [ "$(field "$2")" = "$3" ] || fail "$1: $2 is '$(field "$2")', expected '$3'"; }
count() { field "$1" | tr ',' '\n' | grep -c .; }
measured() {
  [ "$rc" -eq 0 ] || fail "$1: exit code $rc"
  [ "$(grep -c '^RESULT_JSON {' "$scratch/out")" -eq 1 ] || fail "$1: not one RESULT_JSON line"
}

ids=$("$bin/k3tok" --model "$nano" --prompt "$question" 2>"$scratch/err")
[ -n "$ids" ] || fail "k3tok gives no ids"
# The first token and those of the warm-up come before the timed ones.
"$bin/k3run" --threads 1 --model "$nano" --prompt "$question" --temp 0 --ignore-eos -n $((1 + warmup + n)) \
  --log "$scratch/run.h5" >"$scratch/out" 2>"$scratch/err" </dev/null || fail "k3run"
expected=$(h5dump -y -w 0 -d tokens/id "$scratch/run.h5" | sed -n '/DATA {/,/}/p' | grep -oE '[0-9]+' | paste -sd,)

for ranks in 1 2; do
  name="decode on $ranks"
  run "$ranks" "$bin/k3bench" decode --model "$nano" --threads 1 --ids "$ids" -n "$n" --warmup "$warmup" \
    --ceiling-gbs 100 --predict 2.5 --log "$scratch/bench.h5"
  measured "$name"
  [ "$(field untimed_ids),$(field ids)" = "$expected" ] ||
    fail "$name: ids $(field untimed_ids),$(field ids), k3run drew $expected"
  is "$name" command decode
  is "$name" n "$n"
  is "$name" world "$ranks"
  is "$name" state 'a real prefill of the given ids'
  is "$name" option_predict 2.5
  [ "$(count seconds)" -eq "$n" ] || fail "$name: $(count seconds) times"
  holds "$name" '0 < {p10_ms} && {p10_ms} <= {median_ms} && {median_ms} <= {p90_ms}'
  holds "$name" '{inside_s} <= {outside_s} * 1.001'
  holds "$name" '{mean_ms} * {n} / 1000 / {inside_s} > 0.999 && {mean_ms} * {n} / 1000 / {inside_s} < 1.001'
  holds "$name" '{tok_s} * {median_ms} > 999 && {tok_s} * {median_ms} < 1001'
  holds "$name" '{predicted} == 2.5 && {bytes_per_token} > 0 && {floor_ms} < {median_ms}'
  h5dump -a bench/median_ms -d bench/seconds "$scratch/bench.h5" >"$scratch/dump" 2>&1 ||
    fail "$name: the log has no bench"
  [ "$(h5dump -a state "$scratch/bench.h5" | grep -c '"finished"')" -eq 1 ] || fail "$name: the log is not finished"

  name="prefill on $ranks"
  run "$ranks" "$bin/k3bench" prefill --model "$nano" --threads 1 --ids "$ids" --chunk 2 --repeat 4
  measured "$name"
  first=${expected%%,*}
  [ "$(field ids)" = "$first,$first,$first,$first" ] || fail "$name: first ids $(field ids), k3run drew $first"
  is "$name" n 4
  is "$name" first_ids equal
  holds "$name" '0 < {p10_tok_s} && {p10_tok_s} <= {median_tok_s} && {median_tok_s} <= {p90_tok_s}'
  holds "$name" '{p10_ttft_ms} <= {median_ttft_ms} && {median_ttft_ms} <= {p90_ttft_ms}'

  name="load on $ranks"
  run "$ranks" "$bin/k3bench" load --model "$nano" --threads 1
  measured "$name"
  holds "$name" '{load_s} > 0 && {raw_s} > 0 && {load_gb_s} > 0'
  [ "$(count raw_bytes)" -eq "$ranks" ] || fail "$name: not a raw read for each rank"
done

name="fabricated depth"
run 2 "$bin/k3bench" decode --model "$nano" --threads 1 --depth 1500 -n 4 --warmup 0 --cache f16
measured "$name"
grep -q 'fabricated rows' "$scratch/out" || fail "$name: not said"
is "$name" first_position 1500
is "$name" n 4

run 1 "$bin/k3bench"
refuses "no command" 2 'a command is missing'
run 1 "$bin/k3bench" guess
refuses "unknown command" 2 'guess: not a command'
run 1 "$bin/k3bench" decode --model "$nano" --depth 0
refuses "no depth" 2 '--depth 0: outside'
run 1 "$bin/k3bench" decode --model "$nano" --depth 8 -n 8 --ctx 10
refuses "short context" 2 '--ctx 10: the benchmark needs 32 positions'
run 1 "$bin/k3bench" prefill --model "$nano" --tokens 4 --ids '1 2'
refuses "ids and tokens" 2 '--ids and --tokens'
for program in "k3bench" "k3bench decode" "k3bench prefill" "k3bench load"; do
  run 1 $bin/$program --help
  [ "$rc" -eq 0 ] && grep -q '^usage:' "$scratch/out" || fail "$program --help"
done
finish
