#!/usr/bin/env bash
# The tokenizer that transformers 5.24 reads from a GGUF file of Qwen 2 does not compose characters, unlike Qwen's own.
#
# Qwen's tokenizer has a normalizer, NFC: letters with separate accents have the ids of composed ones. GGUF has no field
# for normalizers, and AutoTokenizer(gguf_file=...) gives none; the same tokens in vocab.json and merges.txt, read as
# Qwen2Tokenizer, have it. So a text with decomposed letters, as macOS writes names of files, has other ids.
#
# Exits with 1 if this differs from what was seen with the versions below. Seen on 2 CPU cores:
#   transformers 5.24.0: folder: NFC(), composed [256], decomposed [256]
#   transformers 5.24.0: GGUF: None, composed [256], decomposed [101, 204, 129]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 torch==2.13.0 gguf==0.19.0
cat > "$folder/run.py" <<'PYTHON'
import json
import sys
from pathlib import Path

import gguf
import tokenizers
import transformers

PLACE = Path(sys.argv[1])
# the characters that stand for bytes, in the order of the bytes
printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
others = iter(range(256, 512))
characters = [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
pair = (characters[0xC3], characters[0xA9])
tokens, merges = [*characters, "".join(pair), "<|endoftext|>"], [" ".join(pair)]
(PLACE / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
(PLACE / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges))
(PLACE / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer", "unk_token": "<|endoftext|>"}')
(PLACE / "config.json").write_text('{"model_type": "qwen2"}')
writer = gguf.GGUFWriter(PLACE / "m.gguf", "qwen2")
writer.add_block_count(1)
writer.add_tokenizer_model("gpt2")
writer.add_tokenizer_pre("qwen2")
writer.add_token_list(tokens)
writer.add_token_types([1] * 257 + [3])
writer.add_token_merges(merges)
writer.add_eos_token_id(257)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
TEXTS = {"composed": "\u00e9", "decomposed": "e\u0301"}
EXPECTED = {"folder": ("NFC()", [256], [256]), "GGUF": ("None", [256], [101, 204, 129])}
seen = {}
for name, options in (("folder", {}), ("GGUF", {"gguf_file": "m.gguf"})):
    tokenizer = transformers.AutoTokenizer.from_pretrained(PLACE, **options)
    normalizer = repr(tokenizer.backend_tokenizer.normalizer)
    ids = {kind: tokenizer(text, add_special_tokens=False)["input_ids"] for kind, text in TEXTS.items()}
    seen[name] = (normalizer, *ids.values())
    figures = ", ".join(f"{kind} {numbers}" for kind, numbers in ids.items())
    print(f"transformers {transformers.__version__}: {name}: {normalizer}, {figures}")
raise SystemExit(seen != EXPECTED)
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/run.py" "$folder" 2>/dev/null
