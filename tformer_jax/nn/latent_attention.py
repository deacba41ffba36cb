"""Multi-head latent attention ("DeepSeek-V2", 2024, section 2.1)."""

from typing import Any, ClassVar

import flax
import jax
import jax.numpy as jnp

from tformer_jax import axes
from tformer_jax.config import ModelConfig
from tformer_jax.config.kinds import Limit
from tformer_jax.nn.attention_ops import Operands, attend
from tformer_jax.nn.attention_positions import PositionTerms
from tformer_jax.nn.cached_attention import attend_with_cache
from tformer_jax.nn.kv_cache import Stored, TokenCache
from tformer_jax.nn.linear import Linear, query_factor
from tformer_jax.nn.masks import Mask, as_mask
from tformer_jax.nn.module import Module, check_vectors, watch
from tformer_jax.nn.norms import make_norm
from tformer_jax.nn.sharding import constrain
from tformer_jax.nn.slots import Slots


@flax.struct.dataclass
class Latents(TokenCache):
    """What one layer stores per token, for all heads: the latent [B, 1, S, C] and the rotated key [B, 1, S, R]."""

    latent: Stored
    rotated: Stored

    @classmethod
    def empty(cls, cfg: ModelConfig, rows: int, slots: int) -> "Latents":
        """Returns zeros of `cfg.dtype`."""
        sizes = cfg.mla.latent_dim, cfg.mla.rotary_dim
        return cls(*(jnp.zeros((rows, 1, slots, size), cfg.dtype) for size in sizes))

    def unpack(self, dtype: str) -> tuple[jax.Array, jax.Array]:
        """Returns [B, S, 1, C + R] twice: as keys, and as values; callers use the first C features of the values."""
        both = jnp.concatenate([self.latent.astype(dtype), self.rotated.astype(dtype)], axis=-1)
        entries = jnp.swapaxes(both, 1, 2)
        return entries, entries


class LatentAttention(Module):
    """Attention whose keys and values are projections of one latent per token, `c = norm(x W_c)` of size C.

    The key of head n is `[c W_k[n], r]`, its value `c W_v[n]`. Only the R features of r, which all heads share, are
    rotated by position. Queries are projections of x, or of a latent of their own.

    Without a cache, keys and values are computed ("expanded"). With a cache, which stores only c and r, queries attend
    to latents: `q . (c W_k) = (q W_k^T) . c`, and `W_v` is applied to the weighted sum of latents ("absorbed").
    """

    cfg: ModelConfig
    cross: bool = False
    cache: ClassVar[type[TokenCache]] = Latents
    settings: ClassVar[tuple[str, ...]] = ("mla", "attention_scale", "attention_softcap", "attention_dropout")
    limits: ClassVar[tuple[Limit, ...]] = (
        Limit("model.parameterization", ("standard",), "has no rule for latents"),
        Limit("model.quantization", (None,), "queries are multiplied by kernels in their own dtype"),
    )
    absorbed: ClassVar[tuple[str, ...]] = ("key", "value")
    """Layers whose kernels are multiplied by queries and by sums of latents, in `cfg.dtype`."""

    @staticmethod
    def rotated_size(cfg: ModelConfig) -> int:
        """Returns R, the number of features of a head that rotary positions turn."""
        return cfg.mla.rotary_dim

    @staticmethod
    def score_size(cfg: ModelConfig) -> int:
        """Returns H + R, the size of queries and keys."""
        return cfg.head_size + cfg.mla.rotary_dim

    @staticmethod
    def value_size(cfg: ModelConfig) -> int:
        """Returns the size of a value head."""
        return cfg.mla.value_dim or cfg.head_size

    def setup(self) -> None:
        cfg, mla = self.cfg, self.cfg.mla
        model, latent = ((axes.EMBED, cfg.dim),), ((axes.EMBED, mla.latent_dim),)

        def heads(size: int) -> tuple[tuple[str, int], ...]:
            return (axes.HEADS, cfg.num_heads), (axes.HEAD_DIM, size)

        def linear(inputs: Any, outputs: Any, **options: Any) -> Linear:
            return Linear(cfg, inputs, outputs, use_bias=False, **options)

        queries = model
        if mla.query_latent_dim:
            self.query_latent = linear(model, ((axes.HEAD_DIM, mla.query_latent_dim),))
            self.query_latent_norm = make_norm(cfg)
            queries = ((axes.EMBED, mla.query_latent_dim),)
        self.query = linear(queries, heads(cfg.score_size), parts=((cfg.num_heads, query_factor(cfg)),))
        self.latent = linear(model, ((axes.HEAD_DIM, mla.latent_dim),))
        self.latent_norm = make_norm(cfg)
        self.rotated = linear(model, ((axes.HEAD_DIM, mla.rotary_dim),))
        self.key = linear(latent, heads(cfg.head_size))
        self.value = linear(latent, heads(cfg.value_size))
        self.output = linear(heads(cfg.value_size), model, ends_sublayer=True)

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array | None = None,
        *,
        mask: jax.Array | Mask | None = None,
        position: PositionTerms | None = None,
        cache: Latents | None = None,
        slots: Slots | None = None,
        train: bool = False,
    ) -> tuple[jax.Array, Latents]:
        """Attends from `query` [B, T, D] to `key` [B, S, D] (None: `query`); see `Attention.__call__`."""
        for name, x in (("query", query), ("key", key)):
            if x is not None:
                check_vectors(name, x, self.cfg.dim)
        q = self._queries(query, position)
        mask, bias = as_mask(mask), None if position is None else position.bias
        scale = self.cfg.score_scale or self.cfg.score_size**-0.5
        scoring: Any = {"scale": scale, "softcap": self.cfg.attention_softcap, "bias": bias}
        if self.cross and cache is not None:
            return self._absorbed(q, cache, cache, None, mask, scoring)
        new = self.keys_values(query if key is None else key, position)
        if cache is None or slots is None:
            return self._expanded(q, new, mask, scoring, train), new
        return self._absorbed(q, new, cache, slots, mask, scoring)

    def keys_values(self, key: jax.Array, position: PositionTerms | None = None) -> Latents:
        """Projects `key` [B, S, D] to what the cache stores."""
        latent, rotated = self.latent_norm(self.latent(key))[:, :, None], self.rotated(key)[:, :, None]
        if position is not None and position.rotation is not None:
            rotated = position.rotation(rotated)
        return Latents(jnp.swapaxes(latent, 1, 2), jnp.swapaxes(rotated, 1, 2))

    def _queries(self, x: jax.Array, position: PositionTerms | None) -> jax.Array:
        """Projects x [B, T, D] to queries [B, T, N, H + R], and rotates their last R features."""
        if self.cfg.mla.query_latent_dim:
            x = self.query_latent_norm(self.query_latent(x))
        q = self.query(x)
        if position is not None and position.rotation is not None:
            H = self.cfg.head_size
            q = jnp.concatenate([q[..., :H], position.rotation(q[..., H:])], axis=-1)
        return constrain(q, axes.BATCH, axes.LENGTH, axes.HEADS, None)

    def _expanded(self, q: jax.Array, new: Latents, mask: Mask, scoring: Any, train: bool) -> jax.Array:
        """Attends with one key and one value per head, padded to the same size, which every backend supports."""
        cfg = self.cfg
        latent, shared = jnp.asarray(new.latent)[:, 0], jnp.swapaxes(jnp.asarray(new.rotated), 1, 2)
        k, v = self.key(latent), self.value(latent)
        k = jnp.concatenate([k, jnp.broadcast_to(shared, (*k.shape[:3], shared.shape[-1]))], axis=-1)
        watch(self, operands=Operands.pack(q, k, v, mask, **scoring))
        size = max(cfg.score_size, cfg.value_size)
        q, k, v = (jnp.pad(x, [(0, 0)] * 3 + [(0, size - x.shape[-1])]) for x in (q, k, v))
        k, v = (constrain(x, axes.BATCH, axes.LENGTH, axes.HEADS, None) for x in (k, v))
        drop = train and cfg.attention_dropout > 0
        out = attend(
            q,
            k,
            v,
            mask,
            **scoring,
            backend=cfg.attention_backend,
            dropout_rate=cfg.attention_dropout,
            dropout_key=self.dropout_key() if drop else None,
        )
        return self.output(out[..., : cfg.value_size])

    def _absorbed(
        self, q: jax.Array, new: Latents, cache: Latents, slots: Slots | None, mask: Mask, scoring: Any
    ) -> tuple[jax.Array, Latents]:
        """Attends to the latents themselves, which are one key and value head for all queries; updates the cache.

        The backend is "auto": `cfg.attention_backend` need not support heads of size C + R.
        """
        cfg = self.cfg
        to_key, to_value = (part.variables["params"]["kernel"].astype(cfg.dtype) for part in (self.key, self.value))
        content = jnp.einsum("BTNH,CNH->BTNC", q[..., : cfg.head_size], to_key)
        q = jnp.concatenate([content, q[..., cfg.head_size :]], axis=-1)
        out, updated = attend_with_cache(q, new, cache, slots, mask, dtype=cfg.dtype, backend="auto", **scoring)
        return self.output(jnp.einsum("BTNC,CNH->BTNH", out[..., : cfg.mla.latent_dim], to_value)), updated
