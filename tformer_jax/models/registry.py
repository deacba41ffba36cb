"""Model families by name, and how each reads a batch."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from tformer_jax.config import ModelConfig
from tformer_jax.models.classifier import Classifier
from tformer_jax.models.decoder_lm import DecoderLM
from tformer_jax.models.seq2seq import Seq2Seq
from tformer_jax.nn import attention_ops, relative
from tformer_jax.nn.attention_ops.select import choose
from tformer_jax.special_tokens import PAD

Batch = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Family:
    """A kind of model, its arguments taken from a batch, and the batch's key that holds the labels."""

    module: type[nn.Module]
    arguments: Callable[[Batch], dict[str, Any]]
    inputs: tuple[str, ...]
    labels: str


def _seq2seq_arguments(batch: Batch) -> dict[str, Any]:
    source, target = batch["source"], batch["target_in"]
    return {
        "source": source,
        "target": target,
        "source_mask": source != PAD,
        "target_mask": target != PAD,
        "right_padded": True,
        "source_segments": batch.get("source_segments"),
        "target_segments": batch.get("target_segments"),
    }


def _decoder_lm_arguments(batch: Batch) -> dict[str, Any]:
    return _classifier_arguments(batch) | {"prefix": batch.get("prefix"), "segments": batch.get("segments")}


def _classifier_arguments(batch: Batch) -> dict[str, Any]:
    return {"tokens": batch["tokens"], "mask": batch["tokens"] != PAD, "right_padded": True}


FAMILIES = {
    "seq2seq": Family(Seq2Seq, _seq2seq_arguments, ("source", "target_in"), "target_out"),
    "decoder_lm": Family(DecoderLM, _decoder_lm_arguments, ("tokens",), "targets"),
    "classifier": Family(Classifier, _classifier_arguments, ("tokens",), "label"),
}


def build(cfg: ModelConfig, *, train: bool = False) -> nn.Module:
    """The Linen module that `cfg.family` names; vocabulary sizes and the number of classes must be filled in.

    Raises:
        ConfigError: this machine lacks `cfg.attention_backend`, or that cannot do what the model needs, for training
            where `train`.
    """
    for needs in attention_needs(cfg, train=train).values():
        attention_ops.usable(cfg.attention_backend, needs)
    return FAMILIES[cfg.family].module(cfg)


def attention_needs(cfg: ModelConfig, *, train: bool) -> dict[str, attention_ops.Needs]:
    """What the attentions of a model ask of their backend: "encoder", "decoder" and "cross", as it has them.

    `train` adds dropout. Packed segments are not counted in; they come with the batch.
    """
    windows = {"window"} if "window" in cfg.layer_pattern else set()
    prefix = {"prefix"} if cfg.prefix_lm else set()
    rules = {
        "encoder": {"real"} | windows,
        "decoder": {"real", "causal"} | windows | prefix,
        "cross": {"real", "cross"},
    }
    attentions = {"seq2seq": ("encoder", "decoder", "cross"), "decoder_lm": ("decoder",), "classifier": ("encoder",)}
    return {
        name: attention_ops.Needs(
            dtype=cfg.dtype,
            head_size=cfg.dim if cfg.attention == "basic" else cfg.head_size,
            softcap=cfg.attention_softcap is not None,
            bias=name != "cross" and relative.adds_bias(cfg),
            dropout=train and cfg.attention_dropout > 0,
            rules=frozenset(rules[name]),
        )
        for name in attentions[cfg.family]
    }


def attention_backends(cfg: ModelConfig, length: int) -> dict[str, str]:
    """The backend of each attention of a model in training on rows of `length` tokens, with "auto" resolved."""
    if cfg.attention_backend != "auto":
        return dict.fromkeys(attention_needs(cfg, train=True), cfg.attention_backend)
    return {name: choose(needs, length, length) for name, needs in attention_needs(cfg, train=True).items()}


def example_batch(cfg: ModelConfig, batch_size: int = 1, length: int = 2) -> dict[str, np.ndarray]:
    """A batch of the right keys and ranks, full of token 1, to initialise a model with."""
    family = FAMILIES[cfg.family]
    tokens = np.ones((batch_size, min(length, cfg.max_length)), np.int32)
    labels = np.zeros(batch_size, np.int32) if cfg.family == "classifier" else tokens
    return dict.fromkeys(family.inputs, tokens) | {family.labels: labels}


def init(model: nn.Module, key: jax.Array) -> Any:
    """Fresh parameters, boxed with their logical axis names (`flax.linen.unbox` gives the plain arrays)."""
    arguments = FAMILIES[model.cfg.family].arguments(example_batch(model.cfg))
    return model.init(key, **arguments)["params"]


@functools.lru_cache(maxsize=32)
def shapes(model: nn.Module) -> Any:
    """What `init` gives, as shapes; nothing is computed, and a model is traced once."""
    return jax.eval_shape(lambda: init(model, jax.random.key(0)))


class Outputs(NamedTuple):
    """What a forward pass gives."""

    logits: jax.Array
    """float32 [B, T, V] or [B, classes]; for the method "features", what the model's `logits` reads."""
    labels: jax.Array
    """int [B, T] or [B]; IGNORED ones are not to be counted."""
    auxiliary_loss: jax.Array
    """float32 scalar: the sum of what modules put into the collection "losses"."""


def forward(
    model: nn.Module,
    params: Any,
    batch: Batch,
    *,
    train: bool = False,
    dropout_key: jax.Array | None = None,
    method: str = "__call__",
) -> Outputs:
    """Runs the model on a batch.

    Args:
        batch: int arrays; tokens equal to PAD are hidden and stand at the end of each
            row. Beside the family's own keys: `prefix` and `segments`
            (decoder_lm), `source_segments` and `target_segments` (seq2seq), as the model's arguments of that name.
        dropout_key: needed where `train` and the config drops something.
        method: the model's method that takes the arguments.
    """
    family = FAMILIES[model.cfg.family]
    rngs = None if dropout_key is None else {"dropout": dropout_key}
    logits, collected = model.apply(
        {"params": params}, **family.arguments(batch), train=train, rngs=rngs, mutable=["losses"], method=method
    )
    auxiliary = sum((leaf.sum() for leaf in jax.tree.leaves(collected)), start=jnp.zeros(()))
    return Outputs(logits, batch[family.labels], auxiliary)


def count_tokens(cfg: ModelConfig, batch: Mapping[str, np.ndarray]) -> int:
    """Real tokens that the model reads in a batch on the host."""
    return sum(int(np.count_nonzero(batch[key] != PAD)) for key in FAMILIES[cfg.family].inputs)
