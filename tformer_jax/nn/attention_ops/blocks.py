"""Blockwise attention of all queries to some of the keys, shared by `blockwise` and `ring`.

The algorithm of "FlashAttention" (2022) and "FlashAttention-2" (2023), with its own backward pass. Queries and keys
are split into blocks; the softmax of each query is updated with each block of keys ("Online normalizer calculation
for softmax", 2018), and the backward pass recomputes each block of weights from the row's log-sum-exp. Fully masked
blocks are not visited.

The loop has no conditions, and the operands of all products have their batch axes first and the summed axis where a
matrix product expects it: XLA copies the carry of a condition, runs its branches on one core of a CPU, and transposes
other operands once per block.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from tformer_jax.nn.attention_ops.core import Operands, Scoring
from tformer_jax.nn.attention_ops.reference import MASKED_SCORE, scaled, softcapped
from tformer_jax.nn.dropout import dropout
from tformer_jax.nn.masks import Mask

BLOCK = 512
"""Maximum number of queries and keys per block."""
BLOCK_STEP = 32
"""Blocks below the maximum size have a multiple of this many queries and keys."""

Carry = TypeVar("Carry")


class Inputs(NamedTuple):
    """Differentiable inputs; or their gradients in float32, for k and v [B, K, H, S]."""

    q: jax.Array
    """[B, K, G, T, H], T a multiple of `Grid.rows`; multiplied by the scale of the scores."""
    k: jax.Array
    """[B, K, S, H], S a multiple of `Grid.columns`."""
    v: jax.Array
    """[B, K, S, H]."""
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
    """Online softmax of each query over the keys so far, float32; in `paged`, the axes K, G are N."""

    peak: jax.Array
    """[B, K, G, T]: the maximum score."""
    total: jax.Array
    """[B, K, G, T]: the sum of `exp(score - peak)`; arbitrary as long as the peak is `MASKED_SCORE`."""
    out: jax.Array
    """[B, K, G, T, H]: the sum of `exp(score - peak) * value`; arbitrary where `total` is."""


class Results(NamedTuple):
    """Results of the forward pass and the output's gradient, as the backward pass needs them."""

    logsumexp: jax.Array
    """float32 [B, K, G, T], with the sinks; without sinks, inf for a query that may attend to no key."""
    d_out: jax.Array
    """[B, K, G, T, H]."""
    d_sum: jax.Array
    """float32 [B, K, G, T]: the sum of weight * d_weight, equal to `d_out . out` (FlashAttention-2, section 2.3.2)."""


def padded(x: Operands, block: int) -> tuple[Inputs, NonDiff, Grid]:
    """Pads T and S to whole blocks of at most `block` queries and keys, and masks the padded keys.

    Returns:
        The inputs in their dtypes, with the padded lengths T and S; the mask of the padded inputs, whose `padding_mask`
        is bool [B, S], with the dropout key; and the block sizes.
    """
    (B, T, N, H), (S, K) = x.q.shape, x.k.shape[1:3]
    grid = Grid(block_size(T, block), block_size(S, block), x.scoring)
    padded_T, padded_S = _round_up(T, grid.rows), _round_up(S, grid.columns)
    q = _pad(scaled(x.q, x.scoring.scale), padded_T, 1).reshape(B, padded_T, K, N // K, H)
    k, v = (jnp.swapaxes(_pad(array, padded_S, 1), 1, 2) for array in (x.k, x.v))
    mask = _pad_mask(x.mask, B, T, S, padded_T, padded_S)
    return Inputs(jnp.moveaxis(q, 1, 3), k, v, x.bias, x.sinks), NonDiff(mask, x.dropout_key), grid


def block_size(length: int, block: int) -> int:
    """Returns the size of equal blocks that need the least padding, of as many blocks as blocks of size `block`."""
    equal = -(-length // -(-length // block))
    return min(_round_up(equal, BLOCK_STEP), block, length)


def unpadded(out: jax.Array, T: int) -> jax.Array:
    """Returns the output [B, K, G, padded T, H] as [B, T, N, H]."""
    B, K, G, _, H = out.shape
    return jnp.moveaxis(out[:, :, :, :T], 3, 1).reshape(B, T, K * G, H)


def init(inputs: Inputs) -> Softmax:
    """Returns the online softmax before any keys, which has only the sinks, if there are any."""
    rows, out = inputs.q.shape[:-1], jnp.zeros(inputs.q.shape, jnp.float32)
    if inputs.sinks is None:
        return Softmax(jnp.full(rows, MASKED_SCORE), jnp.zeros(rows), out)
    return Softmax(jnp.broadcast_to(_by_head(inputs.sinks, inputs.q), rows), jnp.ones(rows), out)


def update(inputs: Inputs, nondiff: NonDiff, grid: Grid, softmax: Softmax) -> Softmax:
    """Updates the online softmax with all keys of `inputs`."""
    queries, keys = functools.partial(_block, size=grid.rows, axis=3), functools.partial(_block, size=grid.columns)
    k_transposed = jnp.swapaxes(inputs.k, 2, 3)

    def add_block(i: jax.Array, j: jax.Array, softmax: Softmax) -> Softmax:
        peak, total, out = (queries(array, i) for array in softmax)
        products = _product("BKGTH,BKHS->BKGTS", queries(inputs.q, i), keys(k_transposed, j, axis=3))
        scores = _masked_scores(products, inputs.bias, nondiff.mask, grid, i, j)
        new_peak = jnp.maximum(peak, scores.max(axis=-1))
        weights, shrink = jnp.exp(scores - new_peak[..., None]), jnp.exp(peak - new_peak)
        dropped = _dropout(weights, nondiff.dropout_key, grid, i, j).astype(inputs.v.dtype)
        added = _product("BKGTS,BKSH->BKGTH", dropped, keys(inputs.v, j, axis=2))
        new = Softmax(new_peak, total * shrink + weights.sum(axis=-1), out * shrink[..., None] + added)
        return jax.tree.map(lambda array, part: _set_block(array, part, i, 3), softmax, new)

    return _over_visible_blocks(inputs, nondiff.mask, grid, add_block, softmax)


def finalize(softmax: Softmax, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Finalizes the online softmax: the output [B, K, G, T, H] in `dtype`, and the log-sum-exp as in `Results`."""
    any_key = softmax.peak > MASKED_SCORE
    total = jnp.where(any_key, softmax.total, jnp.inf)
    return (softmax.out / total[..., None]).astype(dtype), softmax.peak + jnp.log(total)


def make_results(out: jax.Array, logsumexp: jax.Array, d_out: jax.Array) -> Results:
    """Builds `Results` from the output of `finalize` and its gradient."""
    return Results(logsumexp, d_out, _product("BKGTH,BKGTH->BKGT", d_out, out))


def init_gradients(inputs: Inputs, results: Results) -> Inputs:
    """Returns the gradients before any keys: zeros, and the gradients of the sinks.

    A sink has a weight but no value, so that the gradient of its score is `weight * (0 - d_sum)`.
    """
    transposed = inputs._replace(k=jnp.swapaxes(inputs.k, 2, 3), v=jnp.swapaxes(inputs.v, 2, 3))
    zeros: Inputs = jax.tree.map(lambda array: jnp.zeros(array.shape, jnp.float32), transposed)
    if inputs.sinks is None:
        return zeros
    weights = jnp.exp(_by_head(inputs.sinks, inputs.q) - results.logsumexp)
    return zeros._replace(sinks=-(weights * results.d_sum).sum(axis=(0, 3)).reshape(-1))


def add_gradients(inputs: Inputs, nondiff: NonDiff, grid: Grid, results: Results, gradients: Inputs) -> Inputs:
    """Adds the contributions of all keys of `inputs` to `gradients`."""
    queries, keys = functools.partial(_block, size=grid.rows, axis=3), functools.partial(_block, size=grid.columns)
    k_transposed, v_transposed = (jnp.swapaxes(array, 2, 3) for array in (inputs.k, inputs.v))
    q_transposed, d_out_transposed = (jnp.moveaxis(array, 4, 2) for array in (inputs.q, results.d_out))

    def add_block(i: jax.Array, j: jax.Array, gradients: Inputs) -> Inputs:
        products = _product("BKGTH,BKHS->BKGTS", queries(inputs.q, i), keys(k_transposed, j, axis=3))
        scores, pull_scores = jax.vjp(
            lambda products, bias: _masked_scores(products, bias, nondiff.mask, grid, i, j), products, inputs.bias
        )
        weights = jnp.exp(scores - queries(results.logsumexp, i)[..., None])
        dropped, pull_dropout = jax.vjp(lambda weights: _dropout(weights, nondiff.dropout_key, grid, i, j), weights)
        (d_weights,) = pull_dropout(
            _product("BKGTH,BKHS->BKGTS", queries(results.d_out, i), keys(v_transposed, j, axis=3))
        )
        d_products, d_bias = pull_scores(weights * (d_weights - queries(results.d_sum, i)[..., None]))
        d_products, dropped = d_products.astype(inputs.q.dtype), dropped.astype(inputs.v.dtype)
        d_queries = _product("BKGTS,BKSH->BKGTH", d_products, keys(inputs.k, j, axis=2))
        d_keys = _product("BKHGT,BKGTS->BKHS", queries(q_transposed, i, axis=4), d_products)
        d_values = _product("BKHGT,BKGTS->BKHS", queries(d_out_transposed, i, axis=4), dropped)
        return Inputs(
            _add_to_block(gradients.q, d_queries, i, 3),
            _add_to_block(gradients.k, d_keys, j, 3),
            _add_to_block(gradients.v, d_values, j, 3),
            jax.tree.map(jnp.add, gradients.bias, d_bias),
            gradients.sinks,
        )

    return _over_visible_blocks(inputs, nondiff.mask, grid, add_block, gradients)


def cast_like(inputs: Inputs, gradients: Inputs) -> Inputs:
    """Returns gradients in the shapes and dtypes of `inputs`."""
    alike = gradients._replace(k=jnp.swapaxes(gradients.k, 2, 3), v=jnp.swapaxes(gradients.v, 2, 3))
    cast: Inputs = jax.tree.map(lambda gradient, array: gradient.astype(array.dtype), alike, inputs)
    return cast


def _over_visible_blocks(
    inputs: Inputs, mask: Mask, grid: Grid, body: Callable[[jax.Array, jax.Array, Carry], Carry], carry: Carry
) -> Carry:
    """Updates `carry` with `body(i, j, carry)` for each block (i, j) that is not fully masked, row by row."""
    visible = mask.visible_blocks(inputs.q.shape[3], inputs.k.shape[2], grid.rows, grid.columns)
    rows, columns = jnp.nonzero(visible, size=visible.size, fill_value=0)
    result: Carry = jax.lax.fori_loop(0, visible.sum(), lambda n, carry: body(rows[n], columns[n], carry), carry)
    return result


def _product(axes: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Computes an einsum in float32, so that a sum over blocks is rounded only once."""
    return jnp.einsum(axes, x, y, preferred_element_type=jnp.float32)


def _masked_scores(products: jax.Array, bias: Any, mask: Mask, grid: Grid, i: jax.Array, j: jax.Array) -> jax.Array:
    """Returns the scores of block (i, j), with the shape of `products`, [B, K, G, rows, columns]."""
    block = i * grid.rows, grid.rows, j * grid.columns, grid.columns
    scores = softcapped(products, grid.scoring.softcap)
    if bias is not None:
        added = bias.block(*mask.block_positions(*block))
        scores += added.reshape(*added.shape[:-3], *scores.shape[1:])
    may_attend = mask.block(*block)
    assert may_attend is not None, "padded inputs hide their padding"
    heads = scores.shape[1:3] if may_attend.shape[1] > 1 else (1, 1)
    return jnp.where(may_attend.reshape(-1, *heads, *may_attend.shape[2:]), scores, MASKED_SCORE)


def _dropout(weights: jax.Array, key: jax.Array | None, grid: Grid, i: jax.Array, j: jax.Array) -> jax.Array:
    """Applies dropout with a key derived from the block, so that both passes drop the same weights."""
    block_key = None if key is None else jax.random.fold_in(jax.random.fold_in(key, i), j)
    return dropout(weights, grid.scoring.dropout_rate, block_key)


def _by_head(sinks: jax.Array, q: jax.Array) -> jax.Array:
    """Returns sinks [N] as [K, G, 1], to broadcast with arrays [B, K, G, T]."""
    return sinks.reshape(*q.shape[1:3], 1)


def _block(array: jax.Array, index: jax.Array, size: int, axis: int) -> jax.Array:
    """Returns block `index`, of `size` elements, along `axis`."""
    return jax.lax.dynamic_slice_in_dim(array, index * size, size, axis)


def _set_block(array: jax.Array, part: jax.Array, index: jax.Array, axis: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(array, part, index * part.shape[axis], axis)


def _add_to_block(array: jax.Array, part: jax.Array, index: jax.Array, axis: int) -> jax.Array:
    return _set_block(array, _block(array, index, part.shape[axis], axis) + part, index, axis)


def _round_up(length: int, block: int) -> int:
    return -(-length // block) * block


def _pad(array: jax.Array, length: int, axis: int, mode: str = "constant") -> jax.Array:
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, length - array.shape[axis])
    return jnp.pad(array, widths, mode=mode)


def _pad_pair(pair: tuple[jax.Array, jax.Array] | None, T: int, S: int) -> tuple[jax.Array, jax.Array] | None:
    """Pads with the last value, so that `Mask.visible_blocks` detects as much as without padding."""
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
