"""Model families by name, and forward passes on batches."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from tformer_jax.config import ModelConfig, kinds
from tformer_jax.models.classifier import Classifier
from tformer_jax.models.decoder_lm import DecoderLM
from tformer_jax.models.masked_lm import MaskedLM
from tformer_jax.models.seq2seq import Seq2Seq
from tformer_jax.nn import attention_ops, attention_positions
from tformer_jax.nn.attention_ops.select import choose
from tformer_jax.parallel import rules
from tformer_jax.special_tokens import PAD

Batch = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Family:
    """A model class, the function that takes its arguments from a batch, and the batch keys of inputs and labels."""

    module: type[nn.Module]
    arguments: Callable[[Batch], dict[str, Any]]
    inputs: tuple[str, ...]
    labels: str


def _seq2seq_arguments(batch: Batch) -> dict[str, Any]:
    source, target = batch["source"], batch["target_in"]
    return {
        "source": source,
        "target": target,
        "source_padding_mask": source != PAD,
        "target_padding_mask": target != PAD,
        "right_padded": True,
        "source_segments": batch.get("source_segments"),
        "target_segments": batch.get("target_segments"),
    }


def _decoder_lm_arguments(batch: Batch) -> dict[str, Any]:
    return _token_arguments(batch) | {"prefix": batch.get("prefix"), "segments": batch.get("segments")}


def _token_arguments(batch: Batch) -> dict[str, Any]:
    return {"tokens": batch["tokens"], "padding_mask": batch["tokens"] != PAD, "right_padded": True}


FAMILIES = {
    "seq2seq": Family(Seq2Seq, _seq2seq_arguments, ("source", "target_in"), "target_out"),
    "decoder_lm": Family(DecoderLM, _decoder_lm_arguments, ("tokens",), "targets"),
    "classifier": Family(Classifier, _token_arguments, ("tokens",), "label"),
    "masked_lm": Family(MaskedLM, _token_arguments, ("tokens",), "targets"),
}


def build(cfg: ModelConfig, *, train: bool = False) -> nn.Module:
    """Builds the Linen module that `cfg.family` names; vocabulary sizes and the number of classes must be set.

    Raises:
        UserError: `cfg.attention_backend` does not support this platform or what the model needs (for training if
            `train`).
    """
    for needs in attention_needs(cfg, train=train).values():
        attention_ops.get_backend(cfg.attention_backend, needs)
    return FAMILIES[cfg.family].module(cfg)


def attention_needs(cfg: ModelConfig, *, train: bool) -> dict[str, attention_ops.Needs]:
    """Returns what each attention of a model requires of its backend; keys are "encoder", "decoder" and "cross".

    There are none if `cfg.attention` is a recurrence. `train` includes dropout. Packed segments are not included,
    because they depend on the batch.
    """
    if kinds.is_recurrent(cfg.attention):
        return {}
    windows = {"window"} if "window" in cfg.layer_pattern else set()
    prefix = {"prefix"} if cfg.prefix_lm else set()
    lookahead = {"explicit"} if cfg.lookahead is not None else set()
    needed = {
        "encoder": {"padding_mask"} | windows | lookahead,
        "decoder": {"padding_mask", "causal"} | windows | prefix,
        "cross": {"padding_mask", "cross"},
    }
    attentions = {"seq2seq": ("encoder", "decoder", "cross"), "decoder_lm": ("decoder",)}
    return {
        name: attention_ops.Needs(
            dtype=cfg.dtype,
            head_size=max(cfg.score_size, cfg.value_size),
            softcap=cfg.attention_softcap is not None,
            bias=name != "cross" and attention_positions.adds_bias(cfg),
            dropout=train and cfg.attention_dropout > 0,
            conditions=frozenset(needed[name]),
            sinks=cfg.attention_sinks,
        )
        for name in attentions.get(cfg.family, ("encoder",))
    }


def attention_backends(cfg: ModelConfig, length: int) -> dict[str, str]:
    """Returns each attention's backend for training on rows of `length` tokens, with "auto" resolved.

    Instead of a backend, a decoder without attention has the name of its recurrence.
    """
    if kinds.is_recurrent(cfg.attention):
        return {"decoder": cfg.attention}
    if cfg.attention_backend != "auto":
        return dict.fromkeys(attention_needs(cfg, train=True), cfg.attention_backend)
    return {name: choose(needs, length, length) for name, needs in attention_needs(cfg, train=True).items()}


def example_batch(cfg: ModelConfig, batch_size: int = 1, length: int = 2) -> dict[str, np.ndarray]:
    """Returns a batch with the family's keys and ranks and all tokens 1, with which to initialize a model."""
    family = FAMILIES[cfg.family]
    tokens = np.ones((batch_size, min(length, cfg.max_length)), np.int32)
    labels = np.zeros(batch_size, np.int32) if cfg.family == "classifier" else tokens
    return dict.fromkeys(family.inputs, tokens) | {family.labels: labels}


def init(model: nn.Module, key: jax.Array) -> Any:
    """Initializes parameters, boxed with their logical axis names (`flax.linen.unbox` gives the plain arrays)."""
    arguments = FAMILIES[model.cfg.family].arguments(example_batch(model.cfg))
    return model.init(key, **arguments)["params"]


@functools.lru_cache(maxsize=512)
def shapes(model: nn.Module) -> Any:
    """Returns the shapes of the parameters of `init`, without computing them; cached for each model."""
    return jax.eval_shape(lambda: init(model, jax.random.key(0)))


def sharded_shapes(model: nn.Module, mesh: Mesh | AbstractMesh) -> Any:
    """Returns the shapes, dtypes and shardings of the parameters on a mesh."""
    boxed = shapes(model)
    return jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)),
        nn.unbox(boxed),
        rules.parameter_specs(boxed, mesh.shape),
    )


class Outputs(NamedTuple):
    """Results of a forward pass."""

    values: jax.Array
    """float32 logits [B, T, V] (classifiers: [B, classes]), or the features [B, T, D] of the method "features"."""
    labels: jax.Array
    """int [B, T] or [B]; IGNORED labels are not counted."""
    auxiliary_loss: jax.Array
    """float32 scalar: the sum of the collection "losses"."""


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
        batch: int arrays; PAD tokens are masked, and must be at the end of each row. In addition to the keys of the
            family, it may have the model's arguments `prefix` and `segments` (decoder_lm), or `source_segments` and
            `target_segments` (seq2seq).
        dropout_key: required if `train` and any dropout rate is positive.
        method: name of the model's method to call.
    """
    family = FAMILIES[model.cfg.family]
    rngs = None if dropout_key is None else {"dropout": dropout_key}
    values, collected = model.apply(
        {"params": params}, **family.arguments(batch), train=train, rngs=rngs, mutable=["losses"], method=method
    )
    auxiliary = sum((leaf.sum() for leaf in jax.tree.leaves(collected)), start=jnp.zeros(()))
    return Outputs(values, batch[family.labels], auxiliary)


def count_tokens(cfg: ModelConfig, batch: Mapping[str, np.ndarray]) -> int:
    """Counts the real input tokens of a batch on the host."""
    return sum(int(np.count_nonzero(batch[key] != PAD)) for key in FAMILIES[cfg.family].inputs)
