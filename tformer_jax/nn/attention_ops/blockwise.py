"""Attention block by block: memory grows with T + S instead of T x S, on any device.

The algorithm of "FlashAttention" (2022) and "FlashAttention-2" (2023), with its own backward pass. Queries and keys
are cut into blocks; the softmax of a block row is kept up to date while key blocks come in ("Online normalizer
calculation for softmax", 2018), and the backward pass computes each block of weights again from the row's
log-sum-exp. Blocks that the mask hides are skipped.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tformer_jax.nn.attention_ops.core import Backend, Bias, Scoring
from tformer_jax.nn.attention_ops.reference import HIDDEN, scores, weighted_sum
from tformer_jax.nn.dropout import dropout
from tformer_jax.nn.masks import Mask

BLOCK = 512
"""Queries and keys of one block; shorter inputs make smaller blocks."""


class _Inputs(NamedTuple):
    q: jax.Array
    k: jax.Array
    v: jax.Array
    bias: Any


class _Hidden(NamedTuple):
    """What has no gradient."""

    mask: Mask
    dropout_key: jax.Array | None


class _Grid(NamedTuple):
    """Sizes that are known when the function is compiled."""

    rows: int
    columns: int
    scoring: Scoring


def blockwise(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Mask,
    bias: Bias | None,
    scoring: Scoring,
    dropout_key: jax.Array | None,
    block: int = BLOCK,
) -> jax.Array:
    """`reference`, without ever holding all weights."""
    T, S = q.shape[1], k.shape[1]
    grid = _Grid(min(block, T), min(block, S), scoring)
    padded_T, padded_S = _round_up(T, grid.rows), _round_up(S, grid.columns)
    inputs = _Inputs(_pad(q, padded_T, 1), _pad(k, padded_S, 1), _pad(v, padded_S, 1), bias)
    hidden = _Hidden(_pad_mask(mask, q.shape[0], T, S, padded_T, padded_S), dropout_key)
    return _attention(inputs, hidden, grid)[:, :T]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _attention(inputs: _Inputs, hidden: _Hidden, grid: _Grid) -> jax.Array:
    return _forward(inputs, hidden, grid)[0]


def _forward(inputs: _Inputs, hidden: _Hidden, grid: _Grid) -> tuple[jax.Array, tuple]:
    """The result [B, T, N, H], and what the backward pass needs: of the weights only their log-sum-exp [B, N, T]."""
    B, T, N, H = inputs.q.shape

    def row(i):
        start = (
            jnp.full((B, N, grid.rows), HIDDEN),
            jnp.zeros((B, N, grid.rows)),
            jnp.zeros((B, grid.rows, N, H)),
        )
        body = functools.partial(_visible, hidden.mask, grid, i, functools.partial(_add_block, inputs, hidden, grid, i))
        peak, total, out = jax.lax.fori_loop(0, inputs.k.shape[1] // grid.columns, body, start)
        seen = total > 0
        out = out / jnp.swapaxes(jnp.where(seen, total, 1), 1, 2)[..., None]
        return out.astype(inputs.q.dtype), jnp.where(seen, peak + jnp.log(jnp.where(seen, total, 1)), jnp.inf)

    outs, logsumexps = jax.lax.map(row, jnp.arange(T // grid.rows))
    out = jnp.moveaxis(outs, 0, 1).reshape(B, T, N, H)
    logsumexp = jnp.moveaxis(logsumexps, 0, 2).reshape(B, N, T)
    return out, (inputs, hidden, out, logsumexp)


def _add_block(inputs: _Inputs, hidden: _Hidden, grid: _Grid, i, j, carry):
    """Takes key block j into block row i's running maximum, sum and result."""
    peak, total, out = carry
    logits, may_attend = _masked_scores(inputs, hidden.mask, grid, i, j)
    new_peak = jnp.maximum(peak, logits.max(axis=-1))
    weights = jnp.where(may_attend, jnp.exp(logits - new_peak[..., None]), 0)
    shrink = jnp.exp(peak - new_peak)
    dropped = _drop(weights, hidden.dropout_key, grid, i, j).astype(inputs.v.dtype)
    added = weighted_sum(dropped, _rows(inputs.v, j, grid.columns)).astype(jnp.float32)
    return new_peak, total * shrink + weights.sum(axis=-1), out * jnp.swapaxes(shrink, 1, 2)[..., None] + added


def _backward(grid: _Grid, residuals: tuple, d_out: jax.Array) -> tuple[_Inputs, None]:
    inputs, hidden, out, logsumexp = residuals
    # sum_s weight * d_weight of a query equals its d_out . out (FlashAttention-2, section 2.3.2)
    d_sum = jnp.einsum("BTNH,BTNH->BNT", d_out, out, preferred_element_type=jnp.float32)

    def row(i, gradients):
        body = functools.partial(_block_gradients, inputs, hidden, grid, d_out, logsumexp, d_sum, i)
        visible = functools.partial(_visible, hidden.mask, grid, i, body)
        return jax.lax.fori_loop(0, inputs.k.shape[1] // grid.columns, visible, gradients)

    zeros = jax.tree.map(lambda array: jnp.zeros(array.shape, jnp.float32), inputs)
    gradients = jax.lax.fori_loop(0, inputs.q.shape[1] // grid.rows, row, zeros)
    return jax.tree.map(lambda gradient, array: gradient.astype(array.dtype), gradients, inputs), None


def _block_gradients(inputs, hidden, grid, d_out, logsumexp, d_sum, i, j, gradients: _Inputs) -> _Inputs:
    """Adds what block (i, j) contributes to the gradients."""
    queries, keys = _rows(inputs.q, i, grid.rows), _rows(inputs.k, j, grid.columns)
    values, d_out_rows = _rows(inputs.v, j, grid.columns), _rows(d_out, i, grid.rows)

    logits, pull = jax.vjp(lambda q, k, bias: _scores(q, k, bias, hidden.mask, grid, i, j), queries, keys, inputs.bias)
    may_attend = _may_attend(hidden.mask, grid, i, j)
    weights = jnp.where(may_attend, jnp.exp(logits - _columns(logsumexp, i, grid.rows)[..., None]), 0)

    dropped = functools.partial(_drop, key=hidden.dropout_key, grid=grid, i=i, j=j)
    _, pull_sum = jax.vjp(lambda w, v: weighted_sum(dropped(w).astype(v.dtype), v), weights, values)
    d_weights, d_values = pull_sum(d_out_rows)
    d_logits = weights * (d_weights - _columns(d_sum, i, grid.rows)[..., None])
    d_queries, d_keys, d_bias = pull(d_logits)
    return _Inputs(
        _add_rows(gradients.q, d_queries, i),
        _add_rows(gradients.k, d_keys, j),
        _add_rows(gradients.v, d_values, j),
        jax.tree.map(jnp.add, gradients.bias, d_bias),
    )


_attention.defvjp(lambda inputs, hidden, grid: _forward(inputs, hidden, grid), _backward)


def _visible(mask: Mask, grid: _Grid, i, body, j, carry):
    """`body(j, carry)`, unless the mask hides block (i, j)."""
    skip = mask.hides_block(i * grid.rows, grid.rows, j * grid.columns, grid.columns)
    return jax.lax.cond(skip, lambda j, carry: carry, body, j, carry)


def _scores(q, k, bias: Bias | None, mask: Mask, grid: _Grid, i, j) -> jax.Array:
    added = None
    if bias is not None:
        added = bias.block(*mask.places(i * grid.rows, grid.rows, j * grid.columns, grid.columns))
    return scores(q, k, added, grid.scoring)


def _masked_scores(inputs: _Inputs, mask: Mask, grid: _Grid, i, j) -> tuple[jax.Array, jax.Array]:
    q, k = _rows(inputs.q, i, grid.rows), _rows(inputs.k, j, grid.columns)
    may_attend = _may_attend(mask, grid, i, j)
    return jnp.where(may_attend, _scores(q, k, inputs.bias, mask, grid, i, j), HIDDEN), may_attend


def _may_attend(mask: Mask, grid: _Grid, i, j) -> jax.Array:
    allowed = mask.block(i * grid.rows, grid.rows, j * grid.columns, grid.columns)
    assert allowed is not None, "padded inputs hide their padding"
    return allowed


def _drop(weights: jax.Array, key: jax.Array | None, grid: _Grid, i, j) -> jax.Array:
    """Dropout that is the same in both passes: its key follows from the block."""
    block_key = None if key is None else jax.random.fold_in(jax.random.fold_in(key, i), j)
    return dropout(weights, grid.scoring.dropout_rate, block_key)


def _rows(array: jax.Array, block: jax.Array, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(array, block * size, size, axis=1)


def _columns(array: jax.Array, block: jax.Array, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(array, block * size, size, axis=2)


def _add_rows(array: jax.Array, part: jax.Array, block: jax.Array) -> jax.Array:
    size = part.shape[1]
    old = _rows(array, block, size)
    return jax.lax.dynamic_update_slice_in_dim(array, old + part.astype(array.dtype), block * size, axis=1)


def _round_up(length: int, block: int) -> int:
    return -(-length // block) * block


def _pad(array: jax.Array, length: int, axis: int) -> jax.Array:
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, length - array.shape[axis])
    return jnp.pad(array, widths)


def _pad_mask(mask: Mask, B: int, T: int, S: int, padded_T: int, padded_S: int) -> Mask:
    """The mask of padded inputs, which hides the padding's keys."""
    real = jnp.ones((B, S), bool) if mask.real is None else mask.real
    segments = mask.segments
    if segments is not None:
        segments = (_pad(segments[0], padded_T, 1), _pad(segments[1], padded_S, 1))
    positions = mask.positions
    if positions is not None:
        positions = (_pad(positions[0], padded_T, 1), _pad(positions[1], padded_S, 1))
    explicit = mask.explicit
    if explicit is not None:
        full = jnp.broadcast_to(explicit, (*explicit.shape[:2], T, S))
        explicit = _pad(_pad(full, padded_T, 2), padded_S, 3)
    real = _pad(real, padded_S, 1)
    return dataclasses.replace(mask, real=real, segments=segments, positions=positions, explicit=explicit)


BLOCKWISE = Backend(blockwise)
