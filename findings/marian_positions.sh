#!/usr/bin/env bash
# CTranslate2 and transformers compute other positions for models of Marian-NMT than Marian-NMT.
#
# Marian-NMT divides the exponents of its wavelengths by D / 2 - 1 (`SinusoidalPositionEmbeddings` in
# src/tensors/cpu/tensor_operators.cpp), as tensor2tensor does. ct2-marian-converter writes a table, and MarianMTModel
# computes the same table, in which they are divided by D / 2. In narrow models, log-probabilities of tokens change
# visibly (D = 16 here); at D = 512 the angles of position 50 differ by at most 0.07.
#
# Exits with 1 if this differs from what was seen with the versions below. Seen on 2 CPU cores:
#   pymarian 1.12.42, ctranslate2 4.8.5, transformers 5.24.0
#   log-probabilities: Marian-NMT -0.7495 -0.7896 -0.7938 -0.7977
#   log-probabilities: CTranslate2 differs by 0.0920, with Marian-NMT's table by 0.0000
#   table of transformers: differs from CTranslate2's by 0.0000, from Marian-NMT's by 1.9744
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet pymarian==1.12.42 ctranslate2==4.8.5 transformers==5.24.0 torch==2.13.0 \
  pyyaml==6.0.4
cat > "$folder/run.py" <<'PYTHON'
import importlib.metadata
import sys
from pathlib import Path

import ctranslate2
import numpy as np
import yaml
from ctranslate2.converters import marian
from pymarian import Translator
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

PLACE, D, V, LAYERS, F = Path(sys.argv[1]), 16, 24, 2, 24
SETTINGS = {"type": "transformer", "dim-vocabs": [V, V], "dim-emb": D, "enc-depth": LAYERS, "dec-depth": LAYERS}
SETTINGS |= {"transformer-dim-ffn": F, "transformer-heads": 4, "transformer-ffn-activation": "swish"}
SETTINGS |= {"transformer-preprocess": "", "transformer-postprocess": "dan", "transformer-postprocess-emb": "d"}
SETTINGS |= {"tied-embeddings-all": True, "transformer-tied-layers": [], "version": "v1.12.42"}
SETTINGS |= {"transformer-decoder-autoreg": "self-attention", "transformer-no-projection": False}
SETTINGS |= {"transformer-guided-alignment-layer": "last"}
random = np.random.default_rng(0)


def draw(*shape: int, mean: float = 0.0) -> np.ndarray:
    return random.normal(mean, 0.4, shape).astype(np.float32)


arrays = {"Wemb": draw(V, D), "decoder_ff_logit_out_b": draw(1, V)}
for side, attentions in (("encoder", ("self",)), ("decoder", ("self", "context"))):
    for layer in range(1, LAYERS + 1):
        stem = f"{side}_l{layer}_"
        for name in attentions:
            arrays |= {f"{stem}{name}_W{role}": draw(D, D) for role in "qkvo"}
            arrays |= {f"{stem}{name}_b{role}": draw(1, D) for role in "qkvo"}
        arrays |= {f"{stem}ffn_W1": draw(D, F), f"{stem}ffn_b1": draw(1, F)}
        arrays |= {f"{stem}ffn_W2": draw(F, D), f"{stem}ffn_b2": draw(1, D)}
        for name in (*(f"{name}_Wo" for name in attentions), "ffn_ffn"):
            arrays |= {f"{stem}{name}_ln_scale": draw(1, D, mean=1.0), f"{stem}{name}_ln_bias": draw(1, D)}
arrays["special:model.yml"] = np.frombuffer(yaml.dump(SETTINGS).encode() + b"\0", np.int8)
model, vocab = str(PLACE / "model.npz"), str(PLACE / "vocab.yml")
np.savez(model, **arrays)
words = ["</s>", "<unk>", *(f"w{i}" for i in range(V - 2))]
Path(vocab).write_text(yaml.dump({word: i for i, word in enumerate(words)}))
source = [f"w{i * i % 22}" for i in range(40)]
translator = Translator(
    models=model, vocabs=[vocab, vocab], beam_size=2, n_best=True, word_scores=True, cpu_threads=1, quiet=True
)
best = translator.translate(" ".join(source))
best = (best if isinstance(best, str) else best[0]).split("\n")[0].split("|||")
target, expected = best[1].split(), np.array(best[2].split("=")[1].split()[: len(best[1].split())], float)
versions = (f"{name} {importlib.metadata.version(name)}" for name in ("pymarian", "ctranslate2", "transformers"))
print(", ".join(versions))
print("log-probabilities: Marian-NMT", *(f"{number:.4f}" for number in expected[:4]))


def difference(folder: str) -> float:
    """Converts the model and returns the largest difference of the log-probabilities from Marian-NMT's."""
    marian.MarianConverter(model, [vocab, vocab]).convert(str(PLACE / folder))
    log_probs = ctranslate2.Translator(str(PLACE / folder)).score_batch([source], [target])[0].log_probs
    return float(np.abs(np.array(log_probs[: len(expected)]) - expected).max())


def marians_table(dim: int, num_positions: int = 2048) -> np.ndarray:
    half = dim // 2
    angles = np.arange(num_positions)[:, None] / 10_000 ** (np.arange(half) / (half - 1))
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


theirs = MarianSinusoidalPositionalEmbedding(64, D)
theirs = theirs.create_weight().numpy()
others = (marian._make_sinusoidal_position_encodings(D, 64), marians_table(D, 64))
tables = [np.abs(theirs - other).max() for other in others]
as_converted = difference("converted")
marian._make_sinusoidal_position_encodings = marians_table
corrected = difference("corrected")
print(f"log-probabilities: CTranslate2 differs by {as_converted:.4f}, with Marian-NMT's table by {corrected:.4f}")
print(f"table of transformers: differs from CTranslate2's by {tables[0]:.4f}, from Marian-NMT's by {tables[1]:.4f}")
raise SystemExit(not (as_converted > 0.01 and corrected < 1e-3 and tables[0] < 1e-6 and tables[1] > 0.1))
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/run.py" "$folder" 2>/dev/null
