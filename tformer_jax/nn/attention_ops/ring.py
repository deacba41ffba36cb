"""Ring attention: rows too long for one device are split over several, and keys and values go round among them.

"Ring Attention with Blockwise Transformers for Near-Infinite Context" (2023). Each device keeps its queries and the
softmax of each over the keys met so far. The keys, with their values and what the mask says of them, go from device
to device until each has met all; in the backward pass they go round once more, and their gradients with them. Keys
that the mask hides from all queries of a device cost it nothing but passing them on.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tformer_jax import axes
from tformer_jax.nn import sharding
from tformer_jax.nn.attention_ops import blocks
from tformer_jax.nn.attention_ops.blocks import BLOCK, Grid, Hidden, Inputs, Softmax
from tformer_jax.nn.attention_ops.blockwise import blockwise
from tformer_jax.nn.attention_ops.core import Backend, Bias, Scoring
from tformer_jax.nn.masks import Mask


class _Ring(NamedTuple):
    """The devices that share a row."""

    axis: tuple[str, ...]
    size: int

    def send(self, arrays: Any) -> Any:
        """Each device's arrays, to the next device."""
        hops = [(place, (place + 1) % self.size) for place in range(self.size)]
        return jax.tree.map(lambda array: jax.lax.ppermute(array, self.axis, hops), arrays)


class _Keys(NamedTuple):
    """What goes round: keys, values, and what the mask says of them."""

    k: jax.Array
    v: jax.Array
    real: jax.Array | None
    segments: Any
    positions: Any


@flax.struct.dataclass
class _OwnHeads:
    """The part of a bias for the heads of this device."""

    bias: Bias
    axis: tuple[str, ...] = flax.struct.field(pytree_node=False)
    heads: int = flax.struct.field(pytree_node=False)

    def block(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
        """As `Bias.block`."""
        first = jax.lax.axis_index(self.axis) * self.heads
        return jax.lax.dynamic_slice_in_dim(self.bias.block(queries, keys), first, self.heads, axis=-3)


def ring(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Mask,
    bias: Bias | None,
    scoring: Scoring,
    dropout_key: None,
    block: int = BLOCK,
) -> jax.Array:
    """`blockwise`, with T and S split as `nn.sharding.partition` says.

    It is `blockwise` itself where they are not both split, and under an explicit mask, which is as large as all
    weights.
    """
    T, S, N, K = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
    length, heads = sharding.mesh_axes(axes.LENGTH, T), sharding.mesh_axes(axes.HEADS, N)
    if not length or length != sharding.mesh_axes(axes.LENGTH, S) or mask.explicit is not None:
        return blockwise(q, k, v, mask, bias, scoring, dropout_key, block)

    columns = sharding.devices(heads)
    copies = math.lcm(K, columns) // K  # of key/value heads, until they can be split as those of queries are
    k, v = jnp.repeat(k, copies, axis=2), jnp.repeat(v, copies, axis=2)
    if bias is not None and columns > 1:
        bias = _OwnHeads(bias, heads, N // columns)
    if mask.positions is None:
        mask = dataclasses.replace(mask, positions=(jnp.arange(T)[None], jnp.arange(S)[None]))
    devices = _Ring(length, sharding.devices(length))

    def on_each_device(q: jax.Array, k: jax.Array, v: jax.Array, bias: Bias | None, mask: Mask) -> jax.Array:
        inputs, hidden, grid = blocks.padded(Inputs(q, k, v, bias), Hidden(mask, None), block, scoring)
        return _attention(inputs, hidden.mask, grid, devices)[:, : q.shape[1]]

    where = _places(q, axes.LENGTH, axes.HEADS, None)
    of_mask = jax.tree.map(lambda leaf: _places(leaf, *(axes.LENGTH,)[: leaf.ndim - 1]), mask)
    specs = (where, where, where, PartitionSpec(), of_mask)
    out: jax.Array = jax.shard_map(on_each_device, in_specs=specs, out_specs=where, check_vma=False)(
        q, k, v, bias, mask
    )
    return out


def _places(x: jax.Array, *names: str | None) -> PartitionSpec:
    """How x is split: along B as far as that is even, and as the names of its other axes say.

    Axes of one device are named, too: along others, gradients would be added up.
    """
    alone = (axis for axis, size in jax.sharding.get_abstract_mesh().shape.items() if size == 1)
    return PartitionSpec((*sharding.mesh_axes(axes.BATCH, len(x)), *alone), *sharding.partition(names, x.shape[1:]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _attention(inputs: Inputs, mask: Mask, grid: Grid, devices: _Ring) -> jax.Array:
    return _forward(inputs, mask, grid, devices)[0]


def _forward(inputs: Inputs, mask: Mask, grid: Grid, devices: _Ring) -> tuple[jax.Array, tuple]:
    """As `blockwise` has it, of this device's queries."""

    def hop(_, carry: tuple[_Keys, Softmax]) -> tuple[_Keys, Softmax]:
        keys, softmax = carry
        return devices.send(keys), blocks.meet(*_with(keys, inputs, mask), grid, softmax)

    start = _keys(inputs, mask), blocks.unseen(inputs.q, grid)
    _, softmax = jax.lax.fori_loop(0, devices.size, hop, start)
    out, logsumexp = blocks.finish(softmax, inputs.q.dtype)
    return out, (inputs, mask, out, logsumexp)


def _backward(grid: Grid, devices: _Ring, residuals: tuple, d_out: jax.Array) -> tuple[Inputs, None]:
    inputs, mask, out, logsumexp = residuals
    results = blocks.results_of(out, logsumexp, d_out)

    def hop(_, carry: tuple[_Keys, Inputs]) -> tuple[_Keys, Inputs]:
        keys, gradients = carry
        gradients = blocks.add_gradients(*_with(keys, inputs, mask), grid, results, gradients)
        return devices.send(keys), gradients._replace(k=devices.send(gradients.k), v=devices.send(gradients.v))

    start = _keys(inputs, mask), blocks.no_gradients(inputs)
    _, gradients = jax.lax.fori_loop(0, devices.size, hop, start)
    return blocks.in_dtypes_of(inputs, gradients), None


_attention.defvjp(_forward, _backward)


def _keys(inputs: Inputs, mask: Mask) -> _Keys:
    """This device's own."""
    segments, positions = (pair and pair[1] for pair in (mask.segments, mask.positions))
    return _Keys(inputs.k, inputs.v, mask.real, segments, positions)


def _with(keys: _Keys, inputs: Inputs, mask: Mask) -> tuple[Inputs, Hidden]:
    """This device's queries, and keys that came from another."""
    segments, positions = (
        pair and (pair[0], others)
        for pair, others in ((mask.segments, keys.segments), (mask.positions, keys.positions))
    )
    met = dataclasses.replace(mask, real=keys.real, segments=segments, positions=positions)
    return inputs._replace(k=keys.k, v=keys.v), Hidden(met, None)


RING = Backend(ring, dropout=False)
