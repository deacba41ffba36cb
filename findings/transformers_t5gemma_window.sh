#!/usr/bin/env bash
# T5Gemma's encoder in transformers 5.24: a token attends to one more token on each side than in transformers 4.
#
# transformers 4, with which T5Gemma was published, masks tokens that are `sliding_window` or more away, as in the
# decoder. In 5.24, the encoder's mask is `create_bidirectional_sliding_window_mask`, which keeps tokens exactly
# `sliding_window` away (as ModernBERT needs it, whose window is half of `local_attention`). The same checkpoint has
# other logits for sources longer than its window (4096 tokens for the published ones).
#
# Exits with 1 if this differs from what was seen with the versions below. Seen on 2 CPU cores:
#   transformers 4.57.6 and 5.24.0, a window of 4 tokens
#   sources of 4 tokens: logits differ by 0.000
#   sources of 9 tokens: logits differ by 3.902; with the encoder's window one smaller, by 0.000
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 4.57.6 5.24.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install --quiet "transformers==$version" torch==2.13.0
done
cat > "$folder/run.py" <<'PYTHON'
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

PLACE, VERSION, WINDOW = Path(sys.argv[1]), transformers.__version__, 4
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 50, "sliding_window": WINDOW, "query_pre_attn_scalar": 4}


def logits(length: int, window: int) -> np.ndarray:
    model = transformers.T5GemmaForConditionalGeneration.from_pretrained(PLACE / "model", attn_implementation="eager")
    model.model.encoder.config.sliding_window = window
    ids = torch.arange(3, 3 + length)[None]
    with torch.no_grad():
        return model.eval()(input_ids=ids, decoder_input_ids=ids[:, :3]).logits.numpy()


if not (PLACE / "model").exists():
    config = transformers.T5GemmaConfig(encoder=dict(SIZES), decoder=dict(SIZES), vocab_size=50)
    torch.manual_seed(0)
    model = transformers.T5GemmaForConditionalGeneration(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    model.save_pretrained(PLACE / "model")
found = {"short": logits(WINDOW, WINDOW), "long": logits(9, WINDOW), "smaller": logits(9, WINDOW - 1)}
np.savez(PLACE / f"{VERSION}.npz", **found)
if VERSION.startswith("5"):
    before = np.load(PLACE / "4.57.6.npz")
    pairs = (("short", "short"), ("long", "long"), ("long", "smaller"))
    short, longer, smaller = (np.abs(before[theirs] - found[ours]).max() for theirs, ours in pairs)
    print(f"transformers 4.57.6 and {VERSION}, a window of {WINDOW} tokens")
    print(f"sources of {WINDOW} tokens: logits differ by {short:.3f}")
    print(f"sources of 9 tokens: logits differ by {longer:.3f}; with the encoder's window one smaller, by {smaller:.3f}")
    raise SystemExit(not (short < 1e-4 and longer > 0.01 and smaller < 1e-4))
PYTHON
for version in 4.57.6 5.24.0; do
    "$folder/$version/bin/python" -W ignore "$folder/run.py" "$folder" 2>/dev/null
done
