"""Embeddings of texts: the mean of the outputs of an encoder."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from tformer_jax.inference.batching import in_batches
from tformer_jax.models.classifier import mean_pool
from tformer_jax.nn.sharding import replicate
from tformer_jax.parallel.placement import everywhere, mesh_of, shard_batch
from tformer_jax.special_tokens import PAD


def embeddings(model: nn.Module, params: Any, rows: Sequence[Sequence[int]], batch_size: int) -> Iterator[np.ndarray]:
    """Yields the mean of the outputs of a model's encoder over the tokens of each row, float32 [D]."""
    mesh = mesh_of(params)

    def run(tokens: np.ndarray, _: np.ndarray) -> np.ndarray:
        with everywhere(mesh):
            return np.asarray(_mean_features(model, params, **shard_batch(mesh, {"tokens": tokens})))

    return in_batches(rows, run, size=batch_size, max_length=model.cfg.max_length)


@functools.partial(jax.jit, static_argnames="model")
def _mean_features(model: nn.Module, params: Any, tokens: jax.Array) -> jax.Array:
    """Returns the mean features, float32 [B, D], of tokens int [B, S] with PAD on the right."""
    padding_mask = tokens != PAD
    features: Any = model.apply({"params": params}, tokens, padding_mask, method="features")
    return replicate(mean_pool(features, padding_mask))
