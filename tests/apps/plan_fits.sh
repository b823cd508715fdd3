#!/usr/bin/env bash
# k3plan fits from outside: what it prints, its exit codes, what it refuses.
#   plan_fits.sh <launch/mpirun.sh> <bin> <tests/data> <launch/nodes>
source "$(dirname "$0")/common.sh"
nodes=$4

fits() { run 1 "$bin/k3plan" fits "$@"; }
says() { grep -qE -- "$2" "$scratch/out" || fail "$1: no line like '$2'"; }
# bad <name> <line> <arguments ...>
bad() {
  local name=$1 line=$2
  shift 2
  fits "$@"
  refuses "$name" 2 "$line"
}

fits
[ "$rc" -eq 0 ] || fail "the table: exit code $rc"
says "the table" '^h200x8: 8 x NVIDIA H200'
says "the table" '^h200x8 +UD-IQ1_S .* fits .* 1048576 '
says "the table" '^h200x8 +UD-Q4_K_XL .* NO .* none '
says "the table" '^note: UD-IQ2_XXS: .*the published size is taken$'

# The verdict on one model is the exit code too, and the table stays on standard output.
fits --node gb10x3 --quant Neuron-IQ1_S --ctx 8192
[ "$rc" -eq 0 ] || fail "a file that fits: exit code $rc"
says "a file that fits" '^note: gb10x3: Neuron-IQ1_S fits byte for byte as in the file, but as .*CUDA kernels'
fits --node gb10x3 --quant Neuron-IQ1_S --ctx 8192 --weights-as cuda
[ "$rc" -eq 2 ] || fail "as the CUDA kernels lay it out: exit code $rc"
fits --node h200x4 --quant UD-IQ1_S
[ "$rc" -eq 2 ] || fail "a file that does not fit: exit code $rc"
[ "$(wc -l <"$scratch/err")" -eq 1 ] || fail "a file that does not fit: not one line"
grep -q '^k3plan: h200x4: UD-IQ1_S at --ctx 1048576 would not be fully resident: .*no context fits; 6 such devices' \
  "$scratch/err" || fail "a file that does not fit: no line"
says "a file that does not fit" '^h200x4 +UD-IQ1_S .* NO '

fits --node all --json
[ "$rc" -eq 0 ] || fail "every node: exit code $rc"
[ "$(grep -c '"resident":' "$scratch/out")" -eq $((6 * $(find "$nodes" -name '*.json' | wc -l))) ] ||
  fail "every node: not every file on every node"

# A node and a model of one's own.
sed 's/"h200x8"/"mine"/; s/"devices": 8/"devices": 2/' "$nodes/h200x8.json" >"$scratch/mine.json"
fits --node "$scratch/mine.json" --model "$nano" --ctx 4096
[ "$rc" -eq 0 ] || fail "a model on a node of one's own: exit code $rc"
says "a model on a node of one's own" '^mine +k3-nano.gguf .* fits .* 4096 '
sed 's/"source": "[^"]*"/"source": ""/' "$scratch/mine.json" >"$scratch/unsourced.json"
bad "a figure without a source" '.*unsourced.json: memory_gib: source: expected a text' --node "$scratch/unsourced.json"

bad "no such node" '--node h300x8: valid: all, b200x8, .*h200x8' --node h300x8
bad "no such file" '--quant Q9: valid: UD-IQ1_S, ' --quant Q9
bad "both" 'give --quant NAME or --model FILE, not both' --quant UD-IQ1_S --model "$nano"
bad "beyond the model" '--ctx 1048577: valid: 1 to 1048576' --quant UD-IQ1_S --ctx 1048577
bad "another world" '--tp 3 --pp 1: needs 3 devices, h200x8 has 8' --tp 3
bad "stages that do not divide" '--pp 3: does not divide the 8 devices of h200x8' --pp 3
bad "no step" '--chunk 0: valid: 1 to ' --chunk 0
fits --node "$scratch/none.json"
refuses "no such profile" 3 '.*none.json: No such file'
finish
