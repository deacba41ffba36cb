"""Blockwise attention: memory grows with T + S instead of T x S, on any device."""

import functools

import jax

from tformer_jax.nn.attention_ops import blocks
from tformer_jax.nn.attention_ops.blocks import BLOCK, Grid, Inputs, NonDiff
from tformer_jax.nn.attention_ops.core import Backend, Operands


def blockwise(x: Operands, block: int = BLOCK) -> jax.Array:
    """Computes `reference` without materializing all weights."""
    inputs, nondiff, grid = blocks.padded(x, block)
    return blocks.unpadded(_attention(inputs, nondiff, grid), x.q.shape[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _attention(inputs: Inputs, nondiff: NonDiff, grid: Grid) -> jax.Array:
    return _forward(inputs, nondiff, grid)[0]


def _forward(inputs: Inputs, nondiff: NonDiff, grid: Grid) -> tuple[jax.Array, tuple]:
    """Returns the output [B, K, G, T, H] and the residuals, with the log-sum-exp instead of the weights."""
    softmax = blocks.update(inputs, nondiff, grid, blocks.init(inputs))
    out, logsumexp = blocks.finalize(softmax, inputs.q.dtype)
    return out, (inputs, nondiff, out, logsumexp)


def _backward(grid: Grid, residuals: tuple, d_out: jax.Array) -> tuple[Inputs, None]:
    inputs, nondiff, out, logsumexp = residuals
    results = blocks.make_results(out, logsumexp, d_out)
    gradients = blocks.add_gradients(inputs, nondiff, grid, results, blocks.init_gradients(inputs, results))
    return blocks.cast_like(inputs, gradients), None


_attention.defvjp(_forward, _backward)

BLOCKWISE = Backend(blockwise, sinks=True)
