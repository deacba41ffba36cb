"""Expert parallelism: tokens are sent to the devices of their experts, and results are sent back.

Batch rows and experts are sharded over devices ("GShard", 2020). Each device sends every other device a buffer with
slots for all tokens that could be routed there, so that no token is dropped on any mesh.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tformer_jax import axes
from tformer_jax.config import ModelConfig, kinds
from tformer_jax.nn import sharding
from tformer_jax.nn.gathered import all_gather
from tformer_jax.nn.grouped import grouped_product

Params = Mapping[str, jax.Array]
AXES = {
    "expand_kernel": (axes.EXPERTS, axes.EMBED, axes.MLP),
    "expand_bias": (axes.EXPERTS, axes.MLP),
    "gate_kernel": (axes.EXPERTS, axes.EMBED, axes.MLP),
    "gate_bias": (axes.EXPERTS, axes.MLP),
    "contract_kernel": (axes.EXPERTS, axes.MLP, axes.EMBED),
    "contract_bias": (axes.EXPERTS, axes.EMBED),
}
"""Logical axes of each parameter."""


class Split(NamedTuple):
    """Mesh axes along which the logical axes of the experts' parameters are sharded."""

    experts: tuple[str, ...]
    embed: tuple[str, ...]
    mlp: tuple[str, ...]


def mixture(
    params: Params, x: jax.Array, chosen: jax.Array, weights: jax.Array, capacity: int, cfg: ModelConfig
) -> jax.Array:
    """Computes the weighted sum of the chosen experts' outputs for each token.

    Args:
        params: the experts' parameters, named as in `AXES`.
        x: [B, T, D].
        chosen: int [B, T, k], distinct experts of each token.
        weights: float32 [B, T, k]; an expert with weight 0 does not process the token.
        capacity: maximum number of tokens per row that an expert processes.

    Returns:
        float32 [B, T, D].
    """
    B, T, D = x.shape
    sizes = {axes.EXPERTS: cfg.moe.num_experts, axes.EMBED: D, axes.MLP: cfg.ffn_dim}
    split = Split(*(sharding.mesh_axes(name, size) for name, size in sizes.items()))
    on_device = partial(_on_device, capacity=capacity, split=split, cfg=cfg)
    rows, length = sharding.mesh_axes(axes.BATCH), sharding.mesh_axes(axes.LENGTH, T)
    arrays: tuple[jax.Array, ...] = (x.astype(cfg.dtype), chosen, weights)
    params = {
        name: value.astype(cfg.gradient_dtype if name.endswith("_kernel") else jnp.float32)
        for name, value in params.items()
    }
    if not (rows or length or any(split)):
        return on_device(params, *arrays)
    missing = -B % sharding.devices(rows)
    arrays = tuple(jnp.pad(array, ((0, missing), (0, 0), (0, 0))) for array in arrays)
    specs = {name: sharding.activation_spec(AXES[name], value.shape) for name, value in params.items()}
    where = PartitionSpec(rows, length)
    result: jax.Array = jax.shard_map(on_device, in_specs=(specs, where, where, where), out_specs=where)(
        params, *arrays
    )
    return result[:B]


def _on_device(
    params: Params,
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    *,
    capacity: int,
    split: Split,
    cfg: ModelConfig,
) -> jax.Array:
    """Computes `mixture` for the rows of one device, with its shards of the parameters."""
    B, T, D = x.shape
    E, k, n = cfg.moe.num_experts, cfg.moe.experts_per_token, sharding.devices(split.experts)
    slots = max(1, B * min(T * min(k, E // n), min(T, capacity) * (E // n)))
    indices, counts = _buffer_indices(jnp.where(weights != 0, chosen, E).reshape(-1), E, n, slots)
    choice_of_slot = jnp.full(n * slots, B * T * k).at[indices].set(jnp.arange(B * T * k), mode="drop")
    if split.mlp:
        x = jax.lax.pcast(x, split.mlp, to="varying")
    tokens = x.reshape(B * T, D).at[choice_of_slot // k].get(mode="fill", fill_value=0)
    run = partial(_experts, _gathered(params, split.embed, cfg), split=split, cfg=cfg)
    results = _dispatch_and_combine(run, tokens, counts, split.experts) if split.experts else run(tokens, counts[0])
    results = results.at[indices].get(mode="fill", fill_value=0).reshape(B, T, k, D)
    out = (results.astype(jnp.float32) * weights[..., None]).sum(axis=2)
    return jax.lax.psum(out, split.mlp) if split.mlp else out


def _buffer_indices(chosen: jax.Array, E: int, n: int, slots: int) -> tuple[jax.Array, jax.Array]:
    """Assigns each choice an index into n buffers of `slots` slots, one per device, each sorted by expert.

    Args:
        chosen: int [M], the expert of each choice; E for choices that are not sent.

    Returns:
        The indices, int [M], at least `n * slots` if not sent; and the number of choices per expert, int32 [n, E / n].
    """
    order = jnp.argsort(chosen, stable=True)
    counts = jnp.bincount(chosen, length=E).astype(jnp.int32).reshape(n, E // n)
    starts = jnp.pad(jnp.cumsum(counts.sum(axis=1)), (1, 0))
    device = chosen[order] // (E // n)
    indices = device * slots + jnp.arange(len(chosen)) - starts[device]
    return jnp.zeros_like(indices).at[order].set(indices, unique_indices=True), counts


def _dispatch_and_combine(
    run: Callable[[jax.Array, jax.Array], jax.Array],
    tokens: jax.Array,
    counts: jax.Array,
    mesh_axes: tuple[str, ...],
) -> jax.Array:
    """Sends tokens to the devices of their experts, applies the experts there, and sends the results back.

    Args:
        run: applies the experts of this device to tokens sorted by expert, given the number of tokens per expert.
        tokens: [n * slots, D], the buffers for n devices.
        counts: int32 [n, E / n], tokens per expert.

    Returns:
        [n * slots, D], the results in the order of `tokens`.
    """
    n, swap = len(counts), partial(jax.lax.all_to_all, axis_name=mesh_axes, split_axis=0, concat_axis=0)
    received, counts = swap(tokens.reshape(n, -1, tokens.shape[-1])), swap(counts)
    before = jnp.arange(received.shape[1])[:, None] >= jnp.cumsum(counts, axis=1)[:, None]
    order = jnp.argsort(before.sum(axis=-1).reshape(-1), stable=True)
    results = run(received.reshape(tokens.shape)[order], counts.sum(axis=0))
    results = jnp.zeros_like(results).at[order].set(results, unique_indices=True)
    return swap(results.reshape(received.shape)).reshape(tokens.shape)


def _gathered(params: Params, along: tuple[str, ...], cfg: ModelConfig) -> Params:
    """All-gathers the parameters along the model width."""

    def gather(name: str, value: jax.Array) -> jax.Array:
        if not along or axes.EMBED not in AXES[name]:
            return value
        dtype = cfg.dtype if name.endswith("_kernel") else None
        return all_gather(value, along, AXES[name].index(axes.EMBED), dtype=dtype)

    return {name: gather(name, value) for name, value in params.items()}


def _experts(params: Params, tokens: jax.Array, counts: jax.Array, *, split: Split, cfg: ModelConfig) -> jax.Array:
    """Applies the local experts: tokens [M, D] sorted by expert, int32 [E] tokens per expert -> [M, D].

    If F is sharded, the result is this device's term of a sum. Rows that belong to no expert have unspecified results.
    """
    expert = jnp.searchsorted(jnp.cumsum(counts), jnp.arange(len(tokens)), side="right")

    def affine(name: str, x: jax.Array) -> jax.Array:
        y = grouped_product(x, params[f"{name}_kernel"], counts)
        if not cfg.ffn_bias:
            return y
        bias = params[f"{name}_bias"]
        if name == "contract" and split.mlp:
            bias = jnp.where(jax.lax.axis_index(split.mlp) == 0, bias, 0)
        rows = bias.at[expert].get(mode="fill", fill_value=0)  # in float32, and so are the sums of its gradients
        return y + rows.astype(y.dtype)

    activation = kinds.load(kinds.ACTIVATIONS, cfg.activation)
    hidden, limit = affine("expand", tokens), cfg.moe.gate_limit
    if not cfg.moe.expert_gated:
        return affine("contract", activation(hidden))
    gate = affine("gate", tokens)
    if limit is not None:
        gate, hidden = jnp.minimum(gate, limit), jnp.clip(hidden, -limit, limit) + 1
    return affine("contract", hidden * activation(gate))
