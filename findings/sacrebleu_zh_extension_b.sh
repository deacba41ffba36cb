#!/usr/bin/env bash
# sacreBLEU 2.6.0, tokenizer "zh": characters beyond U+FFFF are not split, and many symbols below are.
#
# The tokenizer's table writes the range of CJK Extension B as "\u20000" to "\u2a6d6". In Python these are two-character
# strings (U+2000 "0" and U+2A6D "6"), so that a text in rare characters is one word for BLEU, while dashes, arrows and
# mathematical signs between U+2001 and U+2A6D are split like Chinese characters.
#
# Seen: "𠮷𠮷好好" -> "𠮷𠮷 好 好"; "a—b" -> "a — b"; the tokenizer "char" splits all of them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet sacrebleu==2.6.0
"$folder/env/bin/python" - <<'PYTHON'
import sacrebleu

print("sacrebleu", sacrebleu.__version__)
zh, char = (sacrebleu.BLEU(tokenize=name).tokenizer for name in ("zh", "char"))
expected = {"𠮷𠮷好好": "𠮷𠮷 好 好", "a—b": "a — b"}
for text, words in expected.items():
    print(repr(text), "->", repr(zh(text)), "| char:", repr(char(text)))
    assert zh(text) == words, "the behaviour has changed"
assert char("𠮷𠮷") == "𠮷 𠮷"
PYTHON
