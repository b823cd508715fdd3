#!/usr/bin/env bash
# The committed receipts and baselines hold, and every rule about them is there: each case breaks one thing in a copy of
# results/ and asks for the line that says so.
#   ledger.sh <k3report> <results>
set -uo pipefail
k3report=$1 results=$2
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
failures=0
fail() {
  echo "FAILED: $1"
  failures=$((failures + 1))
}

"$k3report" verify --results "$results" || fail "the committed ledger (after a new run: see results/README.md)"

# The cases start from a small ledger of their own key, so that they can also seal.
base=$scratch/base copy=$scratch/copy
mkdir "$base"
cp "$results"/h200-k3-8l-{decode-128,decode-128-rings,decode-128-units,fast-decode-128,decode-131072-rings,fast-decode-131072}.h5 "$base"
key=$scratch/key.pem
"$k3report" keygen --key "$key" >"$base/receipt-keys.txt" || fail "keygen"
[ "$(stat -c %a "$key")" = 600 ] || fail "a key that others can read"
"$k3report" keygen --key "$key" >/dev/null 2>&1 && fail "keygen over a key"
d128=1xH200/k3-8l/UD-IQ1_S/d128-f16/decode_ms/k3-fast
d131072=1xH200/k3-8l/UD-IQ1_S/d131072-f16/decode_ms/k3-fast
peer="peer 1xH200/k3-8l/UD-IQ1_S/d128-f16/decode_ms/llama.cpp 5.2 measured-elsewhere llama.cpp 768d2a481, llama-bench"
printf '%s\n' "$peer" "guard $d128 $d131072" >"$base/baselines.lock"
mkdir "$scratch/bin" && echo program >"$scratch/bin/k3bench" && echo other >"$scratch/bin/k3eval"
cp -r "$base" "$scratch/named"
"$k3report" seal --results "$scratch/named" --key "$key" --binary "$scratch/bin/k3bench" >/dev/null &&
  grep -q "\"binary_sha256\":\"$(sha256sum <"$scratch/bin/k3bench" | cut -d' ' -f1)\"" "$scratch/named/receipts.jsonl" || fail "the program's hash"
"$k3report" seal --results "$base" --key "$key" --binary "$scratch/bin/k3eval" >/dev/null || fail "seal"
grep -q '"binary_sha256":null' "$base/receipts.jsonl" || fail "the hash of a program that did not measure"
lock=$base/baselines.lock

fresh() {
  rm -rf "$copy"
  cp -r "$base" "$copy"
}
# finds <what> <regular expression> [--before FILE]: verify says it, with exit code 2. And the next case starts afresh.
finds() {
  local rc
  "$k3report" verify --results "$copy" "${@:3}" >"$scratch/out" 2>"$scratch/err"
  rc=$?
  if [ $rc -ne 2 ] || ! grep -qE "$2" "$scratch/err"; then
    fail "$1: exit code $rc, no line like '$2'"
    sed 's/^/    /' "$scratch/err" | head -5
  fi
  fresh
}
flip() { # flip <file> <offset>: another byte there
  local old
  old=$(od -An -tu1 -j "$2" -N1 "$1" | tr -d ' ')
  printf '%b' "\\x$(printf %x $(((old + 1) % 256)))" | dd of="$1" bs=1 seek="$2" conv=notrunc status=none
}

fresh
"$k3report" verify --results "$copy" >/dev/null || fail "a ledger that holds"
cp "$results/h200-k3-8l-decode-131072.h5" "$copy"
finds "a run without a receipt" "decode-131072.h5: has no receipt"

# Receipts.
size=$(stat -c %s "$base/h200-k3-8l-fast-decode-128.h5")
for at in $((size / 3)) $((size / 2)) $((size - 1)); do
  flip "$copy/h200-k3-8l-fast-decode-128.h5" "$at"
  "$k3report" verify --results "$copy" >/dev/null 2>&1 && fail "a flipped byte at $at of a log"
  fresh
done
# The same content in another layout: it is the file that changed, and not what it says.
h5repack "$copy/h200-k3-8l-fast-decode-128.h5" "$scratch/x" && mv "$scratch/x" "$copy/h200-k3-8l-fast-decode-128.h5" || fail "h5repack"
"$k3report" verify --results "$copy" 2>&1 >/dev/null | grep -q content_sha256 && fail "another layout is called another content"
finds "a log in another layout" "fast-decode-128.h5: file_sha256 is not what was sealed"
n=$(stat -c %s "$base/receipts.jsonl")
for at in 5 $((n / 3)) $((n / 2)) $((n - 3)); do
  flip "$copy/receipts.jsonl" "$at"
  "$k3report" verify --results "$copy" >/dev/null 2>&1 && fail "a flipped byte at $at of the receipts"
  fresh
done
sed -i '2{h;d};3{G}' "$copy/receipts.jsonl"
finds "swapped receipts" "line 2: does not follow"
mv "$copy/h200-k3-8l-fast-decode-128.h5" "$scratch/x" && mv "$copy/h200-k3-8l-decode-128-rings.h5" "$copy/h200-k3-8l-fast-decode-128.h5" &&
  mv "$scratch/x" "$copy/h200-k3-8l-decode-128-rings.h5"
finds "swapped files" "file_sha256 is not what was sealed"
sed -i '$d' "$copy/receipts.jsonl"
finds "a receipt cut off" "some were cut off"
sed -i '1s/"signature":"..../"signature":"0000/' "$copy/receipts.jsonl"
finds "another signature" "line 1: the signature is not of this text"
: >"$copy/receipt-keys.txt"
finds "an unknown key" "its key is not in receipt-keys.txt"
sed -i '1s/"world"/"world" /; 1s/,"n":/, "n":/' "$copy/receipts.jsonl"
finds "a blank more" "line 1: is not written as it was sealed"
rm "$copy/h200-k3-8l-fast-decode-128.h5"
finds "a sealed file removed" "the sealed file is not there"

# Baselines.
sed -i -E "s|^(baseline $d128) [0-9.]+|\1 2.5|" "$copy/baselines.lock"
finds "a baseline typed by hand" "2.5 is typed"
sed -i -E "s|^(baseline $d128) .*|\1 2.5 none.h5 -|" "$copy/baselines.lock"
finds "a value without a run" "no committed run none.h5"
sed -i -E "s|^(baseline $d128) .*|\1 $(grep "^baseline $d131072" "$lock" | cut -d' ' -f3-)|" "$copy/baselines.lock"
finds "a value of another axis" "measured another axis"
sed -i -E "s|^(baseline $d128 [^ ]+ [^ ]+) .*|\1 0123456|" "$copy/baselines.lock"
finds "another commit" "is of commit"
sed -i "s|^baseline $d128|baseline 1xH200/k3-8l/d128-f16/decode_ms/k3-fast|" "$copy/baselines.lock"
finds "a name without a quantization" "5 parts; expected node/model/quant"
sed -i "s|^baseline 1xH200/k3-8l/UD-IQ1_S/d128|baseline 1xH200/k3-8l/best/d128|" "$copy/baselines.lock"
finds "a name with no such quantization" "is no quantization"
older=$(grep "^frontier $d128" "$lock" | cut -d' ' -f3- | head -1)
slow=$(grep -o '"run":"h200-k3-8l-fast-decode-128.h5".*' "$base/receipts.jsonl" | grep -o '"value":[0-9.]*' | cut -d: -f2)
commit=$(grep '"run":"h200-k3-8l-fast-decode-128.h5"' "$base/receipts.jsonl" | grep -o '"commit":"[0-9a-f]*","content' | cut -d'"' -f4)
sed -i -E "s|^(frontier $d128) .*|\1 $slow h200-k3-8l-fast-decode-128.h5 $commit|" "$copy/baselines.lock"
finds "a lowered frontier" "lowered: h200-k3-8l-decode-128-rings.h5 reached ${older%% *}"
sed "s|^frontier $d128 [^ ]*|frontier $d128 1.5|" "$lock" >"$scratch/before.lock"
finds "a frontier under an older lock" "lower than in" --before "$scratch/before.lock"
sed -i -E "s|^(frontier $d128) .*|\1 0 - -|" "$copy/baselines.lock"
finds "0 for what was measured" "0 says not measured"
sed -i "/^frontier $(echo $d128 | sed 's|/|\\/|g')/d" "$copy/baselines.lock"
finds "a slot left out" "lacks frontier"
sed -i -E "s|^peer .*|peer 1xH200/k3-8l/UD-IQ1_S/d128-f16/decode_ms/k3-fast 2.0 published a page of somebody|" "$copy/baselines.lock"
finds "a figure of ours as a peer's" "is not a peer's engine"
sed -i -E "s/^(peer [^ ]+ [^ ]+ ).*/\1measured-elsewhere somebody/" "$copy/baselines.lock"
finds "a peer's figure without a source" "says not where"
units=$(grep '"run":"h200-k3-8l-decode-128-units.h5"' "$base/receipts.jsonl" | grep -o '"value":[0-9.]*' | cut -d: -f2)
sed -i -E "s|^(baseline $d128) .*|\1 $units h200-k3-8l-decode-128-units.h5 6e7749923316-dirty|" "$copy/baselines.lock"
cp "$copy/baselines.lock" "$scratch/units.lock"
finds "a stale pin" "stale: h200-k3-8l-decode-128-rings.h5 at commit 6d115cc2021b"
cp "$scratch/units.lock" "$copy/baselines.lock"
finds "a pin whose guard was not measured" "guard: $d131072 was not measured at commit 6e7749923316-dirty"
# A log that claims 928 tokens and holds 128.
LC_ALL=C sed -i 's/\x00128\x00/\x00928\x00/g' "$copy/h200-k3-8l-fast-decode-131072.h5"
finds "skipped work" "less work than claimed: times: 128 found, 928 claimed"

sed -i "s|^guard .*|guard $d128 $d128|" "$copy/baselines.lock"
sed -i -E "s|^(baseline $d128) .*|\1 $units h200-k3-8l-decode-128-units.h5 6e7749923316-dirty|" "$copy/baselines.lock"
finds "a pin that costs its guarded slot" "guard: $d128 costs 11.1 % at commit 6e7749923316-dirty"

# Verdicts: a faster run that was not checked gains no tier; a slower one neither.
"$k3report" verdict "$base/h200-k3-8l-decode-128-rings.h5" >"$scratch/out"
grep -q '^RESULT_JSON {.*"gate":"not checked".*"significant":true.*"tier":"none"' "$scratch/out" || fail "an unchecked run's verdict"
"$k3report" verdict "$base/h200-k3-8l-fast-decode-128.h5" | grep -q '"gate":"passed".*"tier":"none"' || fail "a first run's verdict"
"$k3report" verdict "$base/h200-k3-8l-decode-128-rings.h5" | grep -q '^RESULT_JSON .*"llama.cpp":0.8[0-9]*}.*"receipt":"[0-9a-f]\{64\}"' || fail "peers and receipt"
flip "$copy/h200-k3-8l-decode-128-rings.h5" $((size / 2))
"$k3report" verdict "$copy/h200-k3-8l-decode-128-rings.h5" 2>&1 | grep -q '"receipt":"broken".*"tier":"none"' || fail "a broken receipt counts"
[ "$failures" -eq 0 ] || { echo "$failures failures"; exit 1; }
echo "all well"
