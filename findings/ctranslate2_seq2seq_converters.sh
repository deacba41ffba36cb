#!/usr/bin/env bash
# CTranslate2's converters of encoder-decoders, on models that transformers 5 makes and saves itself.
#
# 1. BART: the converter reads `config.normalize_before`, which BartConfig of transformers 5 no longer has.
# 2. Marian: the converter removes the last row of the embedding and of the output, whatever token it is; if padding is
#    another token, as MarianConfig allows, the vocabulary is one too long, and the conversion fails.
# 3. Marian with padding last: the decoder starts from a zero embedding instead of that of decoder_start_token_id, so
#    that the converted model computes other log-probabilities.
# 4. T5 with an output head of its own (T5 1.1, mT5): the converter asks `config.tie_word_embeddings` whether logits are
#    divided by the square root of the width; T5Config of transformers 5 says True for every model, so they always are.
#
# Exits with 1 if one of the four behaves differently from what was seen with the versions below. Seen on 2 CPU cores:
#   ctranslate2 4.8.5, transformers 5.24.0
#   BART: AttributeError: 'BartConfig' object has no attribute 'normalize_before'
#   Marian, padding first: ValueError: Source vocabulary 0 has size 12 but the model expected a vocabulary of size 11
#   Marian, padding last: log-probabilities differ by 2.28
#   T5, own head: log-probabilities differ by 5.17, and by 0.00 from those of divided logits
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet ctranslate2==4.8.5 transformers==5.24.0 torch==2.13.0 sentencepiece==0.2.3
cat > "$folder/run.py" <<'PYTHON'
import sys
from pathlib import Path

import ctranslate2
import numpy as np
import tokenizers
import torch
import transformers

PLACE = Path(sys.argv[1])
WORDS = ["<pad>", "</s>", "<unk>", *"abcdefghi"]
SIZES = {"d_model": 8, "vocab_size": len(WORDS), "max_position_embeddings": 16}
for side in ("encoder", "decoder"):
    SIZES |= {f"{side}_layers": 1, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 16}


def convert(name: str, words: list[str], **settings) -> tuple[torch.nn.Module, Path]:
    """Saves a random model with a tokenizer of words, and converts it."""
    ids = {f"{role}_token_id": words.index(token) for role, token in (("pad", "<pad>"), ("eos", "</s>"))}
    ids |= {"decoder_start_token_id": words.index("<pad>"), "bos_token_id": words.index("</s>")}
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**(settings or SIZES), **ids, forced_eos_token_id=None)).eval()
    for parameter in [model.get_input_embeddings().weight, *(model.parameters() if settings else ())]:
        torch.nn.init.normal_(parameter)
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    roles = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    folder = PLACE / f"{name}_{words[-1].strip('<>')}"
    model.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=library, **roles).save_pretrained(folder)
    ctranslate2.converters.TransformersConverter(str(folder)).convert(str(folder / "converted"))
    return model, folder / "converted"


def error_of(name: str, words: list[str]) -> str:
    try:
        convert(name, words)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def logits_of(model: torch.nn.Module, source: list[int], read: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([read])).logits[0]


def largest_difference(log_probs: list[float], logits: torch.Tensor, labels: list[int]) -> float:
    expected = logits.log_softmax(-1).gather(1, torch.tensor(labels)[:, None])[:, 0].numpy()
    return float(np.abs(np.array(log_probs) - expected).max())


print(f"ctranslate2 {ctranslate2.__version__}, transformers {transformers.__version__}")
bart = error_of("BartForConditionalGeneration", WORDS)
print("BART:", bart)
first = error_of("MarianMTModel", WORDS)
print("Marian, padding first:", first)

last = [*WORDS[1:], WORDS[0]]
model, folder = convert("MarianMTModel", last)
source, target = ["a", "b", "c", "</s>"], ["d", "e"]
log_probs = ctranslate2.Translator(str(folder)).score_batch([source], [target])[0].log_probs
labels, inputs = ([last.index(word) for word in words] for words in ((*target, "</s>"), source))
logits = logits_of(model, inputs, [last.index("<pad>"), *labels[:-1]])[:, :-1]  # padding, which the converter removes
difference = largest_difference(log_probs, logits, labels)
print(f"Marian, padding last: log-probabilities differ by {difference:.2f}")

width = 8
sizes = {"d_model": width, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": len(WORDS)}
model, folder = convert("T5ForConditionalGeneration", WORDS, **sizes, tie_word_embeddings=False)
log_probs = ctranslate2.Translator(str(folder)).score_batch([source], [target])[0].log_probs
labels, inputs = ([WORDS.index(word) for word in words] for words in ((*target, "</s>"), source))
logits = logits_of(model, inputs, [WORDS.index("<pad>"), *labels[:-1]])
plain, divided = (largest_difference(log_probs, each, labels) for each in (logits, logits / width**0.5))
print(f"T5, own head: log-probabilities differ by {plain:.2f}, and by {divided:.2f} from those of divided logits")
as_seen = "normalize_before" in bart and "expected a vocabulary of size" in first and difference > 0.1
as_seen = as_seen and plain > 0.1 and divided < 1e-3
raise SystemExit(not as_seen)
PYTHON
TOKENIZERS_PARALLELISM=false "$folder/venv/bin/python" -W ignore "$folder/run.py" "$folder" 2>/dev/null
