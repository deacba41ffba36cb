"""The attention layer: projections around the pure core of `attention_ops`."""

import jax
from flax import linen as nn

from tformer_jax import axes
from tformer_jax.config import ConfigError, ModelConfig
from tformer_jax.nn.attention_ops import attend
from tformer_jax.nn.kv_cache import KeyValues
from tformer_jax.nn.linear import Linear


class Attention(nn.Module):
    """Multi-head, grouped-query (K < N) or multi-query (K = 1) attention, for self- and cross-attention.

    Queries, keys and values may come from three inputs. With `fused_qkv`, self-attention has one projection
    [D, N + 2K, H]; cross-attention, whose queries have another input, then fuses keys and values only.
    """

    cfg: ModelConfig
    cross: bool = False

    def setup(self) -> None:
        cfg = self.cfg
        N, K = cfg.num_heads, cfg.kv_heads
        if self._fused("fused_qkv"):
            self.qkv = self._project(axes.HEADS, N + 2 * K)
        else:
            self.query = self._project(axes.HEADS, N)
            if self._fused("fused_kv"):
                self.kv = self._project(axes.KV_HEADS, 2 * K)
            else:
                self.key = self._project(axes.KV_HEADS, K)
                self.value = self._project(axes.KV_HEADS, K)
        heads = ((axes.HEADS, N), (axes.HEAD_DIM, cfg.head_size))
        self.output = Linear(cfg, heads, ((axes.EMBED, cfg.dim),), cfg.attention_output_bias)

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array | None = None,
        value: jax.Array | None = None,
        *,
        mask: jax.Array | None = None,
        cache: KeyValues | None = None,
        index: jax.Array | int = 0,
        train: bool = False,
    ) -> tuple[jax.Array, KeyValues]:
        """Attends from `query` to `key` and `value`.

        Args:
            query: [B, T, D].
            key: [B, S, D]; None: `query`.
            value: [B, S, D]; None: `key`.
            mask: bool, broadcastable to [B, N, T, S]; True = may attend.
            cache: earlier keys and values. Those of this call are written at slot `index` (self-attention), or the
                cache is used as it is (cross-attention).
            train: drop attention weights.

        Returns:
            [B, T, D], and the keys and values that were attended to, as a cache for the next call.

        Raises:
            ConfigError: inputs differ that share one fused projection.
        """
        if self.cross and cache is not None:
            q, keys_values = self.query(query), cache
        elif self._fused("fused_qkv"):
            self._check_one_input(key, value)
            q, keys_values = self._split_qkv(self.qkv(query))
        else:
            q, keys_values = self.query(query), self.keys_values(query if key is None else key, value)
        if cache is not None and not self.cross:
            keys_values = cache.write(keys_values, index)
        drop = train and self.cfg.attention_dropout > 0
        out = attend(
            q,
            *keys_values.unpack(),
            mask,
            backend=self.cfg.attention_backend,
            dropout_rate=self.cfg.attention_dropout,
            dropout_key=self.make_rng("dropout") if drop else None,
        )
        return self.output(out), keys_values

    def keys_values(self, key: jax.Array, value: jax.Array | None = None) -> KeyValues:
        """Projects `key` and `value` (default: `key`), each [B, S, D]."""
        if self._fused("fused_kv"):
            self._check_one_input(value)
            both = self.kv(key)
            return KeyValues.pack(both[..., : self.cfg.kv_heads, :], both[..., self.cfg.kv_heads :, :])
        return KeyValues.pack(self.key(key), self.value(key if value is None else value))

    def _project(self, axis: str, heads: int) -> Linear:
        outputs = ((axis, heads), (axes.HEAD_DIM, self.cfg.head_size))
        return Linear(self.cfg, ((axes.EMBED, self.cfg.dim),), outputs, self.cfg.attention_bias)

    def _fused(self, kind: str) -> bool:
        """Whether this layer's projections are fused as `kind` says."""
        if self.cross and self.cfg.attention_projections == "fused_qkv":
            return kind == "fused_kv"
        return self.cfg.attention_projections == kind

    def _check_one_input(self, *others: jax.Array | None) -> None:
        if any(other is not None for other in others):
            raise ConfigError(
                f"model.attention_projections={self.cfg.attention_projections!r} projects one input; "
                "write 'separate' for queries, keys and values of their own"
            )

    def _split_qkv(self, qkv: jax.Array) -> tuple[jax.Array, KeyValues]:
        N, K = self.cfg.num_heads, self.cfg.kv_heads
        return qkv[..., :N, :], KeyValues.pack(qkv[..., N : N + K, :], qkv[..., N + K :, :])
