"""Ring attention: the sequence dimension is sharded, and devices pass keys and values around a ring.

"Ring Attention with Blockwise Transformers for Near-Infinite Context" (2023). Each device keeps its queries and their
online softmax over the keys so far. Keys, values and the keys' part of the mask are sent from device to device until
each device has processed all of them; the backward pass sends them around once more, with the gradients of keys and
values. Keys that the mask hides from all queries of a device cost that device only the transfer.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tformer_jax import axes
from tformer_jax.nn import sharding
from tformer_jax.nn.attention_ops import blocks, shards
from tformer_jax.nn.attention_ops.blocks import BLOCK, Grid, Inputs, NonDiff, Softmax
from tformer_jax.nn.attention_ops.blockwise import blockwise
from tformer_jax.nn.attention_ops.core import Backend, Operands
from tformer_jax.nn.masks import Mask


class _Ring(NamedTuple):
    """The devices over which rows are sharded."""

    axis: tuple[str, ...]
    size: int

    def send(self, arrays: Any) -> Any:
        """Sends each device's arrays to the next device."""
        hops = [(source, (source + 1) % self.size) for source in range(self.size)]
        return jax.tree.map(lambda array: jax.lax.ppermute(array, self.axis, hops), arrays)


class _Keys(NamedTuple):
    """Arrays that are sent around the ring: keys, values and the keys' part of the mask."""

    k: jax.Array
    v: jax.Array
    padding_mask: jax.Array | None
    segments: Any
    positions: Any


def ring(x: Operands, block: int = BLOCK) -> jax.Array:
    """Computes `blockwise` with T and S sharded as in `nn.sharding.activation_spec`.

    Runs `blockwise` if T and S are not sharded along the same mesh axes, or if the mask is explicit (and so as large as
    all weights).
    """
    T, S = x.q.shape[1], x.k.shape[1]
    length = sharding.mesh_axes(axes.LENGTH, T)
    if not length or length != sharding.mesh_axes(axes.LENGTH, S) or x.mask.explicit is not None:
        return blockwise(x, block)
    if x.mask.positions is None:
        mask = dataclasses.replace(x.mask, positions=(jnp.arange(T)[None], jnp.arange(S)[None]))
        x = dataclasses.replace(x, mask=mask)
    devices = _Ring(length, sharding.devices(length))

    def kernel(x: Operands) -> jax.Array:
        inputs, nondiff, grid = blocks.padded(x, block)
        return blocks.unpadded(_attention(inputs, nondiff.mask, grid, devices), x.q.shape[1])

    return shards.on_each_device(kernel, x, length=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _attention(inputs: Inputs, mask: Mask, grid: Grid, devices: _Ring) -> jax.Array:
    return _forward(inputs, mask, grid, devices)[0]


def _forward(inputs: Inputs, mask: Mask, grid: Grid, devices: _Ring) -> tuple[jax.Array, tuple]:
    """As in `blockwise`, for the queries of this device."""

    def hop(_, carry: tuple[_Keys, Softmax]) -> tuple[_Keys, Softmax]:
        keys, softmax = carry
        return devices.send(keys), blocks.update(*_combine(keys, inputs, mask), grid, softmax)

    start = _keys(inputs, mask), blocks.init(inputs)
    _, softmax = jax.lax.fori_loop(0, devices.size, hop, start)
    out, logsumexp = blocks.finalize(softmax, inputs.q.dtype)
    return out, (inputs, mask, out, logsumexp)


def _backward(grid: Grid, devices: _Ring, residuals: tuple, d_out: jax.Array) -> tuple[Inputs, None]:
    inputs, mask, out, logsumexp = residuals
    results = blocks.make_results(out, logsumexp, d_out)

    def hop(_, carry: tuple[_Keys, Inputs]) -> tuple[_Keys, Inputs]:
        keys, gradients = carry
        gradients = blocks.add_gradients(*_combine(keys, inputs, mask), grid, results, gradients)
        return devices.send(keys), gradients._replace(k=devices.send(gradients.k), v=devices.send(gradients.v))

    start = _keys(inputs, mask), blocks.init_gradients(inputs, results)
    _, gradients = jax.lax.fori_loop(0, devices.size, hop, start)
    return blocks.cast_like(inputs, gradients), None


_attention.defvjp(_forward, _backward)


def _keys(inputs: Inputs, mask: Mask) -> _Keys:
    """Returns the keys of this device."""
    segments, positions = (pair and pair[1] for pair in (mask.segments, mask.positions))
    return _Keys(inputs.k, inputs.v, mask.padding_mask, segments, positions)


def _combine(keys: _Keys, inputs: Inputs, mask: Mask) -> tuple[Inputs, NonDiff]:
    """Combines the queries of this device with keys from another device."""
    segments, positions = (
        pair and (pair[0], others)
        for pair, others in ((mask.segments, keys.segments), (mask.positions, keys.positions))
    )
    combined = dataclasses.replace(mask, padding_mask=keys.padding_mask, segments=segments, positions=positions)
    return inputs._replace(k=keys.k, v=keys.v), NonDiff(combined, None)


RING = Backend(ring, dropout=False, sinks=True)
