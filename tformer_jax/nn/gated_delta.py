"""Gated DeltaNet ("Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024): a recurrent state per head.

H is the size of queries and keys, P the size of values, W the number of columns (beams) of a row.
"""

import math
from typing import Any, ClassVar, NamedTuple

import flax
import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer_jax import axes
from tformer_jax.config import ModelConfig
from tformer_jax.config.kinds import Limit
from tformer_jax.nn import delta_rule
from tformer_jax.nn.kv_cache import RowState
from tformer_jax.nn.linear import Linear, broadcast_like
from tformer_jax.nn.module import Module, check_vectors
from tformer_jax.nn.norms import rms_norm
from tformer_jax.nn.padding import PaddingLast
from tformer_jax.nn.sharding import constrain, named

UNIT_EPS = 1e-6
"""Added to the squared norm of a query or key, inside the square root that it is divided by."""
A_RANGE, DT_RANGE = (1.0, 16.0), (1e-3, 1e-1)
"""Ranges of the initial `exp(A_log)` and `softplus(dt_bias)`, as in Mamba-2 (2024)."""


class Sizes(NamedTuple):
    """Resolved settings of `model.gated_delta`."""

    num_heads: int
    num_key_heads: int
    key_head_dim: int
    value_head_dim: int

    @classmethod
    def resolve(cls, cfg: ModelConfig) -> "Sizes":
        """Replaces None by the sizes of the model's attention heads."""
        settings = cfg.gated_delta
        N, H, P = settings.num_heads or cfg.num_heads, settings.key_head_dim, settings.value_head_dim
        return cls(N, settings.num_key_heads or N, H or cfg.head_size, P or cfg.head_size)


@flax.struct.dataclass
class DeltaState(RowState):
    """State of one layer: the last tokens that the convolutions read, and one matrix per head."""

    queries: jax.Array
    """[B, W, K, conv_kernel_size - 1, H], before the convolution; zeros before the first token."""
    keys: jax.Array
    values: jax.Array
    """[B, W, N, conv_kernel_size - 1, P]."""
    recurrent_state: jax.Array
    """float32 [B, W, N, H, P]."""

    @classmethod
    def empty(cls, cfg: ModelConfig, rows: int, width: int) -> "DeltaState":
        """Returns the state before the first token, of `width` columns per row."""
        N, K, H, P = Sizes.resolve(cfg)
        tails = [(heads, cfg.gated_delta.conv_kernel_size - 1, size) for heads, size in ((K, H), (K, H), (N, P))]
        queries, keys, values = (jnp.zeros((rows, width, *shape), cfg.dtype) for shape in tails)
        return cls(queries, keys, values, jnp.zeros((rows, width, N, H, P), jnp.float32))


class ConvolvedHeads(Module):
    """Projection to heads, a causal convolution of each feature over `conv_kernel_size` tokens, and SiLU."""

    cfg: ModelConfig
    axis: str
    heads: int
    size: int

    @nn.compact
    def __call__(
        self, x: jax.Array, tail: jax.Array, count: jax.Array, segments: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Computes the heads of x.

        Args:
            x: [B, T, D], with padding at the end of each row.
            tail: [B, heads, conv_kernel_size - 1, size], projections of the tokens before x.
            count: int32 [B], number of tokens of x that are not padding.
            segments: int [B, T]; a convolution stays within its segment.

        Returns:
            [B, T, heads, size], and the tail of the next tokens.
        """
        cfg, T, taps = self.cfg, x.shape[1], self.cfg.gated_delta.conv_kernel_size
        outputs = (self.axis, self.heads), (axes.HEAD_DIM, self.size)
        projected = Linear(cfg, ((axes.EMBED, cfg.dim),), outputs, use_bias=False, name="project")(x)
        init, shape = named(_conv_kernel, None, self.axis, axes.HEAD_DIM), (taps, self.heads, self.size)
        kernel = self.param("conv_kernel", init, shape, jnp.dtype(cfg.param_dtype))
        tokens = jnp.concatenate([jnp.swapaxes(tail, 1, 2).astype(projected.dtype), projected], axis=1)
        out = jnp.zeros_like(projected)
        for weights, back in zip(kernel, range(taps - 1, -1, -1), strict=True):
            part = tokens[:, taps - 1 - back : taps - 1 - back + T]
            if segments is not None:
                source = jnp.pad(segments, ((0, 0), (back, 0)), constant_values=-1)[:, :T]
                part = jnp.where((source == segments)[..., None, None], part, 0)
            out += broadcast_like(weights, part) * part
        last = count[:, None] + jnp.arange(taps - 1)
        tail = jnp.take_along_axis(tokens, last[..., None, None], axis=1)
        return constrain(nn.silu(out), axes.BATCH, axes.LENGTH, self.axis, None), jnp.swapaxes(tail, 1, 2)


class GatedDelta(Module):
    """The gated delta rule with L2-normalized queries and keys, and a gated RMS norm of each head.

    A token's decay is `exp(-exp(A_log) softplus(x W_decay + dt_bias))`, and its `beta` is `sigmoid(x W_beta)`.
    `A_log` and `scale` are float32 with any `cfg.param_dtype`, as Qwen3.5 stores them.
    """

    cfg: ModelConfig
    cross: bool = False
    cache: ClassVar[type[RowState]] = DeltaState
    settings: ClassVar[tuple[str, ...]] = ("gated_delta",)
    limits: ClassVar[tuple[Limit, ...]] = (
        Limit("model.family", ("decoder_lm",), "a recurrent state only reads earlier tokens"),
        Limit("model.prefix_lm", (False,), "a recurrent state only reads earlier tokens"),
        Limit("model.parameterization", ("standard",), "has no rule for recurrent states"),
        Limit("model.window", (None,), "a recurrent state has no window", lifted=True),
        Limit("model.attention_backend", ("auto", "reference"), "a recurrence has one implementation", lifted=True),
        Limit(
            "model.position",
            ("none", "sinusoidal", "sinusoidal_halves", "sinusoidal_fairseq", "learned"),
            "a recurrence has no scores",
            lifted=True,
        ),
    )

    @staticmethod
    def check(cfg: ModelConfig) -> None:
        """Raises `ConfigError` if value heads cannot be grouped by query and key heads."""
        N, K, _, _ = Sizes.resolve(cfg)
        if N % K:
            raise cfg.error("gated_delta.num_key_heads", f"must divide the {N} value heads")

    def setup(self) -> None:
        cfg, model = self.cfg, ((axes.EMBED, self.cfg.dim),)
        N, K, H, P = Sizes.resolve(cfg)
        heads, dtype = ((axes.HEADS, N), (axes.HEAD_DIM, P)), jnp.dtype(cfg.param_dtype)
        self.queries, self.keys = (ConvolvedHeads(cfg, axes.KV_HEADS, K, H) for _ in range(2))
        self.values = ConvolvedHeads(cfg, axes.HEADS, N, P)
        self.decay, self.beta = (Linear(cfg, model, heads[:1], use_bias=False) for _ in range(2))
        self.gate = Linear(cfg, model, heads, use_bias=False)
        self.A_log = self.param("A_log", named(_a_log, axes.HEADS), (N,), jnp.float32)
        self.dt_bias = self.param("dt_bias", named(_dt_bias, axes.HEADS), (N,), dtype)
        self.scale = self.param("scale", named(nn.initializers.ones, axes.HEAD_DIM), (P,), jnp.float32)
        self.output = Linear(cfg, heads, model, use_bias=False, ends_sublayer=True)

    def __call__(
        self,
        x: jax.Array,
        *,
        padding_mask: jax.Array | None = None,
        segments: jax.Array | None = None,
        parents: jax.Array | None = None,
        cache: DeltaState | None = None,
        train: bool = False,
    ) -> tuple[jax.Array, DeltaState | None]:
        """Mixes x [B, T, D] with the tokens before it.

        Args:
            padding_mask: bool [B, T], True for tokens that are not padding, which comes last unless `cache` is given.
            segments: int [B, T], as for `Decoder`; only without a cache.
            parents: int32 [B, T]: the tokens of a row are beams, which continue these columns of the cache.
            cache: the state before x, which is read from column 0 without `parents`; None: zeros.

        Returns:
            [B, T, D], and the state after x: of each beam, or in column 0; None without a cache.
        """
        check_vectors("x", x, self.cfg.dim)
        B, T, _ = x.shape
        real = jnp.ones((B, T), bool) if padding_mask is None else padding_mask
        if cache is None:
            first = jax.tree.map(lambda leaf: leaf[:, 0], DeltaState.empty(self.cfg, B, 1))
            return self._mix(x, real, segments, first)[0], None
        if parents is not None:
            states = jax.tree.map(
                lambda leaf: leaf[jnp.arange(B)[:, None], parents].reshape(-1, *leaf.shape[2:]), cache
            )
            out, states = self._mix(x.reshape(B * T, 1, -1), real.reshape(B * T, 1), None, states)
            return out.reshape(x.shape), jax.tree.map(lambda leaf: leaf.reshape(B, T, *leaf.shape[1:]), states)
        rows = PaddingLast(real, right_padded=T == 1)
        first = jax.tree.map(lambda leaf: leaf[:, 0], cache)
        out, first = self._mix(rows.sort(x), rows.sort(real), None, first)
        return rows.restore(out), jax.tree.map(lambda leaf, new: leaf.at[:, 0].set(new), cache, first)

    def _mix(self, x: jax.Array, real: jax.Array, segments: jax.Array | None, state: Any) -> tuple[jax.Array, Any]:
        """Runs the tokens in order from a state without the axis W; `real` is False for padding, at the end."""
        N, K, H, _ = Sizes.resolve(self.cfg)
        count = real.sum(axis=1, dtype=jnp.int32)
        q, queries = self.queries(x, state.queries, count, segments)
        k, keys = self.keys(x, state.keys, count, segments)
        v, values = self.values(x, state.values, count, segments)
        q, k = (jnp.repeat(_unit(part), N // K, axis=2) for part in (q, k))
        softplus = jax.nn.softplus(self.decay(x).astype(jnp.float32) + self.dt_bias.astype(jnp.float32))
        log_decay = -jnp.exp(self.A_log) * softplus
        beta = jax.nn.sigmoid(self.beta(x).astype(jnp.float32))
        log_decay, beta = (jnp.where(real[..., None], part, 0) for part in (log_decay, beta))
        tokens = q / math.sqrt(H), k, v.astype(jnp.float32), log_decay, beta
        if x.shape[1] == 1:
            q, k, v, log_decay, beta = (part[:, 0] for part in tokens)
            out, recurrent = delta_rule.step(q, k, v, log_decay, beta, state.recurrent_state)
            out = out[:, None]
        else:
            out, recurrent = delta_rule.full_pass(*tokens, state.recurrent_state, segments)
        gated = rms_norm(out, self.scale, self.cfg.norm_eps) * nn.silu(self.gate(x).astype(jnp.float32))
        return self.output(gated), DeltaState(queries, keys, values, recurrent)


def _unit(x: jax.Array) -> jax.Array:
    """Divides each head [..., H] by its length, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt((x * x).sum(axis=-1, keepdims=True) + UNIT_EPS)


def _conv_kernel(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    bound = shape[0] ** -0.5
    return jax.random.uniform(key, shape, dtype, -bound, bound)


def _a_log(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    low, high = A_RANGE
    return jnp.log(jax.random.uniform(key, shape, minval=low, maxval=high)).astype(dtype)


def _dt_bias(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns the inverses of softplus of log-uniform values."""
    low, high = map(math.log, DT_RANGE)
    dt = jnp.exp(jax.random.uniform(key, shape, minval=low, maxval=high))
    return (dt + jnp.log(-jnp.expm1(-dt))).astype(dtype)
