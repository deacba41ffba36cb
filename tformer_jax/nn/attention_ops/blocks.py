"""Blockwise attention of all queries to some of the keys, shared by `blockwise` and `ring`.

The algorithm of "FlashAttention" (2022) and "FlashAttention-2" (2023), with its own backward pass. Queries and keys
are split into blocks; the softmax of each query is updated with each block of keys ("Online normalizer calculation
for softmax", 2018), and the backward pass recomputes each block of weights from the row's log-sum-exp. Blocks
that are fully masked are skipped.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from tformer_jax.nn.attention_ops.core import Bias, Operands, Scoring
from tformer_jax.nn.attention_ops.reference import MASKED_SCORE, scores, weighted_sum
from tformer_jax.nn.dropout import dropout
from tformer_jax.nn.masks import Mask

BLOCK = 512
"""Queries and keys per block; shorter inputs use smaller blocks."""

Carry = TypeVar("Carry")


class Inputs(NamedTuple):
    """Differentiable inputs, or their gradients."""

    q: jax.Array
    """[B, T, N, H], T a multiple of `Grid.rows`."""
    k: jax.Array
    """[B, S, K, H], S a multiple of `Grid.columns`."""
    v: jax.Array
    bias: Any
    sinks: jax.Array | None
    """float32 [N]."""


class NonDiff(NamedTuple):
    """Non-differentiable inputs."""

    mask: Mask
    dropout_key: jax.Array | None


class Grid(NamedTuple):
    """Static block sizes and scoring parameters."""

    rows: int
    columns: int
    scoring: Scoring


class Softmax(NamedTuple):
    """Online softmax of each query over the keys so far, float32; axis 0 has R = T / `Grid.rows` query blocks."""

    peak: jax.Array
    """[R, B, N, rows]: the maximum score."""
    total: jax.Array
    """[R, B, N, rows]: the sum of `exp(score - peak)`."""
    out: jax.Array
    """[R, B, rows, N, H]: the sum of `exp(score - peak) * value`."""


class Results(NamedTuple):
    """Results of the forward pass and the output's gradient, as the backward pass needs them."""

    logsumexp: jax.Array
    """float32 [B, N, T], with the sinks; without sinks, inf for a query that may attend to no key."""
    d_out: jax.Array
    """[B, T, N, H]."""
    d_sum: jax.Array
    """float32 [B, N, T]: the sum of weight * d_weight, equal to `d_out . out` (FlashAttention-2, section 2.3.2)."""


def padded(x: Operands, block: int) -> tuple[Inputs, NonDiff, Grid]:
    """Pads T and S to whole blocks of at most `block` queries and keys, and masks the padded keys.

    Returns:
        The inputs in their dtypes, with the padded lengths T and S; the mask of the padded inputs, whose `padding_mask`
        is bool [B, S], with the dropout key; and the block sizes.
    """
    (B, T), S = x.q.shape[:2], x.k.shape[1]
    grid = Grid(min(block, T), min(block, S), x.scoring)
    padded_T, padded_S = _round_up(T, grid.rows), _round_up(S, grid.columns)
    q, k, v = _pad(x.q, padded_T, 1), _pad(x.k, padded_S, 1), _pad(x.v, padded_S, 1)
    mask = _pad_mask(x.mask, B, T, S, padded_T, padded_S)
    return Inputs(q, k, v, x.bias, x.sinks), NonDiff(mask, x.dropout_key), grid


def init(inputs: Inputs, grid: Grid) -> Softmax:
    """Returns the online softmax before any keys, which has only the sinks, if there are any."""
    B, T, N, H = inputs.q.shape
    R = T // grid.rows
    rows, out = (R, B, N, grid.rows), jnp.zeros((R, B, grid.rows, N, H))
    if inputs.sinks is None:
        return Softmax(jnp.full(rows, MASKED_SCORE), jnp.zeros(rows), out)
    return Softmax(jnp.broadcast_to(inputs.sinks[:, None], rows), jnp.ones(rows), out)


def update(inputs: Inputs, nondiff: NonDiff, grid: Grid, softmax: Softmax) -> Softmax:
    """Updates the online softmax with all keys of `inputs`."""

    def row(i: jax.Array, softmax: Softmax) -> Softmax:
        body = functools.partial(
            _unless_masked, nondiff.mask, grid, i, functools.partial(_add_block, inputs, nondiff, grid, i)
        )
        mine = jax.tree.map(lambda array: jax.lax.dynamic_index_in_dim(array, i, keepdims=False), softmax)
        mine = jax.lax.fori_loop(0, inputs.k.shape[1] // grid.columns, body, mine)
        return jax.tree.map(lambda array, part: jax.lax.dynamic_update_index_in_dim(array, part, i, 0), softmax, mine)

    return jax.lax.fori_loop(0, inputs.q.shape[1] // grid.rows, row, softmax)


def finalize(softmax: Softmax, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Finalizes the online softmax: the output [B, T, N, H] in `dtype`, and the log-sum-exp as in `Results`."""
    R, B, rows, N, H = softmax.out.shape
    any_key = softmax.total > 0
    total = jnp.where(any_key, softmax.total, 1)
    out = (softmax.out / jnp.swapaxes(total, 2, 3)[..., None]).astype(dtype)
    logsumexp = jnp.where(any_key, softmax.peak + jnp.log(total), jnp.inf)
    return jnp.moveaxis(out, 0, 1).reshape(B, R * rows, N, H), jnp.moveaxis(logsumexp, 0, 2).reshape(B, N, R * rows)


def make_results(out: jax.Array, logsumexp: jax.Array, d_out: jax.Array) -> Results:
    """Builds `Results` from the output of `finalize` and its gradient."""
    return Results(logsumexp, d_out, jnp.einsum("BTNH,BTNH->BNT", d_out, out, preferred_element_type=jnp.float32))


def init_gradients(inputs: Inputs, results: Results) -> Inputs:
    """Returns the gradients before any keys: float32 zeros, and the gradients of the sinks.

    A sink has a weight but no value, so that the gradient of its score is `weight * (0 - d_sum)`.
    """
    zeros: Inputs = jax.tree.map(lambda array: jnp.zeros(array.shape, jnp.float32), inputs)
    if inputs.sinks is None:
        return zeros
    weights = jnp.exp(inputs.sinks[:, None] - results.logsumexp)
    return zeros._replace(sinks=-(weights * results.d_sum).sum(axis=(0, 2)))


def add_gradients(inputs: Inputs, nondiff: NonDiff, grid: Grid, results: Results, gradients: Inputs) -> Inputs:
    """Adds the contributions of all keys of `inputs` to `gradients`."""

    def row(i: jax.Array, gradients: Inputs) -> Inputs:
        body = functools.partial(_block_gradients, inputs, nondiff, grid, results, i)
        visible = functools.partial(_unless_masked, nondiff.mask, grid, i, body)
        return jax.lax.fori_loop(0, inputs.k.shape[1] // grid.columns, visible, gradients)

    return jax.lax.fori_loop(0, inputs.q.shape[1] // grid.rows, row, gradients)


def cast_like(inputs: Inputs, gradients: Inputs) -> Inputs:
    """Casts gradients to the dtypes of `inputs`."""
    cast: Inputs = jax.tree.map(lambda gradient, array: gradient.astype(array.dtype), gradients, inputs)
    return cast


def _add_block(inputs: Inputs, nondiff: NonDiff, grid: Grid, i: jax.Array, j: jax.Array, softmax: Softmax) -> Softmax:
    """Updates the online softmax of query block i with key block j."""
    peak, total, out = softmax
    logits, may_attend = _masked_scores(inputs, nondiff.mask, grid, i, j)
    new_peak = jnp.maximum(peak, logits.max(axis=-1))
    weights = jnp.where(may_attend, jnp.exp(logits - new_peak[..., None]), 0)
    shrink = jnp.exp(peak - new_peak)
    dropped = _dropout(weights, nondiff.dropout_key, grid, i, j).astype(inputs.v.dtype)
    added = _weighted_sum(dropped, _block(inputs.v, j, grid.columns))
    out = out * jnp.swapaxes(shrink, 1, 2)[..., None] + added
    return Softmax(new_peak, total * shrink + weights.sum(axis=-1), out)


def _block_gradients(
    inputs: Inputs, nondiff: NonDiff, grid: Grid, results: Results, i: jax.Array, j: jax.Array, gradients: Inputs
) -> Inputs:
    """Adds the contribution of block (i, j) to `gradients`."""
    queries, keys = _block(inputs.q, i, grid.rows), _block(inputs.k, j, grid.columns)
    values, d_out = _block(inputs.v, j, grid.columns), _block(results.d_out, i, grid.rows)

    logits, pull = jax.vjp(lambda q, k, bias: _scores(q, k, bias, nondiff.mask, grid, i, j), queries, keys, inputs.bias)
    may_attend = _may_attend(nondiff.mask, grid, i, j)
    weights = jnp.where(may_attend, jnp.exp(logits - _block(results.logsumexp, i, grid.rows, axis=2)[..., None]), 0)

    dropped = functools.partial(_dropout, key=nondiff.dropout_key, grid=grid, i=i, j=j)
    _, pull_sum = jax.vjp(lambda w, v: _weighted_sum(dropped(w).astype(v.dtype), v), weights, values)
    d_weights, d_values = pull_sum(d_out.astype(jnp.float32))
    d_logits = weights * (d_weights - _block(results.d_sum, i, grid.rows, axis=2)[..., None])
    d_queries, d_keys, d_bias = pull(d_logits)
    return Inputs(
        _add_to_block(gradients.q, d_queries, i),
        _add_to_block(gradients.k, d_keys, j),
        _add_to_block(gradients.v, d_values, j),
        jax.tree.map(jnp.add, gradients.bias, d_bias),
        gradients.sinks,
    )


def _unless_masked(
    mask: Mask, grid: Grid, i: jax.Array, body: Callable[[jax.Array, Carry], Carry], j: jax.Array, carry: Carry
) -> Carry:
    """Returns `body(j, carry)`, or `carry` if the mask hides block (i, j)."""
    skip = mask.masks_block(i * grid.rows, grid.rows, j * grid.columns, grid.columns)
    result: Carry = jax.lax.cond(skip, lambda j, carry: carry, body, j, carry)
    return result


def _scores(
    q: jax.Array, k: jax.Array, bias: Bias | None, mask: Mask, grid: Grid, i: jax.Array, j: jax.Array
) -> jax.Array:
    added = None
    if bias is not None:
        added = bias.block(*mask.block_positions(i * grid.rows, grid.rows, j * grid.columns, grid.columns))
    return scores(q, k, added, grid.scoring)


def _weighted_sum(weights: jax.Array, v: jax.Array) -> jax.Array:
    """Computes `weights v`, float32 [B, T, N, H], so that a sum over blocks is rounded only once."""
    return jnp.swapaxes(weighted_sum(weights, v), 1, 2)


def _masked_scores(inputs: Inputs, mask: Mask, grid: Grid, i: jax.Array, j: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the scores of block (i, j), `MASKED_SCORE` where masked, and the mask."""
    q, k = _block(inputs.q, i, grid.rows), _block(inputs.k, j, grid.columns)
    may_attend = _may_attend(mask, grid, i, j)
    return jnp.where(may_attend, _scores(q, k, inputs.bias, mask, grid, i, j), MASKED_SCORE), may_attend


def _may_attend(mask: Mask, grid: Grid, i: jax.Array, j: jax.Array) -> jax.Array:
    allowed = mask.block(i * grid.rows, grid.rows, j * grid.columns, grid.columns)
    assert allowed is not None, "padded inputs hide their padding"
    return allowed


def _dropout(weights: jax.Array, key: jax.Array | None, grid: Grid, i: jax.Array, j: jax.Array) -> jax.Array:
    """Applies dropout with a key derived from the block, so that both passes drop the same weights."""
    block_key = None if key is None else jax.random.fold_in(jax.random.fold_in(key, i), j)
    return dropout(weights, grid.scoring.dropout_rate, block_key)


def _block(array: jax.Array, index: jax.Array, size: int, axis: int = 1) -> jax.Array:
    """Returns block `index`, of `size` elements, along `axis`."""
    return jax.lax.dynamic_slice_in_dim(array, index * size, size, axis)


def _add_to_block(array: jax.Array, part: jax.Array, index: jax.Array) -> jax.Array:
    size = part.shape[1]
    old = _block(array, index, size)
    return jax.lax.dynamic_update_slice_in_dim(array, old + part.astype(array.dtype), index * size, axis=1)


def _round_up(length: int, block: int) -> int:
    return -(-length // block) * block


def _pad(array: jax.Array, length: int, axis: int, mode: str = "constant") -> jax.Array:
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, length - array.shape[axis])
    return jnp.pad(array, widths, mode=mode)


def _pad_pair(pair: tuple[jax.Array, jax.Array] | None, T: int, S: int) -> tuple[jax.Array, jax.Array] | None:
    """Pads with the last value, so that `Mask.masks_block` detects as much as without padding."""
    return pair and (_pad(pair[0], T, 1, "edge"), _pad(pair[1], S, 1, "edge"))


def _pad_mask(mask: Mask, B: int, T: int, S: int, padded_T: int, padded_S: int) -> Mask:
    """Returns the mask of the padded inputs, which hides the padded keys."""
    padding_mask = jnp.ones((B, S), bool) if mask.padding_mask is None else mask.padding_mask
    explicit = mask.explicit
    if explicit is not None:
        full = jnp.broadcast_to(explicit, (*explicit.shape[:2], T, S))
        explicit = _pad(_pad(full, padded_T, 2), padded_S, 3)
    padding_mask = _pad(padding_mask, padded_S, 1)
    segments, positions = (_pad_pair(pair, padded_T, padded_S) for pair in (mask.segments, mask.positions))
    return dataclasses.replace(
        mask, padding_mask=padding_mask, segments=segments, positions=positions, explicit=explicit
    )
