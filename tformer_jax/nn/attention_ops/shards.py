"""Runs attention kernels for single devices on a mesh, with rows and heads sharded."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import flax
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tformer_jax import axes
from tformer_jax.nn import sharding
from tformer_jax.nn.attention_ops.core import Bias, Operands


@flax.struct.dataclass
class LocalHeadsBias:
    """Restricts a bias to the heads of this device."""

    bias: Bias
    axis: tuple[str, ...] = flax.struct.field(pytree_node=False)
    heads: int = flax.struct.field(pytree_node=False)

    def block(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
        """See `Bias.block`."""
        first = jax.lax.axis_index(self.axis) * self.heads
        return jax.lax.dynamic_slice_in_dim(self.bias.block(queries, keys), first, self.heads, axis=-3)


def on_each_device(kernel: Callable[[Operands], jax.Array], x: Operands, *, length: bool = False) -> jax.Array:
    """Runs `kernel` on the rows and heads of each device.

    Key/value heads are repeated only as often as needed to shard them evenly.

    Args:
        length: also shard T and S; otherwise they are replicated.
    """
    if jax.sharding.get_abstract_mesh().size <= 1:
        return kernel(x)
    x, along = _split_heads(x), axes.LENGTH if length else None
    where: Any = _spec(x.q, along, axes.HEADS, None)
    specs = dataclasses.replace(
        x,
        q=where,
        k=where,
        v=where,
        mask=jax.tree.map(lambda leaf: _spec(leaf, *(along,) * min(leaf.ndim - 1, 1)), x.mask),
        bias=jax.tree.map(lambda _: PartitionSpec(), x.bias),
        dropout_key=None,
        sinks=jax.tree.map(lambda leaf: PartitionSpec(*sharding.activation_spec((axes.HEADS,), leaf.shape)), x.sinks),
    )
    out: jax.Array = jax.shard_map(kernel, in_specs=(specs,), out_specs=where, check_vma=False)(x)
    return out


def shard_as_queries(x: Operands) -> Operands:
    """Shards keys and values like queries, in programs of all devices; repeats their heads as `on_each_device` does."""
    k, v = (sharding.constrain(array, axes.BATCH, None, axes.HEADS, None) for array in _repeated(x))
    return dataclasses.replace(x, k=k, v=v)


def _split_heads(x: Operands) -> Operands:
    """Repeats key/value heads to shard them like the query heads, and restricts the bias to each device's heads."""
    heads = sharding.mesh_axes(axes.HEADS, x.q.shape[2])
    devices = sharding.devices(heads)
    bias = x.bias if x.bias is None or devices == 1 else LocalHeadsBias(x.bias, heads, x.q.shape[2] // devices)
    k, v = _repeated(x)
    return dataclasses.replace(x, k=k, v=v, bias=bias)


def _repeated(x: Operands) -> tuple[jax.Array, jax.Array]:
    """Repeats the heads of k and v until the devices that shard the heads of q divide their number."""
    devices = sharding.devices(sharding.mesh_axes(axes.HEADS, x.q.shape[2]))
    copies = math.lcm(x.k.shape[2], devices) // x.k.shape[2]
    return jnp.repeat(x.k, copies, axis=2), jnp.repeat(x.v, copies, axis=2)


def _spec(x: jax.Array, *names: str | None) -> PartitionSpec:
    """Returns the `PartitionSpec` of x: B over the batch axes if they divide it, other axes by their logical names.

    Includes the mesh axes of size 1, because gradients are summed over the mesh axes that a spec omits.
    """
    size_1 = (axis for axis, size in jax.sharding.get_abstract_mesh().shape.items() if size == 1)
    return PartitionSpec(
        (*sharding.mesh_axes(axes.BATCH, len(x)), *size_1), *sharding.activation_spec(names, x.shape[1:])
    )
