"""Rows of embeddings and output heads that another run has for the same tokens or classes."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from tformer_jax import axes
from tformer_jax.config import ModelConfig
from tformer_jax.data.tokenizers import Tokenizers, same_tokens
from tformer_jax.data.tokenizers.correspondence import Correspondence, correspondence
from tformer_jax.models import registry

Shapes = Mapping[str, tuple[int, ...]]
Labels = tuple[str, ...] | None
"""Names of the classes, in the order of the logits; None for models other than classifiers."""


class SharedRows(NamedTuple):
    """Rows of one parameter that are taken from another run, along `axis`."""

    axis: int
    size: int
    """Number of rows of the new parameter."""
    pairs: Correspondence

    @property
    def new(self) -> int:
        """Number of rows that are newly initialized."""
        return self.size - len(self.pairs.here)

    @property
    def dropped(self) -> int:
        """Number of tokens or classes of the other run that this one does not know."""
        return self.pairs.tokens_there - len(self.pairs.there)

    def __str__(self) -> str:
        tags = f" ({self.pairs.tags:,} of them tags of languages in another notation)" if self.pairs.tags else ""
        return f"{len(self.pairs.here):,} of {self.pairs.tokens_there:,} rows kept{tags}, {self.new:,} new"

    def placed(self, mine: jax.Array, theirs: jax.Array) -> jax.Array:
        """Returns `mine` with the shared rows of `theirs`, in the dtype and sharding of `mine`."""
        before = (slice(None),) * self.axis
        here, there = (jnp.array(ids, jnp.int32) for ids in (self.pairs.here, self.pairs.there))

        @functools.partial(jax.jit, out_shardings=mine.sharding)
        def place(mine: jax.Array, theirs: jax.Array) -> jax.Array:
            return mine.at[*before, here].set(theirs[*before, there].astype(mine.dtype))

        return place(mine, theirs)


def shared_rows(
    model: ModelConfig,
    theirs: Shapes,
    tokenizers: Tokenizers,
    others: Callable[[], Tokenizers],
    labels: tuple[Labels, Labels] = (None, None),
) -> dict[str, SharedRows]:
    """Returns the rows to take from another run, by the names of the parameters that do not correspond as a whole.

    Args:
        theirs: shapes of the other run's parameters, in the layout of `model`.
        tokenizers: tokenizers of the new run.
        others: returns the tokenizers of the other run; called only if a parameter needs them.
        labels: labels of the new run and of the other run.
    """
    shared = {}
    for name, (shape, axis, kind) in comparable(model, theirs).items():
        if kind == axes.CLASSES:
            pairs = None if labels[0] == labels[1] else _of_labels(*labels)
        else:
            here, there = (getattr(each, side_of(name)) for each in (tokenizers, others()))
            pairs = None if shape == theirs[name] and same_tokens(here, there) else correspondence(here, there)
        if pairs is not None and pairs.here:
            shared[name] = SharedRows(axis, shape[axis], pairs)
    return shared


def comparable(model: ModelConfig, theirs: Shapes) -> dict[str, tuple[tuple[int, ...], int, str]]:
    """Returns `tables` without the parameters that the other run lacks, or has with other sizes of the other axes."""
    return {
        name: (shape, axis, kind)
        for name, (shape, axis, kind) in tables(model).items()
        if name in theirs and _without(shape, axis) == _without(theirs[name], axis)
    }


def tables(model: ModelConfig) -> dict[str, tuple[tuple[int, ...], int, str]]:
    """Returns shape, axis and axis name of each parameter along the vocabulary or the classes, by parameter name."""
    boxes = flatten_dict(registry.shapes(registry.build(model)), sep="/")
    named = {name: (box.value.shape, tuple(getattr(box, "names", ()))) for name, box in boxes.items()}
    return {
        name: (shape, names.index(kind), kind)
        for name, (shape, names) in named.items()
        for kind in (axes.VOCAB, axes.CLASSES)
        if kind in names
    }


def side_of(name: str) -> str:
    """Returns the side whose tokens a parameter along the vocabulary has."""
    return "source" if name.startswith("source_") else "target"


def _without(shape: tuple[int, ...], axis: int) -> Any:
    return len(shape), shape[:axis], shape[axis + 1 :]


def _of_labels(here: Labels, there: Labels) -> Correspondence | None:
    if here is None or there is None:
        return None
    shared = [(here.index(label), there.index(label)) for label in here if label in there]
    return Correspondence(tuple(i for i, _ in shared), tuple(i for _, i in shared), len(there))
