#!/usr/bin/env bash
# k3plan inspect from outside: what it prints, a manifest, what differs from one, going on after a kill.
#   plan_inspect.sh <launch/mpirun.sh> <bin> <tests/data> <mutate_gguf>
source "$(dirname "$0")/common.sh"
mutate=$(readlink -f "$4")

inspect() { run 1 "$bin/k3plan" inspect "$@"; }
says() { grep -qE -- "$2" "$scratch/out" || fail "$1: no line like '$2'"; }
good() { [ "$rc" -eq 0 ] || fail "$1: exit code $rc"; }
# differs <name> <line>: the last comparison found that and nothing else.
differs() {
  [ "$rc" -eq 2 ] || fail "$1: exit code $rc"
  says "$1" "^differs: $2$"
  [ "$(grep -c '^differs: ' "$scratch/out")" -eq "${3:-1}" ] || fail "$1: other differences than ${3:-1}"
  grep -qE "^k3plan: .*: ${3:-1} differences? from " "$scratch/err" || fail "$1: no line on stderr"
}

cp "$data"/models/k3-split3-f32-0000?-of-00003.gguf "$scratch"
part() { echo "$scratch/k3-split3-f32-0000$1-of-00003.gguf"; }
inspect "$(part 2)" --keys --manifest "$scratch/m.json" --chunk-mib 1
good "a manifest"
says "a manifest" '^3 parts, 107 tensors, .* fingerprint [0-9a-f]{32}$'
says "a manifest" '^  general.architecture +string "kimi-k3"$'
says "a manifest" '^  experts +F32 +9 +59904 .* 32.0000$'
says "a manifest" '^tokenizer: model gpt2, pre-tokenizer kimi-k2, 352 tokens \(339 normal, 13 control'
says "a manifest" '^  bos 339 \[BOS\]; eos 341 .*generation stops at 340, 341$'
says "a manifest" "^[0-9a-f]{64}  k3-split3-f32-00003-of-00003.gguf$"
[ -e "$scratch/m.json.partial" ] && fail "a manifest: its journal is left"
inspect "$(part 1)" --compare "$scratch/m.json"
good "compared"
says "compared" '^the same as in the manifest, every byte$'

# One byte in the middle of a tensor.
printf '\x55' | dd of="$(part 3)" bs=1 seek=200000 conv=notrunc status=none
inspect "$(part 1)" --compare "$scratch/m.json"
differs "one changed byte" 'k3-split3-f32-00003-of-00003.gguf: other bytes between 0 and 313792: the header, .*'
inspect "$(part 1)" --compare "$scratch/m.json" --no-hash
good "one changed byte, unread"
cp "$data/models/k3-split3-f32-00003-of-00003.gguf" "$scratch"

mv "$(part 2)" "$scratch/second.gguf"
inspect "$(part 1)" --compare "$scratch/m.json"
differs "a renamed part" 'part 2 of 3: k3-split3-f32-00002-of-00003.gguf is missing; second.gguf has its bytes'
rm "$scratch/second.gguf"
inspect "$(part 1)" --compare "$scratch/m.json"
differs "a missing part" 'part 2 of 3: k3-split3-f32-00002-of-00003.gguf is missing'

# A chunk tells where: nano in chunks of 1 MiB.
cp "$nano" "$scratch/nano.gguf"
inspect "$scratch/nano.gguf" --manifest "$scratch/n.json" --chunk-mib 1 --threads 3
good "chunks of 1 MiB"
printf '\x55' | dd of="$scratch/nano.gguf" bs=1 seek=9000000 conv=notrunc status=none
inspect "$scratch/nano.gguf" --compare "$scratch/n.json"
differs "a byte of nano" 'nano.gguf: other bytes between 8388608 and 9437184: blk\..*'
cp "$nano" "$scratch/nano.gguf"
"$mutate" "$scratch/nano.gguf" "$scratch/other.gguf" set-u32 kimi-k3.expert_used_count 3
mv "$scratch/other.gguf" "$scratch/nano.gguf"
inspect "$scratch/nano.gguf" --compare "$scratch/n.json" --no-hash
says "a changed key" '^differs: key kimi-k3.expert_used_count: u32 3, the manifest has u32 4$'

# Killed while it writes its journal (by the limit on a file's size: always at the same place), then given again.
cp "$nano" "$scratch/nano.gguf"
rm "$scratch/n.json"
(ulimit -c 0 -f 1; exec "$bin/k3plan" inspect "$scratch/nano.gguf" --manifest "$scratch/n.json" --chunk-mib 1 --threads 1) \
  >/dev/null 2>"$scratch/err"
rc=$?
[ "$rc" -eq 153 ] || fail "a killed run: exit code $rc, not that of SIGXFSZ"
[ -e "$scratch/n.json" ] && fail "a killed run: left a manifest"
inspect "$scratch/nano.gguf" --manifest "$scratch/n.json" --chunk-mib 1 --threads 2
good "gone on"
grep -qE '^resumed: 13631488 of 15730592 bytes were hashed before$' "$scratch/err" || fail "gone on: not from where it was"
cp "$scratch/n.json" "$scratch/resumed.json"
inspect "$scratch/nano.gguf" --manifest "$scratch/n.json" --chunk-mib 1
cmp -s "$scratch/resumed.json" "$scratch/n.json" || fail "gone on: another manifest than in one go"

# A model that k3run would refuse is looked at all the same.
"$mutate" "$nano" "$scratch/bad.gguf" drop-tensor blk.3.attn_kv_a_mqa.weight
inspect "$scratch/bad.gguf"
good "a model without a tensor"
says "a model without a tensor" 'k3run would refuse this model: .*blk.3.attn_kv_a_mqa.weight'

inspect
refuses "no model" 2 'give one MODEL'
inspect "$nano" --manifest a --compare b
refuses "both" 2 'give --manifest FILE or --compare FILE, not both'
inspect "$nano" --compare "$scratch/none.json"
refuses "no manifest" 3 '.*none.json: No such file'
inspect "$nano" --compare "$nano"
refuses "not a manifest" 2 '.*k3-nano.gguf: is no manifest: '
inspect "$nano" --chunk-mib 0
refuses "chunks of nothing" 2 '--chunk-mib 0: valid: 1 to 4096'
finish
