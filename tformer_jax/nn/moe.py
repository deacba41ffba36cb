"""Mixture of experts: each token is read by a few of E feed-forward networks."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer_jax import axes
from tformer_jax.config import ModelConfig
from tformer_jax.nn.experts import AXES, mixture
from tformer_jax.nn.linear import kernel_initializer
from tformer_jax.nn.parameters import named


class Routing(NamedTuple):
    """Which experts read a token, k of them."""

    experts: jax.Array
    """int32 [B, T, k], most probable first."""
    weights: jax.Array
    """float32 [B, T, k]: factors of the experts' results; 0 for a token that an expert has no room for."""


class MixtureOfExperts(nn.Module):
    """`sum_i weight_i * expert_i(x)` over the `cfg.experts_per_token` experts that a router finds most probable.

    "Outrageously Large Neural Networks" (2017), with the load-balance loss and capacity of "Switch Transformers"
    (2021) and the router z-loss of "ST-MoE" (2022), each already weighted, in the collection "losses". Rows of a
    batch do not compete for room, so that a row's result does not depend on the others.
    """

    cfg: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array, real: jax.Array | None = None, *, train: bool = False) -> jax.Array:
        """x [B, T, D], real tokens bool [B, T] (None: all) -> [B, T, D]; padding gets zeros."""
        cfg = self.cfg
        if real is None:
            real = jnp.ones(x.shape[:2], bool)
        init = named(kernel_initializer(cfg, cfg.dim, cfg.num_experts), axes.EMBED, None)
        router = self.param("router", init, (cfg.dim, cfg.num_experts), jnp.dtype(cfg.param_dtype))
        logits = x.astype(jnp.float32) @ router.astype(jnp.float32)
        routing = route(logits, real, cfg)
        self.sow("losses", "balance", cfg.balance_loss * balance_loss(logits, routing.experts, real))
        self.sow("losses", "router_z", cfg.router_z_loss * router_z_loss(logits, real))
        return mixture(self._parameters(), x, *routing, room(cfg, x.shape[1]), cfg).astype(x.dtype)

    def _parameters(self) -> dict[str, jax.Array]:
        """Those of the experts, named as in `experts.AXES`."""
        cfg, params = self.cfg, {}
        D, F, dtype = cfg.dim, cfg.ffn_dim, jnp.dtype(cfg.param_dtype)
        sizes = {"expand": (D, F)} | ({"gate": (D, F)} if cfg.expert_gated else {}) | {"contract": (F, D)}
        for name, size in sizes.items():
            kernel, bias = f"{name}_kernel", f"{name}_bias"
            init = named(kernel_initializer(cfg, *size, ends_sublayer=name == "contract"), *AXES[kernel])
            params[kernel] = self.param(kernel, init, (cfg.num_experts, *size), dtype)
            if cfg.ffn_bias:
                zeros = named(nn.initializers.zeros, *AXES[bias])
                params[bias] = self.param(bias, zeros, (cfg.num_experts, size[1]), dtype)
        return params


def room(cfg: ModelConfig, T: int) -> int:
    """The most tokens of a row of T that an expert reads: `ceil(c k T / E)` with `cfg.expert_capacity` c."""
    if cfg.expert_capacity is None:
        return T
    return math.ceil(cfg.expert_capacity * cfg.experts_per_token * T / cfg.num_experts)


def route(logits: jax.Array, real: jax.Array, cfg: ModelConfig) -> Routing:
    """The most probable experts of each token: logits float32 [B, T, E], real tokens bool [B, T].

    With `cfg.expert_capacity` an expert reads at most `room` tokens of a row: first choices before second ones, then
    in order of position ("GShard", 2020).
    """
    weights, chosen = _top(jax.nn.softmax(logits, axis=-1), cfg.experts_per_token)
    if cfg.router_normalize:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    kept = jnp.broadcast_to(real[..., None], weights.shape)
    if cfg.expert_capacity is not None:
        kept = kept & (_place_in_queue(chosen, real, cfg.num_experts) < room(cfg, logits.shape[1]))
    return Routing(chosen, jnp.where(kept, weights, 0))


def _top(probabilities: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """`jax.lax.top_k` of [..., E], which would bring all rows of a batch together on a mesh."""
    left, chosen = probabilities, []
    for _ in range(k):
        chosen.append(left.argmax(axis=-1).astype(jnp.int32))
        left = jnp.where(jnp.arange(left.shape[-1]) == chosen[-1][..., None], -1, left)
    experts = jnp.stack(chosen, axis=-1)
    return jnp.take_along_axis(probabilities, experts, axis=-1), experts


def _place_in_queue(experts: jax.Array, real: jax.Array, E: int) -> jax.Array:
    """How many real tokens of its row an expert takes before this one: int [B, T, k] -> int [B, T, k]."""
    B, T, k = experts.shape
    wanted = jax.nn.one_hot(experts, E, dtype=jnp.int32) * real[..., None, None]
    queue = jnp.swapaxes(wanted, 1, 2).reshape(B, k * T, E)
    before = jnp.cumsum(queue, axis=1) - queue
    before = jnp.swapaxes(before.reshape(B, k, T, E), 1, 2)
    return jnp.take_along_axis(before, experts[..., None], axis=-1)[..., 0]


def balance_loss(logits: jax.Array, experts: jax.Array, real: jax.Array) -> jax.Array:
    """`E * sum_e f_e P_e`: the share of choices that fall on e, times its mean probability; float32 scalar.

    1 where all experts are used alike ("Switch Transformers", 2021, equation 4, for any k).
    """
    E, k = logits.shape[-1], experts.shape[-1]
    count = jnp.maximum(real.sum(), 1)
    weights = real.astype(jnp.float32)[..., None]
    probability = (jax.nn.softmax(logits, axis=-1) * weights).sum(axis=(0, 1)) / count
    share = (jax.nn.one_hot(experts, E).sum(axis=2) * weights).sum(axis=(0, 1)) / (count * k)
    return E * (share * probability).sum()


def router_z_loss(logits: jax.Array, real: jax.Array) -> jax.Array:
    """The mean of `logsumexp(logits)^2` over real tokens ("ST-MoE", 2022, equation 5); float32 scalar."""
    z = jax.nn.logsumexp(logits, axis=-1)
    return jnp.where(real, z * z, 0).sum() / jnp.maximum(real.sum(), 1)
