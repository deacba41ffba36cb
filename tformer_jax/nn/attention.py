"""Attention layers: projections around the pure functions of `attention_ops`."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer_jax import axes
from tformer_jax.base.errors import UserError
from tformer_jax.config import ModelConfig, kinds
from tformer_jax.config.kinds import Limit
from tformer_jax.config.layers import FUSED
from tformer_jax.nn.attention_positions import PositionTerms
from tformer_jax.nn.cached_attention import attend_with_cache
from tformer_jax.nn.kv_cache import KeyValues, TokenCache
from tformer_jax.nn.linear import Linear, query_factor
from tformer_jax.nn.masks import Mask
from tformer_jax.nn.module import Module, check_vectors
from tformer_jax.nn.norms import Norm, make_norm
from tformer_jax.nn.sharding import constrain, named
from tformer_jax.nn.slots import Slots


class Attention(Module):
    """Multi-head, grouped-query (K < N) or multi-query (K = 1) attention, for self- and cross-attention.

    Queries, keys and values may have three different inputs. With `fused_qkv`, self-attention has one projection
    [D, N + 2K, H]; cross-attention, whose queries have another input, fuses only keys and values.
    """

    cfg: ModelConfig
    cross: bool = False
    cache: ClassVar[type[TokenCache]] = KeyValues
    settings: ClassVar[tuple[str, ...]] = (
        "num_kv_heads",
        "attention_projections",
        "attention_bias",
        "attention_scale",
        "attention_softcap",
        "attention_sinks",
        "attention_gate",
        "attention_dropout",
        "qk_norm",
    )

    @staticmethod
    def check(cfg: ModelConfig) -> None:
        """Raises `ConfigError` if only some of the fused projections have a bias."""
        together = FUSED[cfg.attention_projections]
        if 0 < len({*together} & {*cfg.attention_bias}) < len(together):
            raise cfg.error(
                "attention_bias",
                f"must have all or none of {', '.join(together)} "
                f"for model.attention_projections={cfg.attention_projections!r}",
            )

    def setup(self) -> None:
        cfg = self.cfg
        N, K = cfg.num_heads, cfg.kv_heads
        if self._fused("fused_qkv"):
            self.qkv = self._project("query", axes.HEADS, (N, query_factor(cfg)), (K, 1.0), (K, 1.0))
        else:
            self.query = self._project("query", axes.HEADS, (N, query_factor(cfg)))
            if self._fused("fused_kv"):
                self.kv = self._project("key", axes.KV_HEADS, (K, 1.0), (K, 1.0))
            else:
                self.key = self._project("key", axes.KV_HEADS, (K, 1.0))
                self.value = self._project("value", axes.KV_HEADS, (K, 1.0))
        if cfg.qk_norm:
            self.query_norm = make_norm(cfg, axes.HEAD_DIM)
            self.key_norm = make_norm(cfg, axes.HEAD_DIM)
        if cfg.attention_sinks:
            zeros = named(nn.initializers.zeros, axes.HEADS)
            self.sinks = self.param("sinks", zeros, (N,), jnp.dtype(cfg.param_dtype))
        if cfg.attention_gate:
            self.head_gate = self._project("query", axes.HEADS, (N, 1.0))
        heads = ((axes.HEADS, N), (axes.HEAD_DIM, cfg.head_size))
        embed, bias = ((axes.EMBED, cfg.dim),), "output" in cfg.attention_bias
        self.output = Linear(cfg, heads, embed, bias, ends_sublayer=True)

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array | None = None,
        value: jax.Array | None = None,
        *,
        mask: jax.Array | Mask | None = None,
        position: PositionTerms | None = None,
        cache: KeyValues | None = None,
        slots: Slots | None = None,
        train: bool = False,
    ) -> tuple[jax.Array, KeyValues]:
        """Attends from `query` to `key` and `value`.

        Args:
            query: [B, T, D].
            key: [B, S, D]; None: `query`.
            value: [B, S, D]; None: `key`.
            mask: a `Mask`, or bool, broadcastable to [B, N, T, S]; True = may attend.
            position: rotates queries and keys (self-attention only), or adds a bias to their scores.
            cache: earlier keys and values; used unchanged if `slots` is None (cross-attention).
            slots: slots of `cache` to which the new keys and values are written (self-attention).
            train: apply dropout to the attention weights.

        Returns:
            [B, T, D], and the keys and values as a cache for the next call.

        Raises:
            UserError: an input has another shape; or a separate `key` or `value` is given, but a fused projection
                takes one input.
        """
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x is not None:
                check_vectors(name, x, self.cfg.dim)
        if self.cross and cache is not None:
            q, new = self.query(query), cache
        elif self._fused("fused_qkv"):
            self._check_one_input(key, value)
            q, new = self._split_qkv(self.qkv(query), position)
        else:
            q, new = self.query(query), self.keys_values(query if key is None else key, value, position)
        q = self._normalize_and_rotate(q, self.query_norm if self.cfg.qk_norm else None, position)
        q = constrain(q, axes.BATCH, axes.LENGTH, axes.HEADS, None)
        out, updated = attend_with_cache(
            q,
            new,
            cache,
            slots,
            mask,
            dtype=self.cfg.dtype,
            backend=self.cfg.attention_backend,
            watched=self,
            dropout_rate=self.cfg.attention_dropout,
            dropout_key=self.dropout_key() if train and self.cfg.attention_dropout > 0 else None,
            scale=self.cfg.score_scale,
            softcap=self.cfg.attention_softcap,
            bias=None if position is None else position.bias,
            sinks=self.sinks.astype(jnp.float32) if self.cfg.attention_sinks else None,
        )
        return self.output(self.transform_heads(out, query)), updated

    @nn.nowrap
    def transform_heads(self, heads: jax.Array, x: jax.Array) -> jax.Array:
        """Changes the outputs of the heads, [B, T, N, H], before their projection; here, by `cfg.attention_gate`.

        Subclasses gate or normalize them, given x [B, T, D], the input of the queries.
        """
        return heads * jax.nn.sigmoid(self.head_gate(x)) if self.cfg.attention_gate else heads

    def keys_values(
        self, key: jax.Array, value: jax.Array | None = None, position: PositionTerms | None = None
    ) -> KeyValues:
        """Projects `key` and `value` (default: `key`), each [B, S, D]; also normalizes and rotates the keys."""
        if self._fused("fused_kv"):
            self._check_one_input(value)
            both = self.kv(key)
            return self._pack(both[..., : self.cfg.kv_heads, :], both[..., self.cfg.kv_heads :, :], position)
        return self._pack(self.key(key), self.value(key if value is None else value), position)

    def _pack(self, k: jax.Array, v: jax.Array, position: PositionTerms | None) -> KeyValues:
        k = self._normalize_and_rotate(k, self.key_norm if self.cfg.qk_norm else None, position)
        k, v = (constrain(x, axes.BATCH, axes.LENGTH, axes.KV_HEADS, None) for x in (k, v))
        return KeyValues.pack(k, v)

    def _normalize_and_rotate(self, x: jax.Array, norm: Norm | None, position: PositionTerms | None) -> jax.Array:
        """Returns queries or keys [B, T, heads, H] after the norm that `cfg.qk_norm_over` places, and the rotation."""
        over = self.cfg.qk_norm_over
        if norm is not None and over != "rotated_heads":
            x = norm(x) if over == "heads" else norm(x.reshape(*x.shape[:2], -1)).reshape(x.shape)
        if position is not None and position.rotation is not None:
            x = position.rotation(x)
        return norm(x) if norm is not None and over == "rotated_heads" else x

    def _project(self, role: str, axis: str, *parts: tuple[int, float]) -> Linear:
        """Returns a projection to the heads of all parts: numbers of heads, and factors of initial values."""
        outputs = ((axis, sum(heads for heads, _ in parts)), (axes.HEAD_DIM, self.cfg.head_size))
        return Linear(self.cfg, ((axes.EMBED, self.cfg.dim),), outputs, role in self.cfg.attention_bias, parts=parts)

    def _fused(self, kind: str) -> bool:
        """Returns whether this layer's projections are fused as `kind` names."""
        if self.cross and self.cfg.attention_projections == "fused_qkv":
            return kind == "fused_kv"
        return self.cfg.attention_projections == kind

    def _check_one_input(self, *others: jax.Array | None) -> None:
        if any(other is not None for other in others):
            raise UserError(
                f"model.attention_projections={self.cfg.attention_projections!r} projects one input; "
                "write 'separate' to project different inputs"
            )

    def _split_qkv(self, qkv: jax.Array, position: PositionTerms | None) -> tuple[jax.Array, KeyValues]:
        N, K = self.cfg.num_heads, self.cfg.kv_heads
        return qkv[..., :N, :], self._pack(qkv[..., N : N + K, :], qkv[..., N + K :, :], position)


class BasicAttention(nn.Module):
    """Attention without parameters: `softmax(x x^T) x`, unscaled, with one head of size D."""

    cfg: ModelConfig
    cross: bool = False
    cache: ClassVar[type[TokenCache]] = KeyValues
    settings: ClassVar[tuple[str, ...]] = ("num_kv_heads",)
    limits: ClassVar[tuple[Limit, ...]] = (
        Limit("model.parameterization", ("standard",), "has no scale of the scores"),
    )

    @staticmethod
    def check(cfg: ModelConfig) -> None:
        """Raises `ConfigError` for several heads, or rotations."""
        if cfg.num_heads > 1 or cfg.head_size != cfg.dim:
            raise cfg.error("attention", "has no projections; write model.num_heads=1, model.head_dim=None")
        if cfg.position == "rotary":
            raise cfg.error("position", "rotates queries and keys, which model.attention='basic' does not project")

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array | None = None,
        value: jax.Array | None = None,
        *,
        mask: jax.Array | Mask | None = None,
        position: PositionTerms | None = None,
        cache: KeyValues | None = None,
        slots: Slots | None = None,
        train: bool = False,
    ) -> tuple[jax.Array, KeyValues]:
        """As `Attention.__call__`, without rotations and dropout; `key` and `value` may always differ from `query`."""
        new = cache if self.cross and cache is not None else self.keys_values(query if key is None else key, value)
        out, updated = attend_with_cache(
            query[:, :, None],
            new,
            cache,
            slots,
            mask,
            dtype=self.cfg.dtype,
            backend=self.cfg.attention_backend,
            watched=self,
            scale=1.0,
            bias=None if position is None else position.bias,
        )
        return out[:, :, 0], updated

    def keys_values(self, key: jax.Array, value: jax.Array | None = None) -> KeyValues:
        """Returns the inputs, each [B, S, D], as keys and values of one head."""
        return KeyValues.pack(key[:, :, None], (key if value is None else value)[:, :, None])


def make_attention(cfg: ModelConfig, kind: str, *, cross: bool = False) -> nn.Module:
    """Builds the attention module of a kind in `config.kinds.ATTENTIONS`."""
    attention: nn.Module = kinds.load(kinds.ATTENTIONS, kind)(cfg, cross)
    return attention
