#!/usr/bin/env bash
# k3plan and k3synth from outside: what they print, write and refuse.
#   plan_synth.sh <launch/mpirun.sh> <bin> <tests/data>
source "$(dirname "$0")/common.sh"

# ok <name> <program> <arguments ...>
ok() {
  local name=$1
  shift
  run 1 "$bin/$1" "${@:2}"
  [ "$rc" -eq 0 ] || fail "$name: exit code $rc"
}
says() { grep -qE -- "$2" "$scratch/out" || fail "$1: no line like '$2'"; }
# bad <name> <line> <program> <arguments ...>
bad() {
  local name=$1 line=$2
  shift 2
  run 1 "$bin/$1" "${@:2}"
  refuses "$name" 2 "$line"
}

ok "the real shape" k3plan --shape k3 --quant UD-IQ1_S --tp 8 --verify
says "the real shape" '2573 tensors, 553.2 GiB'
says "the real shape" '^verified: '
says "the real shape" '^MoeLatent +92$'
ok "64 ranks" k3plan --shape k3 --tp 64 --verify
ok "JSON" k3plan --shape k3-8l --tp 3 --pp 2 --json --rank 5
says "JSON" '"policy": "full"'
says "JSON" '"name": "blk.7.ffn_down_exps.weight"'
ok "a split model, by its second part" k3plan --model "$data/models/k3-split3-f32-00002-of-00003.gguf" --tp 4 --verify
ok "experts only" k3plan --model "$nano" --tp 3 --policy experts-only
says "experts only" '^MoeLatent +8$'
for program in k3plan k3synth; do
  ok "$program --help" "$program" --help
  says "$program --help" '^Exit codes:'
  ok "$program --version" "$program" --version
done

if [ -w /dev/full ]; then
  for program in "k3plan --shape tiny" "k3plan --help"; do
    # shellcheck disable=SC2086
    timeout 60 "$bin/"$program >/dev/full 2>"$scratch/err"
    [ $? -eq 3 ] || fail "$program into a full disk: not exit code 3"
    grep -q '^k3plan: standard output: No space left on device$' "$scratch/err" || fail "$program into a full disk: no line"
  done
fi

bad "no such command" 'frob: not a command; layout' k3plan frob
run 1 "$bin/k3plan" --shape tiny
cp "$scratch/out" "$scratch/bare.txt"
ok "the command by its name" k3plan layout --shape tiny
cmp -s "$scratch/bare.txt" "$scratch/out" || fail "k3plan and k3plan layout differ"
bad "neither model nor shape" 'give either --model FILE or --shape NAME' k3plan
bad "both" 'give either --model FILE or --shape NAME' k3plan --shape k3 --model "$nano"
bad "unknown shape" 'no shape is called k4; valid: k3' k3plan --shape k4
bad "unknown recipe" '--quant IQ9: valid: UD-IQ1_S' k3plan --shape k3 --quant IQ9
bad "quant of a file" '--quant belongs to --shape' k3plan --model "$nano" --quant F32
bad "too many stages" '--pp 94: valid: 1 to 93' k3plan --shape k3 --pp 94
bad "groups that do not divide" '--expert-groups 3: must divide --tp 8; valid: 1, 2, 4, 8' k3plan --shape k3 --tp 8 \
  --expert-groups 3
bad "rank outside the world" '--rank 8: tp x pp gives ranks 0 to 7' k3plan --shape k3 --tp 8 --rank 8

# Nothing stays of a file that could not be finished.
bad "more threads than anybody has" '--threads 100000: valid: 1 to 1024' k3synth --out "$scratch/none.gguf" --threads 100000
timeout --preserve-status -s INT 2 "$bin/k3synth" --preset k3-8l --threads 1 --out "$scratch/big.gguf" >"$scratch/out" \
  2>"$scratch/err"
rc=$? seconds=0
refuses "an interrupted k3synth" 5 'stopped on request'
(ulimit -f 1000; exec timeout 60 "$bin/k3synth" --preset k3-8l --out "$scratch/big.gguf") >"$scratch/out" 2>"$scratch/err"
rc=$?
refuses "k3synth on a full disk" 3 '.*big.gguf: write: File too large'
compgen -G "$scratch/big.gguf*" >/dev/null && fail "half a synthetic model is left"
mkfifo "$scratch/fifo"
bad "a FIFO in the place of the file" '.*fifo: is a device, FIFO or socket' k3synth --out "$scratch/fifo"

out=$scratch/synth.gguf
ok "tiny" k3synth --preset tiny --out "$out"
ok "tiny again" k3synth --preset tiny --out "$scratch/again.gguf" --threads 3
cmp -s "$out" "$scratch/again.gguf" || fail "the same options gave two files"
ok "plan of tiny" k3plan --model "$out" --tp 5 --verify
ok "sizes of one's own" k3synth --heads 5 --experts 7 --quant F32 --layers 3 --split 4 --out "$scratch/odd.gguf"
says "sizes of one's own" 'odd-00004-of-00004.gguf$'
ok "plan of an odd model" k3plan --model "$scratch/odd-00003-of-00004.gguf" --tp 3 --verify
ok "header of the real model" k3synth --preset k3-full --header-only --out "$scratch/full.gguf"
ok "plan of the header" k3plan --model "$scratch/full.gguf" --tp 8
says "plan of the header" '2573 tensors, 553.2 GiB'
ok "a prompt on tiny" k3run --model "$out" --prompt "Hello there" -n 4 --temp 0
bad "no file named" '--out FILE is missing' k3synth
bad "no such preset" 'no shape is called huge' k3synth --preset huge --out "$scratch/x.gguf"
bad "more experts used than there are" 'shape tiny: more experts used' k3synth --experts 2 --out "$scratch/x.gguf"
bad "two ways to split" '--split and --split-bytes exclude each other' k3synth --split 2 --split-bytes 5000 \
  --out "$scratch/x.gguf"
[ -e "$scratch/x.gguf" ] && fail "a refused model left a file"
run 1 "$bin/k3synth" --out /nonexistent/x.gguf
refuses "a folder that is not there" 3 '/nonexistent/x.gguf'
finish
