#!/usr/bin/env bash
# Whatever is wrong with the input: every rank ends with the exit code of its kind, after one line that names what.
#   bad_input.sh <launch/mpirun.sh> <bin> <tests/data> <mutate_gguf>
source "$(dirname "$0")/common.sh"
mutate=$4
split=$data/models/k3-split3-f32

# bad <name> <exit code> <line> <arguments of k3run ...>: on one rank and on two.
bad() {
  local name=$1 code=$2 line=$3 n
  shift 3
  for n in 1 2; do
    run "$n" "$bin/k3run" "$@"
    refuses "$name on $n" "$code" "$line"
  done
}

# changed <change> <key or tensor> [value]: a copy of k3-nano that is wrong in this way.
changed() {
  "$mutate" "$nano" "$scratch/bad.gguf" "$@" || fail "mutate_gguf $*"
}

# ---- options ----------------------------------------------------------------------------------------------------------
bad "unknown option" 2 '--frobnicate: unknown option' --frobnicate 1
bad "beginning of an option" 2 '--prom: unknown option, did you mean --prompt\?' --prom x
bad "malformed number" 2 '--ctx 12x: not a whole number' --ctx 12x --prompt x
bad "value out of range" 2 '--top-p 1.5: ' --top-p 1.5 --prompt x
bad "layout that is not the world" 2 '--tp 3' --tp 3 --prompt x
bad "unknown backend" 2 '--backend tpu: not one of cpu, cuda' --backend tpu --prompt x
bad "a word" 2 'hello: k3run takes options only' hello
bad "two prompts" 2 '--prompt and --prompt-file: give one' --prompt x --prompt-file y

# ---- the prompt -------------------------------------------------------------------------------------------------------
bad "empty prompt" 2 '--prompt: the prompt is empty' --prompt ''
bad "prompt longer than ctx" 2 '--prompt: the prompt has [0-9]+ tokens, --ctx is 4 ' --ctx 4 \
  --prompt 'The capital of France is the city of Paris'
bad "ctx over the model's limit" 2 '--ctx 5000: .*4096' --ctx 5000 --prompt x
bad "prompt file that is not there" 2 "$scratch/none: no such file" --prompt-file "$scratch/none"

# ---- the model --------------------------------------------------------------------------------------------------------
bad "model that is not there" 2 "$scratch/none.gguf: no such file" --model "$scratch/none.gguf" --prompt x
echo "this is no model" >"$scratch/text.gguf"
bad "not a GGUF" 2 "$scratch/text.gguf: .*not a GGUF file" --model "$scratch/text.gguf" --prompt x
: >"$scratch/empty.gguf"
bad "empty file" 2 "$scratch/empty.gguf: " --model "$scratch/empty.gguf" --prompt x
head -c 5000000 "$nano" >"$scratch/cut.gguf"
bad "truncated in the data" 2 "$scratch/cut.gguf: .*ends at byte [0-9]+, file has 5000000" --model "$scratch/cut.gguf" \
  --prompt x
head -c 10000 "$nano" >"$scratch/cut.gguf"
bad "truncated in the header" 2 "$scratch/cut.gguf: " --model "$scratch/cut.gguf" --prompt x
changed set-string general.architecture llama
bad "another architecture" 2 "$scratch/bad.gguf: .*llama" --model "$scratch/bad.gguf" --prompt x
changed drop-key kimi-k3.kda.head_dim
bad "missing key" 2 "$scratch/bad.gguf: .*kimi-k3.kda.head_dim" --model "$scratch/bad.gguf" --prompt x
changed drop-key tokenizer.ggml.tokens
bad "missing vocabulary" 2 "$scratch/bad.gguf: .*tokenizer.ggml.tokens" --model "$scratch/bad.gguf" --prompt x
changed swap-dims blk.2.attn_q.weight
bad "wrong shape" 2 "$scratch/bad.gguf: .*blk.2.attn_q.weight" --model "$scratch/bad.gguf" --prompt x
changed drop-tensor blk.3.attn_output.weight
bad "missing tensor" 2 "$scratch/bad.gguf: .*blk.3.attn_output.weight" --model "$scratch/bad.gguf" --prompt x
changed add-tensor blk.4.surprise.weight
bad "tensor that nobody uses" 2 "$scratch/bad.gguf: .*blk.4.surprise.weight" --model "$scratch/bad.gguf" --prompt x
changed nan blk.5.attn_norm.weight
bad "NaN in a norm" 2 "bad.gguf: blk.5.attn_norm.weight: element 0 is NaN" --model "$scratch/bad.gguf" --prompt x
cp "$split"-0000[13]-of-00003.gguf "$scratch"
bad "missing part" 2 '.*00002-of-00003.gguf' --model "$scratch/k3-split3-f32-00001-of-00003.gguf" --prompt x

# ---- outputs that are inputs ------------------------------------------------------------------------------------------
cp "$nano" "$scratch/own.gguf"
ln -s own.gguf "$scratch/other.gguf"
echo x >"$scratch/prompt.txt"
bad "log over the model" 2 '--log .*other.gguf: would replace the input .*own.gguf' --model "$scratch/own.gguf" --prompt x \
  --log "$scratch/other.gguf"
bad "log over the prompt" 2 '--log .*prompt.txt: would replace the input' --prompt-file "$scratch/prompt.txt" \
  --log "$scratch/prompt.txt"
run 1 "$bin/k3eval" logits --model "$scratch/own.gguf" --ids 1 --out "$scratch/other.gguf"
refuses "logits over the model" 2 '--out .*other.gguf: would replace the input .*own.gguf'
cmp -s "$nano" "$scratch/own.gguf" && [ "$(cat "$scratch/prompt.txt")" = x ] || fail "an input was replaced"
bad "log in the place of a folder" 2 '.*: is a directory, expected the name of a file' --prompt x --log "$scratch"

run 1 "$bin/k3bench" decode --model "$scratch/own.gguf" --log "$scratch/other.gguf"
refuses "a benchmark's log over the model" 2 '--log .*other.gguf: would replace the input .*own.gguf'
cmp -s "$nano" "$scratch/own.gguf" || fail "the model was replaced by a log"

# A file that is there stays until there is something better to put in its place.
echo precious >"$scratch/out.f32"
changed nan blk.5.attn_norm.weight
run 1 "$bin/k3eval" logits --model "$scratch/bad.gguf" --ids 1 --out "$scratch/out.f32"
refuses "logits of a model that does not load" 2 '.*blk.5.attn_norm.weight: element 0 is NaN'
[ "$(cat "$scratch/out.f32")" = precious ] || fail "a failed run replaced its --out"
compgen -G "$scratch/out.f32.*" >/dev/null && fail "half a file of logits is left"

# ---- ids --------------------------------------------------------------------------------------------------------------
for n in 1 2; do
  run "$n" "$bin/k3eval" logits --ids '1 2 2048' --out "$scratch/x.f32"
  refuses "id outside the vocabulary on $n" 2 '--ids: word 2: id 2048 is outside .* 2048 tokens'
done
run 1 "$bin/k3eval" logits --ids '1 2 -3' --out "$scratch/x.f32"
refuses "negative id" 2 "--ids: word 2: '-3' is not a token id"
run 1 "$bin/k3eval" frob
refuses "unknown command" 2 'frob: not a command'

# ---- the environment --------------------------------------------------------------------------------------------------
bad "log that cannot be written" 3 "$scratch/none/run.h5.*No such file" --log "$scratch/none/run.h5" --prompt x -n 1
SLURM_NTASKS=4 SLURM_PROCID=0 run 1 "$bin/k3run" --prompt x -n 1
refuses "singletons" 3 '.*started 4 processes'
SLURM_NTASKS=4 SLURM_PROCID=2 run 1 "$bin/k3run" --prompt x -n 1
[ "$rc" -eq 3 ] && [ ! -s "$scratch/err" ] || fail "of four singletons only the first speaks"
# The shell of a job script says that there are four tasks, and starts one process. A page needs no ranks.
for program in k3run k3eval k3bench "k3eval logits" "k3bench decode"; do
  for page in --help --version; do
    SLURM_NTASKS=4 SLURM_PROCID=0 run 1 $bin/$program $page
    [ "$rc" -eq 0 ] && [ -s "$scratch/out" ] && [ ! -s "$scratch/err" ] || fail "$program $page without srun: exit code $rc"
    SLURM_NTASKS=4 SLURM_PROCID=2 run 1 $bin/$program $page
    [ "$rc" -eq 0 ] && [ ! -s "$scratch/out" ] || fail "$program $page: another than rank 0 speaks"
  done
done
finish
