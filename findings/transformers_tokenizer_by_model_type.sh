#!/usr/bin/env bash
# AutoTokenizer in transformers 5.24: the ids of a text depend on `model_type` in config.json.
#
# A folder has a tokenizer.json of byte-level BPE that splits numbers into digits, as Granite's and OLMo 2's do, and a
# tokenizer_config.json that names GPT2Tokenizer, as theirs do, too. transformers 4 reads the file as it is. 5.24 builds
# GPT2Tokenizer anew from the vocabulary and the merges, with GPT-2's rules for words; only model types in a table of
# its own, such as `granite`, are exempt. The same files have other ids beside a config.json of another type, without
# a warning.
#
# Exits with 1 if this differs from what was seen with the versions below. Seen on 2 CPU cores:
#   transformers 4.57.6: granite ['2', '0', '2', '3'], gpt2 ['2', '0', '2', '3'], llama ['2', '0', '2', '3']
#   transformers 5.24.0: granite ['2', '0', '2', '3'], gpt2 ['20', '23'], llama ['20', '23']
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/run.py" <<'PYTHON'
import json
import sys
from pathlib import Path

import tokenizers
import transformers
from tokenizers import models, pre_tokenizers

PLACE = Path(sys.argv[1])
characters = sorted(pre_tokenizers.ByteLevel.alphabet())
vocabulary = {token: number for number, token in enumerate(["<|endoftext|>", *characters, "20", "23"])}
library = tokenizers.Tokenizer(models.BPE(vocabulary, [("2", "0"), ("2", "3")]))
library.pre_tokenizer = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
)
tokens = {}
for kind in ("granite", "gpt2", "llama"):
    checkpoint = PLACE / transformers.__version__ / kind
    checkpoint.mkdir(parents=True)
    library.save(str(checkpoint / "tokenizer.json"))
    (checkpoint / "config.json").write_text(json.dumps({"model_type": kind}))
    named = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(named))
    tokens[kind] = transformers.AutoTokenizer.from_pretrained(checkpoint).tokenize("2023")
print(f"transformers {transformers.__version__}: " + ", ".join(f"{kind} {split}" for kind, split in tokens.items()))
digits, merged = list("2023"), ["20", "23"]
rebuilt = digits if transformers.__version__.startswith("4") else merged
raise SystemExit(tokens != {"granite": digits, "gpt2": rebuilt, "llama": rebuilt})
PYTHON
for version in 4.57.6 5.24.0; do
    python3 -m venv "$folder/venv-$version"
    "$folder/venv-$version/bin/pip" install --quiet "transformers==$version"
    "$folder/venv-$version/bin/python" -W ignore "$folder/run.py" "$folder" 2> /dev/null
done
