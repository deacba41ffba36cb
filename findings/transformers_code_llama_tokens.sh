#!/usr/bin/env bash
# CodeLlama's tokenizer in transformers 5.24: a text after a special token begins with other tokens than in 4.57.
#
# The published tokenizer.json has a normalizer that puts "▁" before each part of a text between special tokens.
# transformers 4 reads the file as it is. 5.24 builds CodeLlamaTokenizer from the vocabulary and the merges alone, with
# "▁" before the first word of a whole text only. Texts without special tokens are the same; in a prompt of several
# turns, each turn after the first begins with another token.
#
# Exits with 1 if this differs from what was seen with the versions below. Seen on 2 CPU cores:
#   transformers 4.57.6: ['<s>', '▁a', 'b', '</s>', '<s>', '▁a', 'b']
#   transformers 5.24.0: ['<s>', '▁a', 'b', '</s>', '<s>', 'a', 'b']
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 4.57.6 5.24.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install --quiet "transformers==$version" jinja2==3.1.6
done
cat > "$folder/run.py" <<'PYTHON'
import json
import sys
from pathlib import Path

import tokenizers
import transformers

PLACE, VERSION = Path(sys.argv[1]), transformers.__version__
PROMPT = "ab</s><s>ab"
pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a"]
pieces += ["▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>"]
vocab = {piece: number for number, piece in enumerate(pieces)}
options = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("▁", "a")], **options))
parts, decoders = tokenizers.normalizers, tokenizers.decoders
library.normalizer = parts.Sequence([parts.Prepend("▁"), parts.Replace(" ", "▁")])
library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
library.add_special_tokens(["<unk>", "<s>", "</s>", *pieces[-4:]])
around = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
library.post_processor = around
library.save(str(PLACE / "tokenizer.json"))
names = {"tokenizer_class": "CodeLlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
(PLACE / "tokenizer_config.json").write_text(json.dumps(names))
(PLACE / "config.json").write_text('{"model_type": "llama"}')
tokenizer = transformers.AutoTokenizer.from_pretrained(PLACE)
found = tokenizer.convert_ids_to_tokens(tokenizer(PROMPT)["input_ids"])
print(f"transformers {VERSION}: {found}")
first = "▁a" if VERSION.startswith("4") else "a"
raise SystemExit(found != ["<s>", "▁a", "b", "</s>", "<s>", first, "b"])
PYTHON
for version in 4.57.6 5.24.0; do
    "$folder/$version/bin/python" -W ignore "$folder/run.py" "$folder" 2>/dev/null
done
