"""The architectures of tutorials, small enough for two CPU cores, on real data.

python scripts/train.py --config configs/tutorials.py:gpt --data DIR

gpt             GPT: learned positions, one projection for query, key and value, GELU      Tiny Shakespeare
basic_attention self-attention without parameters: softmax(x x^T) x                        rt-polarity
classifier      post-norm blocks, learned positions, mean over the tokens                  rt-polarity
imdb            the same                                                                   IMDb reviews (TFDS)
rmsnorm         post-norm RMSNorm, two encoder and three decoder layers, no biases         Tatoeba, English to Chinese
transformer     the 2017 Transformer: post-norm, sinusoids, one embedding                  Multi30k, English to German
pre_norm        pre-norm encoder-decoder, one embedding for source and target              Multi30k, English to German

README.md shows the results, which take 20 seconds to 17 minutes, the longest on one CPU core. That of `imdb` is not
recorded; its data is downloaded by `python scripts/prepare_data.py --config configs/tutorials.py:imdb --download`.
"""

import dataclasses
from typing import Any

from bases import MULTI30K, MUON, RT_POLARITY, TATOEBA, TINY_SHAKESPEARE
from ml_collections import ConfigDict

from tformer_jax import presets
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig, to_config_dict

IMDB = DataConfig(
    source="tfds",
    dataset="imdb_reviews",
    train="train[:90%]",
    validation="train[90%:]",
    test="test",
    vocab_size=8000,
    bucket_lengths=(128, 256, 512),
    batch_tokens=8192,
)
TRANSLATOR = {"dim": 256, "num_heads": 4, "head_dim": None, "ffn_dim": 1024, "max_length": 64}
ENCODER = {"encoder_layers": 2, "num_heads": 4, "ffn_dim": 256, "max_length": 96, "dropout": 0.5}
ADAMW = OptimConfig(schedule="cosine", learning_rate=1e-3, warmup_steps=200, final_fraction=0.02)
TRANSLATION_MUON = dataclasses.replace(MUON, final_fraction=0.02)
"""Reaches the loss of AdamW in a third of the steps here."""
THREE_LAYERS = TRANSLATOR | {"encoder_layers": 3, "decoder_layers": 3}

VARIANTS: dict[str, tuple[str, dict[str, Any], DataConfig, int]] = {
    # preset, changes of it, data, steps
    "gpt": ("gpt_tutorial", {"dim": 128, "decoder_layers": 4, "num_heads": 4, "ffn_dim": 512}, TINY_SHAKESPEARE, 2000),
    "basic_attention": ("sequence_classifier", ENCODER | {"attention": "basic", "num_heads": 1}, RT_POLARITY, 600),
    "classifier": ("sequence_classifier", ENCODER, RT_POLARITY, 600),
    "imdb": ("sequence_classifier", ENCODER | {"max_length": 512}, IMDB, 3000),
    "rmsnorm": ("rmsnorm_post_translator", TRANSLATOR | {"dropout": 0.3}, TATOEBA, 900),
    "transformer": ("vaswani2017_base", THREE_LAYERS | {"dropout": 0.2}, MULTI30K, 900),
    "pre_norm": ("pre_norm_translator", THREE_LAYERS, MULTI30K, 900),
}


def get_config(variant: str = "gpt") -> ConfigDict:
    """Returns the config of the architecture `variant`."""
    if variant not in VARIANTS:
        raise UserError(f"variant {variant!r} of configs/tutorials.py: write one of {', '.join(VARIANTS)}")
    preset, changes, data, steps = VARIANTS[variant]
    model = presets.for_data(preset) | changes
    translates = model.get("family", "seq2seq") == "seq2seq"
    if model.get("attention") == "basic":
        del model["attention_bias"]
    return to_config_dict(
        Config(
            name=f"tutorials_{variant}",
            model=ModelConfig(**model),
            data=data,
            optim=TRANSLATION_MUON if translates else ADAMW,
            train=TrainConfig(
                steps=steps,
                label_smoothing=0.1 if translates else 0.0,
                eval_every=10_000,
                checkpoint_every=500,
            ),
        )
    )
