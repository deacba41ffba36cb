"""Model families by name, and forward passes on batches."""

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import AbstractMesh, Mesh

from tformer_jax.base.checks import check_type
from tformer_jax.base.errors import UserError
from tformer_jax.config import ModelConfig, kinds
from tformer_jax.models import Batch
from tformer_jax.nn import attention_ops, attention_positions
from tformer_jax.nn.attention_ops.select import choose
from tformer_jax.nn.linear import LOW_RANK, Linear
from tformer_jax.nn.quantized import check_installed, is_quantized, quantize
from tformer_jax.parallel import rules
from tformer_jax.special_tokens import PAD


def build(cfg: ModelConfig, *, train: bool = False) -> nn.Module:
    """Builds the model of the class that `cfg.family` names in `kinds.FAMILIES`; all sizes must be set.

    Raises:
        UserError: `cfg.attention_backend` does not support this platform or what the model needs (for training if
            `train`), or a package is missing.
    """
    check_type("cfg", cfg, ModelConfig, "a ModelConfig, such as cfg.model")
    check_installed(cfg)
    for needs in attention_needs(cfg, train=train).values():
        attention_ops.get_backend(cfg.attention_backend, needs)
    return cfg.model_class(cfg)


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
        for name in cfg.model_class.attentions
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
    """Returns a batch with the model's keys and ranks and all tokens 1, with which to initialize it."""
    family = cfg.model_class
    tokens = np.ones((batch_size, min(length, cfg.max_length)), np.int32)
    labels = np.zeros(batch_size, np.int32) if family.classifies else tokens
    return dict.fromkeys(family.inputs, tokens) | {family.labels: labels}


def init(model: nn.Module, key: jax.Array) -> Any:
    """Initializes parameters, boxed with their logical axis names (`flax.linen.unbox` gives the plain arrays)."""
    arguments = model.arguments(example_batch(model.cfg))
    return model.init(key, **arguments)["params"]


@functools.lru_cache(maxsize=512)
def shapes(model: nn.Module) -> Any:
    """Returns the shapes of the parameters of `init`, without computing them; cached for each model."""
    return jax.eval_shape(lambda: init(model, jax.random.key(0)))


@functools.lru_cache(maxsize=512)
def linear_kernels(model: nn.Module) -> Mapping[tuple[str, ...], tuple[int, int]]:
    """Returns the paths of the kernels that `Linear` layers apply, and their numbers of axes of inputs and outputs.

    Low-rank updates need not change them, and they can be stored as int8.
    """
    axes_by_path = {}

    def note(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if isinstance(context.module, Linear):
            axes_by_path[*context.module.path, "kernel"] = len(context.module.inputs), len(context.module.outputs)
        return call(*args, **kwargs)

    with nn.intercept_methods(note):
        jax.eval_shape(lambda: init(model, jax.random.key(0)))
    return axes_by_path


def quantized(model: nn.Module, params: Any, exempt: Collection[tuple[str, ...]] = ()) -> Any:
    """Returns the parameters with the kernels of layers stored as int8, with scales of outputs and scanned layers.

    Args:
        exempt: paths of kernels that keep their dtype.
    """
    leaves = flatten_dict(params)
    for path, (inputs, outputs) in linear_kernels(model).items():
        kernel = leaves[path]
        if path not in exempt and not is_quantized(kernel):
            first = kernel.ndim - inputs - outputs
            axes = [*range(first), *range(first + inputs, kernel.ndim)]
            leaves[path] = quantize(kernel.astype(jnp.float32), axes)
    return unflatten_dict(leaves)


def sharded_shapes(model: nn.Module, mesh: Mesh | AbstractMesh, *, as_int8: bool = False) -> Any:
    """Returns the shapes, dtypes and shardings of the parameters on a mesh; `as_int8`: as `quantized` returns them."""
    boxed = shapes(model)
    stored = nn.unbox(boxed)
    if as_int8:
        stored = jax.eval_shape(functools.partial(quantized, model), stored)
    return rules.sharded_state(mesh, boxed, stored)


class Outputs(NamedTuple):
    """Results of a forward pass."""

    values: jax.Array
    """float32 logits [B, T, V] (classifiers: [B, classes]), or the features [B, T, D] of the method "features"."""
    labels: jax.Array
    """int [B, T] or [B]; IGNORED labels are not counted."""
    auxiliary_loss: jax.Array
    """float32 scalar: the sum of the collection "losses"."""


def forward(model: nn.Module, params: Any, batch: Batch, **options: Any) -> Outputs:
    """Runs the model on a batch; arguments as for `watched_forward`."""
    return watched_forward(model, params, batch, (), **options)[0]


def watched_forward(
    model: nn.Module,
    params: Any,
    batch: Batch,
    collections: Sequence[str],
    *,
    train: bool = False,
    dropout_key: jax.Array | None = None,
    low_rank: Any = None,
    method: str = "__call__",
) -> tuple[Outputs, Any]:
    """Runs the model on a batch; returns what modules sow into `collections`, too.

    Args:
        batch: int arrays; PAD tokens are masked, and must be at the end of each row. In addition to the keys of the
            family, it may have the model's arguments `prefix` and `segments` (decoder_lm), or `source_segments` and
            `target_segments` (seq2seq).
        dropout_key: required if `train` and any dropout rate is positive.
        low_rank: updates of the kernels of `linear_kernels`, as `nn.linear.LOW_RANK` describes.
        method: name of the model's method to call.
    """
    rngs = None if dropout_key is None else {"dropout": dropout_key}
    if missing := [name for name in model.inputs if name not in batch]:
        raise UserError(f"the batch lacks {missing[0]!r}: the model reads a dictionary of {', '.join(model.inputs)}")
    values, collected = model.apply(
        {"params": params, LOW_RANK: low_rank or {}},
        **model.arguments(batch),
        train=train,
        rngs=rngs,
        mutable=["losses", *collections],
        method=method,
    )
    losses = jax.tree.leaves(collected.get("losses", {}))
    auxiliary = sum((leaf.sum() for leaf in losses), start=jnp.zeros(()))
    return Outputs(values, batch[model.labels], auxiliary), collected


def count_tokens(cfg: ModelConfig, batch: Mapping[str, np.ndarray]) -> int:
    """Counts the real input tokens of a batch on the host."""
    return sum(int(np.count_nonzero(batch[key] != PAD)) for key in cfg.model_class.inputs)
