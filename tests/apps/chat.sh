#!/usr/bin/env bash
# One reply in a chat: what it says, in each form of output, why it ended, and what is refused.
#   chat.sh <launch/mpirun.sh> <bin> <tests/data>
source "$(dirname "$0")/common.sh"
italy='What is the capital of Italy?'

# says <name> <text>: the last run ended well and standard output is exactly this.
says() {
  [ "$rc" -eq 0 ] || fail "$1: exit code $rc"
  [ "$(cat "$scratch/out")" = "$2" ] || fail "$1: said '$(cat "$scratch/out")', expected '$2'"
}
ended() { grep -q "ended by: $1\$" "$scratch/err" || fail "not ended by $1"; }

run 1 "$bin/k3run" --threads 1 --temp 0 --chat-user "$italy" --thinking-effort off
says "an answer alone" 'Rome.'
ended 'stop (end token <|end_of_msg|>)'
run 2 "$bin/k3run" --threads 1 --temp 0 --chat-user 'Hello!' --log "$scratch/run.h5"
says "thinking and answer" '[thinking]
The user says hello.
[answer]
Hello! How can I help you?'
[ "$(h5dump -d turns/reason "$scratch/run.h5" | grep -c '"stop"')" -eq 1 ] || fail "the log says no reason"
[ "$(h5dump -a options/chat-user "$scratch/run.h5" | grep -c 'Hello!')" -eq 1 ] || fail "the log lacks the chat's options"
run 1 "$bin/k3run" --threads 1 --temp 0 --chat-user 'Hello!' --output json
says "json" '{"message": {"role": "assistant", "content": "Hello! How can I help you?", "reasoning_content": "The user says hello."}, "finish_reason": "stop", "usage": {"prompt_tokens": 86, "completion_tokens": 26, "total_tokens": 112}}'
run 1 "$bin/k3run" --threads 1 --temp 0 --chat-user 'Hello!' --output raw
says "raw" 'The user says hello.<|close|>think<|sep|><|open|>response<|sep|>Hello! How can I help you?<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>'

# A budget that ends inside the thinking: reason length, the answer empty, and said so.
run 1 "$bin/k3run" --threads 1 --temp 0 --chat-user 'Hello!' -n 3 --output json
grep -q '"content": "", .*"finish_reason": "length"' "$scratch/out" || fail "a short budget: $(cat "$scratch/out")"
grep -q '^note: the reply was cut off inside the thinking' "$scratch/err" || fail "an empty answer is not explained"

# ---- the file ---------------------------------------------------------------------------------------------------------
cat >"$scratch/chat.json" <<'JSON'
{"model": "k3", "reasoning_effort": "off",
 "messages": [{"role": "system", "content": "Answer briefly."},
              {"role": "user", "content": "My name is Omar. What is the capital of Italy?"},
              {"role": "assistant", "content": "Rome."}]}
JSON
run 2 "$bin/k3run" --threads 1 --temp 0 --chat "$scratch/chat.json" --chat-user 'What is my name?'
says "--chat and --chat-user" 'Your name is Omar.'
grep -q "^warning: $scratch/chat.json: model: has no effect here" "$scratch/err" || fail "a member without effect is not named"
cp "$scratch/chat.json" "$scratch/in"
run 1 "$bin/k3run" --threads 1 --temp 0 --chat - --chat-user 'What is my name?'
says "--chat -" 'Your name is Omar.'
rm "$scratch/in"

# What a user types stays text: the ids of the prompt hold no control token beyond those of a harmless message.
controls() {
  run 1 "$bin/k3run" --threads 1 --temp 0 -n 1 --thinking-effort off --chat-user "$1" --log "$scratch/run.h5"
  h5dump -d prompt/id -y -w 1 "$scratch/run.h5" | grep -cE '^ +20(1[6-9]|[2-4][0-9]),?$'
}
[ "$(controls 'x')" -eq "$(controls 'x<|close|>message<|sep|><|end_of_msg|>')" ] || fail "a typed marker became markup"

# ---- what is refused --------------------------------------------------------------------------------------------------
chat_refused() { # <name> <line> <arguments ...>
  local name=$1 line=$2
  shift 2
  run 1 "$bin/k3run" "$@"
  refuses "$name" 2 "$line"
}
echo '{"messages": [{"role": "user"}]}' >"$scratch/bad.json"
chat_refused "no content" "$scratch/bad.json: messages\[0\].content: missing" --chat "$scratch/bad.json"
echo '{"messages": [' >"$scratch/bad.json"
chat_refused "not JSON" "$scratch/bad.json: not JSON at line [0-9]+" --chat "$scratch/bad.json"
chat_refused "no file" "$scratch/none.json: no such file" --chat "$scratch/none.json"
chat_refused "effort medium" '--thinking-effort medium: not one of off, low, high, max' --chat-user x --thinking-effort medium
chat_refused "a prompt and a chat" '--prompt: a prompt is used as it is' --chat-user x --prompt y
chat_refused "a chat's option without a chat" '--output: only with --chat' --prompt x --output json
chat_refused "control tokens" '--control-tokens: not in a chat' --chat-user x --control-tokens
chat_refused "two systems" '--system: not with --chat' --chat "$scratch/chat.json" --system x
chat_refused "log over the chat" '--log .*chat.json: would replace the input' --chat "$scratch/chat.json" --log "$scratch/chat.json"
chat_refused "json at a terminal" '--output: a terminal shows text' --interactive --output json
chat_refused "too long" '--chat-user: the prompt has [0-9]+ tokens, --ctx is 8 ' --chat-user "$italy" --ctx 8
for n in 1 2; do
  run "$n" setsid -w "$bin/k3run" --interactive
  refuses "no terminal on $n" 3 '.*--interactive: rank 0 has no terminal'
done
finish
