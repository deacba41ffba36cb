"""Mixture of experts: a router sends each token to k of E feed-forward networks."""

from fractions import Fraction
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from tformer_jax import axes
from tformer_jax.config import ModelConfig
from tformer_jax.config.kinds import Limit
from tformer_jax.nn.experts import AXES, mixture
from tformer_jax.nn.ffn import make_dense
from tformer_jax.nn.linear import kernel_initializer, residual_factor
from tformer_jax.nn.module import Module
from tformer_jax.nn.positions import token_positions
from tformer_jax.nn.sharding import named


class Routing(NamedTuple):
    """The k experts of each token, and their weights."""

    experts: jax.Array
    """int32 [B, T, k], most probable first."""
    weights: jax.Array
    """float32 [B, T, k]: factors of the experts' outputs; 0 for padding and for tokens beyond an expert's capacity."""


class MixtureOfExperts(Module):
    """Computes `sum_i weight_i * expert_i(x)` over the `cfg.moe.experts_per_token` most probable experts of each token.

    With `cfg.moe.shared_dim`, `shared(x)` is added, an expert that every token uses ("DeepSeekMoE", 2024), or
    `sigmoid(w x) * shared(x)` with `cfg.moe.shared_gate` ("Qwen2 Technical Report", 2024).

    See "Outrageously Large Neural Networks" (2017). The load-balance loss of "Switch Transformers" (2021) and the
    router z-loss of "ST-MoE" (2022) are sown, weighted, into the collection "losses". `cfg.moe.expert_capacity`
    drops tokens in training only, as in "DeepSeek-V2" (2024, section 3.1.2).

    The router and its bias are float32 with any `cfg.param_dtype`: rounding them would change the choice of experts.
    """

    cfg: ModelConfig
    experts: ClassVar[bool] = True
    settings: ClassVar[tuple[str, ...]] = ("moe",)
    limits: ClassVar[tuple[Limit, ...]] = (
        Limit("model.ffn_dropout", (0.0,), "is not applied to experts"),
        Limit("model.parameterization", ("standard",), "has no rule for routers"),
        Limit("model.quantization", (None,), "kernels of experts are not quantized"),
    )

    @staticmethod
    def check(cfg: ModelConfig) -> None:
        """Raises `ConfigError` if a stack has no experts, or cannot be scanned."""
        if cfg.scan_layers and cfg.moe.dense_layers:
            raise cfg.error(
                "scan_layers",
                "cannot scan over layers that differ: the first model.moe.dense_layers have no experts; write False",
            )
        for depth in cfg.depths:
            if depth and not any(map(cfg.has_experts, range(depth))):
                name = "every" if cfg.moe.every > depth else "dense_layers"
                raise cfg.error(
                    f"moe.{name}", f"leaves none of the {depth} layers with experts; write a smaller number"
                )

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        padding_mask: jax.Array | None = None,
        *,
        segments: jax.Array | None = None,
        train: bool = False,
    ) -> jax.Array:
        """Applies the chosen experts, none to padding, and the shared one: x [B, T, D] -> [B, T, D].

        Args:
            padding_mask: bool [B, T], True for tokens that are not padding; None: all.
            segments: int [B, T], segment ids of documents packed into a row; the capacity applies to each document.
            train: enforce `cfg.moe.expert_capacity`.
        """
        cfg = self.cfg
        if padding_mask is None:
            padding_mask = jnp.ones(x.shape[:2], bool)
        init = named(kernel_initializer(cfg, cfg.dim, cfg.moe.num_experts), axes.EMBED, None)
        router = self.param("router", init, (cfg.dim, cfg.moe.num_experts), jnp.float32)
        logits = jnp.matmul(x.astype(jnp.float32), router, precision="highest")
        bias = None
        if cfg.moe.router_bias != "none":
            zeros = named(nn.initializers.zeros, None)
            bias = self.param("router_bias", zeros, (cfg.moe.num_experts,), jnp.float32)
        if bias is not None and cfg.moe.router_bias == "logits":
            logits, bias = logits + bias, None
        limited = train and cfg.moe.expert_capacity is not None
        routing = route(logits, padding_mask, cfg, bias, segments=segments, limited=limited)
        scores = jax.nn.log_sigmoid(logits) if cfg.moe.router_scores == "sigmoid" else logits
        self.sow("losses", "balance", cfg.moe.balance_loss * balance_loss(scores, routing.experts, padding_mask))
        self.sow("losses", "router_z", cfg.moe.router_z_loss * router_z_loss(logits, padding_mask))
        max_tokens = int(capacity(cfg, x.shape[1])[-1]) if limited and segments is None else x.shape[1]
        out = mixture(self._parameters(), x, *routing, max_tokens, cfg)
        return (out if cfg.moe.shared_dim is None else out + self._shared(x, train=train)).astype(x.dtype)

    def _shared(self, x: jax.Array, *, train: bool) -> jax.Array:
        """Applies the shared expert, [B, T, D] -> [B, T, D]."""
        cfg = self.cfg
        out: jax.Array = make_dense(cfg, cfg.moe.shared_dim, name="shared")(x, train=train)
        if not cfg.moe.shared_gate:
            return out
        init = named(kernel_initializer(cfg, cfg.dim, 1), axes.EMBED, None)
        gate = self.param("shared_gate", init, (cfg.dim, 1), jnp.dtype(cfg.param_dtype))
        return out * jax.nn.sigmoid(x.astype(jnp.float32) @ gate.astype(jnp.float32))

    def _parameters(self) -> dict[str, jax.Array]:
        """Creates the experts' parameters, named as in `experts.AXES`."""
        cfg, params = self.cfg, {}
        factor = residual_factor(cfg, self.path)
        D, F, dtype = cfg.dim, cfg.ffn_dim, jnp.dtype(cfg.param_dtype)
        sizes = {"expand": (D, F)} | ({"gate": (D, F)} if cfg.moe.expert_gated else {}) | {"contract": (F, D)}
        for name, size in sizes.items():
            kernel, bias = f"{name}_kernel", f"{name}_bias"
            init = named(kernel_initializer(cfg, *size, factor if name == "contract" else 1.0), *AXES[kernel])
            params[kernel] = self.param(kernel, init, (cfg.moe.num_experts, *size), dtype)
            if cfg.ffn_bias:
                zeros = named(nn.initializers.zeros, *AXES[bias])
                params[bias] = self.param(bias, zeros, (cfg.moe.num_experts, size[1]), dtype)
        return params


def capacity(cfg: ModelConfig, T: int) -> np.ndarray:
    """Returns the capacity of one expert for the first n tokens, int32 [T + 1], n = 0..T: `min(ceil(c k n / E), n)`.

    c is `cfg.moe.expert_capacity` as a decimal number, not rounded to binary; k is `cfg.moe.experts_per_token`.
    """
    tokens = np.arange(T + 1)
    c = Fraction(cfg.moe.expert_capacity or 0).limit_denominator(10**6)
    slots = -(-c.numerator * cfg.moe.experts_per_token * tokens // (c.denominator * cfg.moe.num_experts))
    return np.minimum(slots, tokens).astype(np.int32)


def route(
    logits: jax.Array,
    padding_mask: jax.Array,
    cfg: ModelConfig,
    bias: jax.Array | None = None,
    *,
    segments: jax.Array | None = None,
    limited: bool = False,
) -> Routing:
    """Selects the experts of each token with the highest scores: logits float32 [B, T, E], padding_mask bool [B, T].

    The choice adds `bias` [E] to the scores, the weights do not ("DeepSeek-V3", 2024, section 2.1.2); it is limited to
    `cfg.moe.groups_per_token` groups of experts ("DeepSeek-V2", 2024, section 2.2.2).

    If `limited`, an expert drops a token that would exceed its `capacity` for the document's tokens so far. Tokens are
    accepted in order of position, so that routing does not depend on later tokens, padding, other documents or other
    rows; "GShard" (2020) accepts all first choices before second ones.
    """
    moe = cfg.moe
    scores = jax.nn.sigmoid(logits) if moe.router_scores == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    ranked = scores if bias is None else scores + jax.lax.stop_gradient(bias)
    chosen = _top(_in_best_groups(ranked, cfg), moe.experts_per_token)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if moe.router_normalize:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    weights = weights if moe.router_factor == 1 else weights * moe.router_factor
    accepted = jnp.broadcast_to(padding_mask[..., None], weights.shape)
    if limited:
        accepted = accepted & jnp.take_along_axis(_has_capacity(chosen, padding_mask, segments, cfg), chosen, axis=-1)
    return Routing(chosen, jnp.where(accepted, weights, 0))


def _in_best_groups(scores: jax.Array, cfg: ModelConfig) -> jax.Array:
    """Returns the scores [..., E] with -inf outside of the best groups."""
    moe = cfg.moe
    if moe.groups == moe.groups_per_token:
        return scores
    by_group = scores.reshape(*scores.shape[:-1], moe.groups, -1)
    best = jnp.take_along_axis(by_group, _top(by_group, moe.group_top), axis=-1).sum(axis=-1)
    chosen = jax.nn.one_hot(_top(best, moe.groups_per_token), moe.groups).any(axis=-2)
    return jnp.where(chosen[..., None], by_group, -jnp.inf).reshape(scores.shape)


def _top(scores: jax.Array, k: int) -> jax.Array:
    """Equals the indices of `jax.lax.top_k` of [..., E], which would gather all rows of a batch on a mesh."""
    left, chosen = scores, []
    for _ in range(k):
        chosen.append(left.argmax(axis=-1).astype(jnp.int32))
        left = jnp.where(jnp.arange(left.shape[-1]) == chosen[-1][..., None], -jnp.inf, left)
    return jnp.stack(chosen, axis=-1)


def _has_capacity(
    chosen: jax.Array, padding_mask: jax.Array, segments: jax.Array | None, cfg: ModelConfig
) -> jax.Array:
    """Returns whether each expert has capacity for each token: chosen int [B, T, k] -> bool [B, T, E].

    A(n) of the first n tokens choose an expert of capacity C(n). It accepts a(n) = min(a(n-1) + A(n) - A(n-1), C(n)),
    which equals A(n) + min(0, C(1) - A(1), ..., C(n) - A(n)): token n is accepted unless its term is a new minimum.
    """
    T, indices = padding_mask.shape[1], jnp.arange(padding_mask.shape[1])
    first = indices - token_positions(T, segments)
    requested = jax.nn.one_hot(chosen, cfg.moe.num_experts, dtype=jnp.int32).sum(axis=2) * padding_mask[..., None]

    def since_first(counts: jax.Array) -> jax.Array:
        total = jnp.cumsum(counts, axis=1)
        before = jnp.broadcast_to(first[..., None], (*counts.shape[:2], 1))
        return total - jnp.take_along_axis(total - counts, before, axis=1)

    tokens = since_first(padding_mask.astype(jnp.int32)[..., None])
    spare = jnp.asarray(capacity(cfg, T))[tokens] - since_first(requested)
    falling = first[..., None]  # spare is at least minus the document's length: terms of earlier documents are >= 0
    least = jax.lax.cummin(spare - falling, axis=1)
    least = jnp.pad(least[:, :-1], ((0, 0), (1, 0), (0, 0)), constant_values=T)
    return spare >= jnp.minimum(least + falling, 0)


def balance_loss(logits: jax.Array, experts: jax.Array, padding_mask: jax.Array) -> jax.Array:
    """Computes `E * sum_e f_e P_e` from the fraction f_e of choices and mean probability P_e of each expert e.

    A float32 scalar, 1 for uniform use of all experts ("Switch Transformers", 2021, equation 4, for any k).
    """
    E, k = logits.shape[-1], experts.shape[-1]
    count = jnp.maximum(padding_mask.sum(), 1)
    weights = padding_mask.astype(jnp.float32)[..., None]
    probability = (jax.nn.softmax(logits, axis=-1) * weights).sum(axis=(0, 1)) / count
    share = (jax.nn.one_hot(experts, E).sum(axis=2) * weights).sum(axis=(0, 1)) / (count * k)
    return E * (share * probability).sum()


def router_z_loss(logits: jax.Array, padding_mask: jax.Array) -> jax.Array:
    """Computes the mean of `logsumexp(logits)^2` over real tokens ("ST-MoE", 2022, equation 5), a float32 scalar."""
    z = jax.nn.logsumexp(logits, axis=-1)
    return jnp.where(padding_mask, z * z, 0).sum() / jnp.maximum(padding_mask.sum(), 1)
