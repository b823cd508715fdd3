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
  holds "$name" '{priced_bytes} > 0 && {allocated_off_price} < 0.01'
  [ "$(count raw_bytes)" -eq "$ranks" ] || fail "$name: not a raw read for each rank"
done

name="fabricated depth"
run 2 "$bin/k3bench" decode --model "$nano" --threads 1 --depth 1500 -n 4 --warmup 0 --cache f16
measured "$name"
grep -q 'fabricated rows' "$scratch/out" || fail "$name: not said"
is "$name" first_position 1500
is "$name" n 4

name="synthetic weights"
run 1 "$bin/k3synth" --preset tiny --layers 4 --seed 9 --out "$scratch/tiny.gguf"
run 1 "$bin/k3bench" decode --model "$scratch/tiny.gguf" --threads 1 --seed 9 --depth 6 -n 6 --warmup 2
measured "$name, from the file"
expected=$(field ids)
for ranks in 1 2; do
  run "$ranks" "$bin/k3bench" decode --synthetic tiny,layers=4 --threads 1 --seed 9 --depth 6 -n 6 --warmup 2 --check 3 \
    --log "$scratch/check.h5"
  measured "$name on $ranks"
  is "$name on $ranks" ids "$expected"
  is "$name on $ranks" weights 'synthetic tiny,layers=4 seed 9'
  is "$name on $ranks" check_replayed_equal 3
  holds "$name on $ranks" '{check_n} == 3 && {check_top1} == 1 && {check_kld_max} == 0'
  h5dump -H -d prompt/id "$scratch/check.h5" >"$scratch/dump" 2>&1
  grep -q 'SIMPLE { ( 6 )' "$scratch/dump" || fail "$name on $ranks: the prompt is not in the log once"
done

name="one rank of eight"
run 1 "$bin/k3bench" decode --synthetic tiny --threads 1 --world 8 --solo-rank 5 --depth 6 -n 4 --warmup 0 --trace \
  --log "$scratch/solo.h5"
measured "$name"
grep -q '^PARTIAL WORLD: rank 5 of 8 alone' "$scratch/out" || fail "$name: not said"
is "$name" scope 'rank 5 of 8 alone: its text means nothing, its times exclude the network'
h5dump -y -w 0 -d bench/phases/name "$scratch/solo.h5" >"$scratch/dump" 2>&1
for phase in kda mla 'moe experts' RouterLatent MoeLatent head candidates; do
  grep -q "\"$phase\"" "$scratch/dump" || fail "$name: no phase $phase in the log"
done
name="two ranks of eight"
run 2 "$bin/k3bench" decode --synthetic tiny --threads 1 --world 8 --pair --depth 6 -n 4 --warmup 0
measured "$name"
[ "$(count token_bytes)" -eq 2 ] || fail "$name: not two ranks' bytes"
name="prefill of one rank of three"
run 1 "$bin/k3bench" prefill --synthetic tiny --threads 1 --tp 3 --solo-rank 1 --tokens 20 --chunk 8 --repeat 2 \
  --ceiling-gbs 50 --ceiling-tflops 1
measured "$name"
holds "$name" '0 < {floor_over_median} && {floor_over_median} < 1'

name="a prefix reused"
run 2 "$bin/k3bench" prefill --model "$nano" --threads 1 --depth 96 --tokens 6 --chunk 32 --reuse --log "$scratch/reuse.h5"
measured "$name"
[ "$(field way)" = '"whole","fork","restore"' ] || fail "$name: ways $(field way)"
[ "$(field max_abs_logit)" = 0,0,0 ] || fail "$name: logits differ by $(field max_abs_logit)"
[ "$(field ids | tr ',' '\n' | sort -u | wc -l)" -eq 1 ] || fail "$name: first ids $(field ids)"
# 96 of 102 tokens are not read again. Counted, not timed: whole steps of 3 chunks and a prompt, then the prompt alone.
steps=$(h5dump -y -w 0 -d steps/n_tok "$scratch/reuse.h5" | sed -n '/DATA {/,/}/p' | grep -oE '[0-9]+' | paste -sd,)
w=32,32,32,6
[ "$steps" = "32,32,32,$w,$w,$w,$w,32,32,32,6,6,6,6,6,6,6,6,6,6" ] || fail "$name: steps $steps"

name="ceilings"
run 1 "$bin/k3bench" ceilings --most-bytes 4000000 --repeat 2 --threads 1 --log "$scratch/ceilings.h5"
measured "$name"
holds "$name" '{copy_gb_s} > 0 && {read_gb_s} > 0 && {multiply_tflops} > 0 && {matmul_tflops} > 0'
name="collective"
run 2 "$bin/k3bench" collective --most-bytes 16384 --repeat 2 --threads 1
measured "$name"
[ "$(field call | tr ',' '\n' | sort | uniq -c | wc -l)" -eq 3 ] || fail "$name: not three kinds of calls"

run 1 "$bin/k3bench" decode --synthetic tiny --world 8 --solo-rank 8
refuses "a rank that is none" 2 '--solo-rank 8: the world has 8 ranks'
run 2 "$bin/k3bench" decode --synthetic tiny --world 8 --solo-rank 0
refuses "alone on two ranks" 2 '--solo-rank: needs 1 rank, this job has 2'
run 1 "$bin/k3bench" decode --synthetic tiny --model "$nano"
refuses "two models" 2 '--model and --synthetic'
run 1 "$bin/k3bench" decode --synthetic tiny,depth=3
refuses "no such size" 2 'synthetic model tiny,depth=3: .depth=3. is no'
run 1 "$bin/k3bench" collective
refuses "nobody to talk to" 2 'collective: needs two ranks'

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
for program in "k3bench" "k3bench decode" "k3bench prefill" "k3bench load" "k3bench ceilings" \
  "k3bench collective" "k3report"; do
  run 1 $bin/$program --help
  [ "$rc" -eq 0 ] && grep -q '^usage:' "$scratch/out" || fail "$program --help"
done
finish
