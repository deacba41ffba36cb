"""Attention to a paged KV cache, without copying its pages.

Pages are read in groups, which update an online softmax as in `blocks`. Time grows with the number of tokens in the
cache, not with the length of the longest row, and memory does not grow with either.
"""

import dataclasses
import functools
import math
from typing import Any

import flax
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tformer_jax import axes
from tformer_jax.nn import sharding
from tformer_jax.nn.attention_ops.blocks import Softmax
from tformer_jax.nn.attention_ops.core import Bias, Scoring
from tformer_jax.nn.attention_ops.reference import MASKED_SCORE, block_bias, scores, weighted_sum
from tformer_jax.nn.attention_ops.shards import LocalHeadsBias
from tformer_jax.nn.kv_cache import TokenCache
from tformer_jax.nn.masks import Mask, as_mask
from tformer_jax.nn.row_slots import PagedSlots
from tformer_jax.nn.slots import EMPTY

GROUP = 512
"""Number of slots that are read together. Measured on a CPU, whose caches hold them; unmeasured on GPU and TPU."""


@flax.struct.dataclass
class PagedOperands:
    """Inputs of one call of `attend_pages`, and the parameters of the scores."""

    q: jax.Array
    pool: TokenCache
    slots: PagedSlots
    mask: Mask
    bias: Bias | None
    scoring: Scoring = flax.struct.field(pytree_node=False)
    sinks: jax.Array | None = None


@flax.struct.dataclass
class Blocks:
    """J blocks per row of n pages and S slots each; the blocks in use are numbered row by row."""

    ends: jax.Array
    """int32 [B]: number of blocks in use in rows 0, ..., b. A row without new tokens uses none."""
    pages: jax.Array
    """int32 [B, J, n]."""
    positions: jax.Array
    """int32 [B, J, S]: positions of the tokens in the slots of each block."""
    explicit: jax.Array | None
    """bool [B or 1, J, 1, T, S]: `Mask.explicit` of each block."""
    at_once: int = flax.struct.field(pytree_node=False)
    """Number of blocks that are read together."""

    @property
    def groups(self) -> jax.Array:
        """Number of groups of `at_once` blocks, int32 scalar."""
        return -(-self.ends[-1] // self.at_once)

    def of_group(self, number: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns `(owners, rows, columns)` of the blocks of a group, each int32 [at_once].

        For blocks beyond the last one, `owners` is B and `rows` is B - 1, so that `rows` is always a valid index.
        """
        blocks = number * self.at_once + jnp.arange(self.at_once)
        owners = (blocks[:, None] >= self.ends).sum(axis=1)
        rows = jnp.minimum(owners, len(self.ends) - 1)
        starts = jnp.where(rows > 0, self.ends[rows - 1], 0)
        return owners, rows, jnp.minimum(blocks - starts, self.pages.shape[1] - 1)

    def mask(self, mask: Mask, rows: jax.Array, columns: jax.Array) -> Mask:
        """Returns the part of a mask that blocks `columns` [at_once] of `rows` [at_once] need."""
        assert mask.positions is not None
        return dataclasses.replace(
            mask,
            positions=(mask.positions[0][rows], self.positions[rows, columns]),
            prefix=None if mask.prefix is None else mask.prefix[rows],
            explicit=None if self.explicit is None else self.explicit[rows, columns],
        )


def attend_pages(
    q: jax.Array,
    pool: TokenCache,
    slots: Any,
    mask: jax.Array | Mask | None,
    *,
    bias: Bias | None = None,
    sinks: jax.Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Computes `attend` for the keys and values of each row's pages.

    Outputs are zero for queries that may attend to no key, and for rows without new tokens.

    Args:
        q: [B, T, N, H].
        pool: what `pool.unpack` converts to keys and values, each [pages, K, page size, ...].
        slots: `PagedSlots`, after it has allocated slots for the T tokens.
        mask: over the slots [B, S] of each row.
        bias, sinks, scale, softcap: as in `attend`.

    Returns:
        [B, T, N, H] in the dtype of q; scores and softmax are float32.
    """
    scoring = Scoring(1 / math.sqrt(q.shape[-1]) if scale is None else scale, softcap, 0.0)
    x = PagedOperands(q, pool, slots, as_mask(mask), bias, scoring, sinks)
    if jax.sharding.get_abstract_mesh().size <= 1:
        return _attend(x)
    return _on_each_device(x)


def _attend(x: PagedOperands) -> jax.Array:
    B, T, N, H = x.q.shape
    blocks = _blocks(x)
    softmax = Softmax(jnp.full((B, N, T), MASKED_SCORE), jnp.zeros((B, N, T)), jnp.zeros((B, N, T, H)))
    if x.sinks is not None:
        softmax = softmax._replace(peak=jnp.broadcast_to(x.sinks[:, None], (B, N, T)), total=jnp.ones((B, N, T)))
    softmax = jax.lax.fori_loop(0, blocks.groups, functools.partial(_add_group, x, blocks), softmax)
    out = softmax.out / jnp.where(softmax.total == 0, 1, softmax.total)[..., None]
    return jnp.swapaxes(out, 1, 2).astype(x.q.dtype)


def _blocks(x: PagedOperands) -> Blocks:
    """Splits the pages of each row into blocks of about T slots, which balances the costs of reading and summing."""
    slots, mask, T = x.slots, x.mask, x.q.shape[1]
    P, size = slots.table.shape[1], slots.page_size
    pages = min(max(min(T, GROUP) // size, 1), P)

    def split(leaf: jax.Array, width: int, empty: int = 0) -> jax.Array:
        """Splits the last axis: [B, ..., S] -> [B, blocks, ..., width]."""
        padding = [(0, 0)] * (leaf.ndim - 1) + [(0, -leaf.shape[-1] % width)]
        padded = jnp.pad(leaf, padding, constant_values=empty)
        return jnp.moveaxis(padded.reshape(*leaf.shape[:-1], -1, width), -2, 1)

    assert mask.positions is not None
    has_queries = (slots.added < P * size).any(axis=1)
    return Blocks(
        ends=jnp.cumsum(jnp.where(has_queries, -(-slots.index // (pages * size)), 0)),
        pages=split(slots.table, pages),
        positions=split(mask.positions[1], pages * size, EMPTY),
        explicit=None if mask.explicit is None else split(mask.explicit, pages * size),
        at_once=max(GROUP // (pages * size), 1),
    )


def _add_group(x: PagedOperands, blocks: Blocks, number: jax.Array, softmax: Softmax) -> Softmax:
    """Updates the online softmax with group `number` of `blocks.at_once` blocks."""
    owners, rows, columns = blocks.of_group(number)
    k, v = _read(x.pool, blocks.pages[rows, columns], str(x.q.dtype))
    T, S = x.q.shape[1], k.shape[1]
    mask = blocks.mask(x.mask, rows, columns)
    bias = None if x.bias is None else block_bias(x.bias, mask, 0, T, 0, S)
    may_attend: Any = mask.dense(T, S)
    logits = jnp.where(may_attend, scores(x.q[rows], k, bias, x.scoring), -jnp.inf)
    peak = softmax.peak.at[owners].max(logits.max(axis=-1), mode="drop")
    weights = jnp.exp(logits - peak[rows][..., None])
    decay = jnp.exp(softmax.peak - peak)
    return Softmax(
        peak,
        (softmax.total * decay).at[owners].add(weights.sum(axis=-1), mode="drop"),
        (softmax.out * decay[..., None]).at[owners].add(weighted_sum(weights.astype(v.dtype), v), mode="drop"),
    )


def _read(pool: TokenCache, pages: jax.Array, dtype: str) -> tuple[jax.Array, jax.Array]:
    """Returns keys and values [C, S, K, H] of C blocks with pages int32 [C, n], in a floating dtype."""

    def read(leaf: jax.Array) -> jax.Array:
        blocks = jnp.moveaxis(leaf[pages], 2, 1)
        return blocks.reshape(*blocks.shape[:2], -1, blocks.shape[-1])

    return jax.tree.map(read, pool).unpack(dtype)


def _on_each_device(x: PagedOperands) -> jax.Array:
    """Shards rows, and heads if they divide evenly; every device has the pages of its heads."""
    kv_heads = jax.tree.leaves(x.pool)[0].shape[1]
    rows, heads = sharding.mesh_axes(axes.BATCH, len(x.q)), sharding.mesh_axes(axes.KV_HEADS, kv_heads)
    by_row: Any = PartitionSpec(rows)
    by_head: Any = PartitionSpec(rows, None, heads)
    if x.bias is not None and heads:
        x = dataclasses.replace(x, bias=LocalHeadsBias(x.bias, heads, x.q.shape[2] // sharding.devices(heads)))
    specs: Any = PagedOperands(
        q=by_head,
        pool=jax.tree.map(lambda _: PartitionSpec(None, heads), x.pool),
        slots=jax.tree.map(lambda _: by_row, x.slots),
        mask=jax.tree.map(lambda _: by_row, x.mask),
        bias=jax.tree.map(lambda _: PartitionSpec(), x.bias),
        sinks=jax.tree.map(lambda _: PartitionSpec(heads), x.sinks),
        scoring=x.scoring,
    )
    return jax.shard_map(_attend, in_specs=(specs,), out_specs=by_head, check_vma=False)(x)
