#!/usr/bin/env bash
# A chat template of transformers 5.24 cannot ask whether a message's content is none.
#
# OpenAI's API gives an assistant's message that only calls tools the content null. transformers 4 passes it on as None:
# a template that writes the content writes the word "None", and one that asks `content is none`, as published templates
# for calls of tools do, takes the branch of calls. 5.24 removes keys whose value is None first: the first template
# writes nothing, and the second takes the branch of ordinary texts, so that the call is missing in the prompt.
#
# Exits with 1 if this differs from what was seen with the versions below. Seen on 2 CPU cores:
#   transformers 4.57.6: content 'None', question 'call now'
#   transformers 5.24.0: content '', question 'text '
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/run.py" <<'PYTHON'
import tokenizers
import transformers

CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "now", "arguments": {}}}]}
CONTENT = "{{ messages[0]['content'] }}"
QUESTION = (
    "{% set message = messages[0] %}{% if message['content'] is none %}call {{ message['tool_calls'][0]['function']"
    "['name'] }}{% else %}text {{ message['content'] }}{% endif %}"
)
SEEN = {"4.57.6": ["None", "call now"], "5.24.0": ["", "text "]}

tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()))
written = [
    tokenizer.apply_chat_template([CALL], chat_template=template, tokenize=False) for template in (CONTENT, QUESTION)
]
print(f"transformers {transformers.__version__}: content {written[0]!r}, question {written[1]!r}")
raise SystemExit(written != SEEN[transformers.__version__])
PYTHON
for version in 4.57.6 5.24.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install --quiet "transformers==$version" jinja2==3.1.6
    "$folder/$version/bin/python" -W ignore "$folder/run.py" 2>/dev/null
done
