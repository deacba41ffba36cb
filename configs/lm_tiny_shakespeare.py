"""Character-level language model of Tiny Shakespeare.

python scripts/train.py --config configs/lm_tiny_shakespeare.py:cpu --data DIR
python scripts/train.py --config configs/lm_tiny_shakespeare.py:modern --data DIR    (same budget, a later architecture)
python scripts/train.py --config configs/lm_tiny_shakespeare.py:gpu --config.model.dtype=bfloat16 --data DIR

Expect a validation loss of 1.79 from `cpu` and 1.58 from `modern` after a few minutes on two CPU cores, and 1.45 from
`gpu` after half a minute on an H200; three unrecorded runs of `modern_gpu` had 1.46. The larger sizes overfit:
with nanoGPT's 5,000 steps and dropout of 0.2, the loss of `gpu` is 1.47 after 1,500 steps and 1.73 at the end; with a
dropout of 0.4, that of `modern_gpu` is 1.47 after 1,500 steps with a weight decay of 0.1 and 1.46 with 0.5. The text
has one held-out part, on which these settings were chosen.
"""

import dataclasses
from typing import NamedTuple

from bases import TINY_SHAKESPEARE
from ml_collections import ConfigDict

from tformer_jax import presets
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, EvalConfig, ModelConfig, OptimConfig, TrainConfig, to_config_dict


class Size(NamedTuple):
    """Sizes and regularization of a variant."""

    layers: int
    heads: int
    dim: int
    context: int
    batch_size: int
    dropout: float
    weight_decay: float


SIZES = {
    "cpu": Size(4, 4, 128, 64, 12, 0.0, 0.1),  # as in nanoGPT's example for CPUs
    "gpu": Size(6, 6, 384, 256, 64, 0.3, 0.1),
    "modern": Size(4, 4, 128, 64, 12, 0.0, 0.1),
    "modern_gpu": Size(6, 6, 384, 256, 64, 0.4, 0.5),
}
STEPS = 2_000
GPT2 = {
    "position": "learned",
    "activation": "gelu",
    "attention_bias": (),
    "ffn_bias": False,
    "norm_bias": False,
    "initializer": "normal",
}
MODERN = presets.LAYERS_OF_QWEN3 | {"initializer": "fan_in"}
"""A gated FFN of two thirds of the width has no more parameters."""


def get_config(variant: str = "cpu") -> ConfigDict:
    """Returns the config of a GPT-2-style decoder of size `variant`, or of a modern one with Muon."""
    if variant not in SIZES:
        raise UserError(f"variant {variant!r} of configs/lm_tiny_shakespeare.py: write one of {', '.join(SIZES)}")
    layers, heads, dim, context, batch_size, dropout, weight_decay = SIZES[variant]
    modern = variant.startswith("modern")
    return to_config_dict(
        Config(
            name=f"lm_tiny_shakespeare_{variant}",
            model=ModelConfig(
                family="decoder_lm",
                decoder_layers=layers,
                num_heads=heads,
                dim=dim,
                ffn_dim=8 * dim // 3 if modern else 4 * dim,
                max_length=context,
                scale_embeddings=False,
                dropout=dropout,
                attention_dropout=0.0 if modern else dropout,
                **(MODERN if modern else GPT2),
            ),
            data=dataclasses.replace(TINY_SHAKESPEARE, batch_size=batch_size, window=context),
            optim=OptimConfig(
                optimizer="muon" if modern else "adamw",
                schedule="cosine",
                learning_rate=1e-2 if modern else 2e-3,
                final_fraction=0.0 if modern else 0.1,
                warmup_steps=100,
                beta2=0.99,
                eps=1e-8,
                weight_decay=weight_decay,
            ),
            train=TrainConfig(steps=STEPS, eval_every=500, checkpoint_every=500),
            eval=EvalConfig(batch_size=128),
        )
    )
