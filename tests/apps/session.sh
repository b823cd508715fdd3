#!/usr/bin/env bash
# A long prompt read once and gone on from: k3run --save-session, --session, and k3batch --session.
#   session.sh <launch/mpirun.sh> <bin> <tests/data>
source "$(dirname "$0")/common.sh"
session=$scratch/s
long='The capital of Spain is Madrid. The capital of Peru is Lima. The capital of Italy is Rome.'
question=' The capital of France is'
greedy=(--threads 1 --temp 0)

run 1 "$bin/k3run" "${greedy[@]}" --prompt "$long$question" -n 8
cp "$scratch/out" "$scratch/expected"
run 2 "$bin/k3run" "${greedy[@]}" --prompt "$long" -n 0 --save-session "$session"
[ "$rc" -eq 0 ] || fail "storing over two ranks: exit code $rc"
[ -s "$scratch/out" ] && fail "storing a prompt writes text"
n_read=$(sed -n 's/.*: \([0-9]*\) positions stored$/\1/p' "$scratch/err")
[ "${n_read:-0}" -gt 20 ] || fail "storing: '$n_read' positions"
for n in 1 2; do
  run $n "$bin/k3run" "${greedy[@]}" --session "$session" --prompt "$question" -n 8
  [ "$rc" -eq 0 ] || fail "going on over $n ranks: exit code $rc"
  cmp -s "$scratch/expected" "$scratch/out" || fail "going on over $n ranks: other text"
done

# With text of its own, which counts as read: what it says and what follows are one text.
run 1 "$bin/k3run" "${greedy[@]}" --prompt "$long$question" -n 4 --save-session "$session.text"
head -c -1 "$scratch/out" >"$scratch/first"
[ "$(ls "$session.text".* | wc -l)" -eq 1 ] || fail "not one part a rank"
run 1 "$bin/k3run" "${greedy[@]}" --session "$session.text" --prompt ' The capital of Peru is' -n 2
[ "$rc" -eq 0 ] || fail "going on after text: exit code $rc"
grep -q 'Lima' "$scratch/out" || fail "going on after text: $(cat "$scratch/out")"

# ---- refused before anything is loaded ----------------------------------------------------------------------------------
run 2 "$bin/k3run" --model "$data/models/k3-legacy.gguf" --session "$session" --prompt a
refuses "another model" 2 "--session .*: of a model with fingerprint [0-9a-f]+, this one has [0-9a-f]+"
run 2 "$bin/k3run" --session "$session" --prompt a --ctx "$n_read"
refuses "no room" 2 "--session .*: holds $n_read positions, --ctx $n_read has no room for one more"
run 1 "$bin/k3run" --session "$scratch/none" --prompt a
refuses "no session" 2 ".*none: no such file"
run 1 "$bin/k3run" --session "$session" --chat-user a
refuses "a chat that does not begin so" 2 "--chat-user: the conversation does not go on where --session .* ends"
rm "$session.text".*
run 2 "$bin/k3run" --session "$session.text" --prompt a
refuses "a part is gone" 2 ".*/s.text.*: no such file"

# ---- many questions -----------------------------------------------------------------------------------------------------
answers() { sed 's/, "timings": {[^}]*}//; s/"line_hash": "[^"]*"//' "$1" | sort; }
for country in France Senegal Japan Egypt; do
  echo "{\"id\": \"$country\", \"prompt\": \" The capital of $country is\", \"max_tokens\": 5, \"logprobs\": true}" >>"$scratch/q.jsonl"
  echo "{\"id\": \"$country\", \"prompt\": \"$long The capital of $country is\", \"max_tokens\": 5, \"logprobs\": true}" >>"$scratch/whole.jsonl"
done
run 1 "$bin/k3run" "${greedy[@]}" --prompt "$long" -n 0 --save-session "$session"  # the same layout: the same bits
run 1 "$bin/k3batch" "${greedy[@]}" --input "$scratch/whole.jsonl" --prefixes 0
answers "$scratch/out" >"$scratch/expected"
run 1 "$bin/k3batch" "${greedy[@]}" --input "$scratch/q.jsonl" --session "$session" --prefixes 0
[ "$rc" -eq 0 ] || fail "k3batch: exit code $rc"
answers "$scratch/out" >"$scratch/got"
cmp -s "$scratch/expected" "$scratch/got" || fail "k3batch: other answers: $(diff "$scratch/expected" "$scratch/got" | head -2)"
[ "$(grep -c "\"reused_tokens\": $n_read[,}]" "$scratch/out")" -eq 4 ] || fail "k3batch: the session was read again"

# A chat that goes on: the conversation so far was read by the first run.
run 1 "$bin/k3run" "${greedy[@]}" --chat-user 'What is the capital of Italy?' --thinking-effort off --output json --save-session "$session.chat"
reply=$(sed -n 's/.*"content": "\([^"]*\)".*/\1/p' "$scratch/out")
cat >"$scratch/chat.json" <<END
{"messages": [{"role": "user", "content": "What is the capital of Italy?"}, {"role": "assistant", "content": "$reply"},
 {"role": "user", "content": "What is the capital of Peru?"}]}
END
run 1 "$bin/k3run" "${greedy[@]}" --chat "$scratch/chat.json" --thinking-effort off
cp "$scratch/out" "$scratch/expected"
whole=$(sed -n 's/^prompt \([0-9]*\) tokens.*/\1/p' "$scratch/err")
run 1 "$bin/k3run" "${greedy[@]}" --chat "$scratch/chat.json" --thinking-effort off --session "$session.chat"
[ "$rc" -eq 0 ] || fail "a chat that goes on: exit code $rc"
cmp -s "$scratch/expected" "$scratch/out" || fail "a chat that goes on: other text"
rest=$(sed -n 's/^prompt \([0-9]*\) tokens.*/\1/p' "$scratch/err")
[ "${rest:-999}" -lt "$whole" ] || fail "a chat that goes on: read $rest of $whole tokens"

finish
