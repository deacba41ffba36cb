"""Parameters, FLOPs and bytes of a model, by tracing shapes, without computing anything."""

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
from flax import linen as nn

from tformer_jax.config import ModelConfig
from tformer_jax.models import registry
from tformer_jax.nn.module import named_leaves

TRAINING_FLOPS = 3
"""FLOPs of a train step relative to its forward pass: the backward pass has two products for each forward product."""
DOTS_RECOMPUTED = {
    "nothing_saveable": "all",
    "dots_with_no_batch_dims_saveable": "batched",
    "dots_saveable": "none",
}
"""The `dot_general` of the forward pass that the backward pass computes again, by `model.remat`.

Products of experts are computed again with each of these policies.
"""


EMBEDDINGS = ("embedding", "types")
"""Names of the parameters of embeddings."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """Cost of a model for a batch of `batch` rows of `length` tokens per side."""

    parameters: dict[str, int]
    """Number of parameters by module path; `layers_*` stands for all layers of a stack."""
    embeddings: int
    """Number of parameters of token, position and token-type embeddings, which no matrix product of the layers uses."""
    tokens: int
    """Number of input tokens, of both sides for seq2seq models."""
    forward_flops: int
    """FLOPs of all matrix products, 2 per multiply-add; only the chosen experts are counted.

    Devices compute each expert's tokens in blocks of `nn.grouped.ROWS`; padding of the last block is not counted.
    """
    parameter_bytes: int
    cache_bytes: int
    """Size of keys, values and recurrent states for `length` tokens in `batch` rows; 0 without a decoder.

    Decoding commands keep the keys and values of all tokens, also in layers with a window.
    """

    @property
    def total(self) -> int:
        """Total number of parameters."""
        return sum(self.parameters.values())


def estimate(cfg: ModelConfig, batch: int, length: int, *, cache_dtype: str | None = None, depth: int = 3) -> Cost:
    """Computes the cost of a model on `batch` rows of `length` tokens.

    Args:
        cache_dtype: dtype of cached keys and values, as `decode.cache_dtype`.
        depth: module paths are truncated to this number of names.

    Raises:
        UserError: the model has no positions for `length` tokens.
    """
    if length > cfg.max_length:
        raise cfg.error("max_length", f"is less than {length} tokens")
    cfg = dataclasses.replace(cfg, attention_backend="reference")  # this machine may not support the config's backend
    model = registry.build(cfg)
    shapes = nn.unbox(registry.shapes(model))
    tokens = registry.example_batch(cfg, batch, length)
    return Cost(
        parameters=by_module(shapes, depth),
        embeddings=sum(leaf.size for path, leaf in named_leaves(shapes) if path.rpartition("/")[2] in EMBEDDINGS),
        tokens=registry.count_tokens(cfg, tokens),
        forward_flops=forward_flops(cfg, tokens, all_scores=True),
        parameter_bytes=size_bytes(shapes),
        cache_bytes=cache_bytes(cfg, batch, length, cache_dtype),
    )


def forward_flops(cfg: ModelConfig, batch: Any, *, all_scores: bool = False) -> int:
    """Counts the FLOPs of all matrix products of a forward pass on a batch of arrays or their shapes, by tracing.

    Args:
        all_scores: count all T x S attention scores, including masked ones. By default, scores that
            `attention_ops.reference` skips on a CPU are not counted; it skips masked scores of causal rows of more than
            `nn.xla.SMALLEST_QUERY_CHUNK` tokens.
    """
    return _flops(_traced(cfg, batch, all_scores=all_scores))


def recomputed_flops(cfg: ModelConfig, batch: Any) -> int:
    """Counts the FLOPs of the products that `cfg.remat` does not save and that the backward pass computes again.

    Counts masked attention scores, and products that XLA removes because no gradient needs them, such as the last
    product of a layer.
    """
    if cfg.remat in ("none", "everything_saveable"):
        return 0
    method = "__call__" if cfg.model_class.classifies else "features"
    layers = _traced(cfg, batch, all_scores=True, method=method)
    return _flops(layers, dots=DOTS_RECOMPUTED[cfg.remat])


def _traced(cfg: ModelConfig, batch: Any, *, all_scores: bool, method: str = "__call__") -> Any:
    """Returns the jaxpr of a forward pass."""
    model = registry.build(dataclasses.replace(cfg, attention_backend="reference"))  # others hide products in loops
    example = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), batch)
    shapes = nn.unbox(registry.shapes(cfg.model_class(cfg)))  # cached where the caller has this model
    with _on_tpu() if all_scores else contextlib.nullcontext():
        forward = functools.partial(registry.forward, model, method=method)
        return jax.make_jaxpr(lambda params, batch: forward(params, batch).values)(shapes, example).jaxpr


def _on_tpu() -> contextlib.AbstractContextManager[Any]:
    """Context of programs for a TPU; only programs for CPUs skip scores."""
    device = jax.sharding.AbstractDevice(device_kind="tpu", num_cores=None, platform="tpu")
    types = (jax.sharding.AxisType.Auto,)  # JAX 0.12 has no explicit sharding of ragged products, the default there
    return jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh((1,), ("data",), axis_types=types, abstract_device=device)
    )


def by_module(shapes: Any, depth: int = 3) -> dict[str, int]:
    """Counts parameters by module path, truncated to `depth` names; `layers_*` stands for all layers of a stack."""
    sizes: dict[str, int] = {}
    for path, leaf in named_leaves(shapes):
        module = "/".join(re.sub(r"layers_\d+", "layers_*", path).split("/")[:-1][:depth])
        sizes[module] = sizes.get(module, 0) + leaf.size
    return sizes


def size_bytes(tree: Any) -> int:
    """Returns the total size of the arrays, or shapes, of a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def cache_bytes(cfg: ModelConfig, batch: int, length: int, dtype: str | None) -> int:
    """Returns the size in bytes of all layers' caches, including cross-attention to `length` tokens."""
    if not cfg.model_class.decodes:
        return 0
    from tformer_jax.nn.decoder_cache import empty_entries, row_cache

    total = size_bytes(jax.tree.leaves(jax.eval_shape(lambda: row_cache(cfg, batch, length, dtype=dtype).layers)))
    if cfg.model_class.reads_source:
        memory = jax.eval_shape(lambda: empty_entries(cfg, cfg.attention, batch, length).stored(dtype or cfg.dtype))
        total += cfg.decoder_layers * size_bytes(jax.tree.leaves(memory))
    return total


def _flops(jaxpr: Any, *, dots: str = "all") -> int:
    """Counts the FLOPs of matrix products, with inner functions and repeated scan steps.

    Args:
        dots: which `dot_general` to count: "all", "batched" (with batch dimensions, as in attention) or "none".
    """
    total = 0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            (contracted, _), (batched, _) = params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            if dots == "none" or (dots == "batched" and not batched):
                continue
            total += 2 * equation.outvars[0].aval.size * math.prod(left[axis] for axis in contracted)
        elif params.get("name") == "grouped_product" and equation.invars:  # its loops depend on the batch
            total += 2 * equation.invars[0].aval.size * equation.outvars[0].aval.shape[-1]
        else:
            times = params["length"] if name == "scan" else 1
            total += times * sum(_flops(inner, dots=dots) for inner in _inner_jaxprs(params))
    return total


def _inner_jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(part, "jaxpr", part)
            if hasattr(inner, "eqns"):
                yield inner
