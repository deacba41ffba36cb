"""Published architectures by name, with the paper or report that describes each.

A config file can change any of their settings: `ModelConfig(**presets.settings("gpt2") | {"dropout": 0.0})`. A
dictionary such as `{"rotary": {"base": 500.0}}` replaces all settings of that section.
"""

from collections.abc import Sequence
from typing import Any

from tformer_jax.base.errors import UserError
from tformer_jax.config import ModelConfig
from tformer_jax.config.fields import nearest
from tformer_jax.presets import decoders, encoder_decoders, encoders
from tformer_jax.presets.types import Settings

LAYERS_OF_QWEN3: Settings = {
    "attention_bias": (),
    "qk_norm": True,
    "position": "rotary",
    "ffn": "gated",
    "activation": "silu",
    "ffn_bias": False,
    "norm": "rmsnorm",
}
"""Layers of "Qwen3 Technical Report" (2025), for models of any size: Llama's layers with QK-norm."""

PRESETS: dict[str, Settings] = encoder_decoders.PRESETS | decoders.PRESETS | encoders.PRESETS


def settings(name: str) -> Settings:
    """Returns the settings of a preset that differ from `ModelConfig`'s defaults.

    Raises:
        UserError: `name` is not a preset.
    """
    if name not in PRESETS:
        raise UserError(f"preset {name!r} is not known{nearest(name, PRESETS)}")
    return dict(PRESETS[name])


def for_data(name: str) -> Settings:
    """Returns the settings of a preset, without the sizes that training takes from the data."""
    return settings(name) | {"vocab_size": None, "source_vocab_size": None, "num_classes": None}


def of_variant(location: str, variant: str, families: Sequence[str], others: str = "") -> Settings:
    """Returns the settings of the preset that a variant of a config file names, as `for_data` does.

    Args:
        location: the file, for the error message.
        families: the families of models that the file can train, such as ("decoder_lm",).
        others: the variants of the file that are not presets, for the error message; "" if there are none.

    Raises:
        UserError: `variant` is not a preset of one of the families.
    """
    preset = PRESETS.get(variant)
    if preset is None or preset.get("family", "seq2seq") not in families:
        wanted = f"{others}, or a preset" if others else "a preset"
        hint = nearest(variant, PRESETS) if preset is None else ""
        hint = hint if "did you mean" in hint else ""
        raise UserError(f"variant {variant!r} of {location}: write {wanted} of family {' or '.join(families)}{hint}")
    return for_data(variant)


def build(name: str, **changes: Any) -> ModelConfig:
    """Builds the config of a preset with some settings changed."""
    return ModelConfig(**settings(name) | changes)
