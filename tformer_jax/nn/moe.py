"""Mixture of experts: each token is read by a few of E feed-forward networks."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer_jax import axes
from tformer_jax.config import ModelConfig, kinds
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
        init = named(kernel_initializer(cfg, cfg.dim, cfg.num_experts), axes.EMBED, axes.EXPERTS)
        router = self.param("router", init, (cfg.dim, cfg.num_experts), jnp.dtype(cfg.param_dtype))
        logits = x.astype(jnp.float32) @ router.astype(jnp.float32)
        routing = route(logits, real, cfg)
        self.sow("losses", "balance", cfg.balance_loss * balance_loss(logits, routing.experts, real))
        self.sow("losses", "router_z", cfg.router_z_loss * router_z_loss(logits, real))
        return self._combine(x, routing)

    def _combine(self, x: jax.Array, routing: Routing) -> jax.Array:
        """Sorts the tokens by expert, runs each expert on its own, and adds the results up."""
        B, T, D = x.shape
        E, k = self.cfg.num_experts, self.cfg.experts_per_token
        chosen = routing.experts.reshape(-1)
        order = jnp.argsort(chosen, stable=True)
        sizes = jnp.bincount(chosen, length=E).astype(jnp.int32)
        tokens = x.reshape(B * T, D)[order // k].astype(self.cfg.dtype)
        results = self._experts(tokens, sizes, chosen[order])
        weighted = results.astype(jnp.float32) * routing.weights.reshape(-1)[order][:, None]
        out = jnp.zeros((B * T, D)).at[order // k].add(weighted)
        return out.reshape(B, T, D).astype(x.dtype)

    def _experts(self, tokens: jax.Array, sizes: jax.Array, experts: jax.Array) -> jax.Array:
        """tokens [M, D], sorted by expert; `sizes` int32 [E] of each; their experts int [M] -> [M, D]."""
        cfg = self.cfg
        activation = kinds.load(kinds.ACTIVATIONS, cfg.activation)
        hidden = self._linear("expand", cfg.dim, cfg.ffn_dim, tokens, sizes, experts)
        if cfg.expert_gated:
            hidden = hidden * activation(self._linear("gate", cfg.dim, cfg.ffn_dim, tokens, sizes, experts))
        else:
            hidden = activation(hidden)
        return self._linear("contract", cfg.ffn_dim, cfg.dim, hidden, sizes, experts)

    def _linear(self, name: str, fan_in: int, fan_out: int, x, sizes, experts) -> jax.Array:
        """One affine map an expert: [M, fan_in] -> [M, fan_out]."""
        cfg, ends = self.cfg, name == "contract"
        names = (axes.MLP, axes.EMBED) if ends else (axes.EMBED, axes.MLP)
        init = named(kernel_initializer(cfg, fan_in, fan_out, ends_sublayer=ends), axes.EXPERTS, *names)
        dtype = jnp.dtype(cfg.param_dtype)
        kernel = self.param(f"{name}_kernel", init, (cfg.num_experts, fan_in, fan_out), dtype)
        y = jax.lax.ragged_dot(x, kernel.astype(x.dtype), sizes)
        if cfg.ffn_bias:
            zeros = named(nn.initializers.zeros, axes.EXPERTS, names[1])
            y = y + self.param(f"{name}_bias", zeros, (cfg.num_experts, fan_out), dtype).astype(x.dtype)[experts]
        return y


def route(logits: jax.Array, real: jax.Array, cfg: ModelConfig) -> Routing:
    """The most probable experts of each token: logits float32 [B, T, E], real tokens bool [B, T].

    With `cfg.expert_capacity` c, an expert reads at most `ceil(c * k * T / E)` tokens of a row: first choices before
    second ones, then in order of position ("GShard", 2020).
    """
    k = cfg.experts_per_token
    weights, experts = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), k)
    if cfg.router_normalize:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    kept = jnp.broadcast_to(real[..., None], weights.shape)
    if cfg.expert_capacity is not None:
        room = math.ceil(cfg.expert_capacity * k * logits.shape[1] / cfg.num_experts)
        kept = kept & (_place_in_queue(experts, real, cfg.num_experts) < room)
    return Routing(experts, jnp.where(kept, weights, 0))


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
