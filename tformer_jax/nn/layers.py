"""One Transformer layer: sub-layers joined by residual connections."""

import dataclasses

import jax
from flax import linen as nn

from tformer_jax.config import ModelConfig
from tformer_jax.nn.attention import Attention
from tformer_jax.nn.dropout import Dropout
from tformer_jax.nn.ffn import FFN
from tformer_jax.nn.kv_cache import LayerCache
from tformer_jax.nn.norms import make_norm


class Residual(nn.Module):
    """The connection around a sub-layer f: `x + drop(f(norm(x)))` (pre) or `norm(x + drop(f(x)))` (post)."""

    cfg: ModelConfig

    def setup(self) -> None:
        self.norm = make_norm(self.cfg)
        self.dropout = Dropout(self.cfg.dropout)

    def enter(self, x: jax.Array) -> jax.Array:
        """What the sub-layer reads."""
        return self.norm(x) if self.cfg.norm_placement == "pre" else x

    def leave(self, x: jax.Array, y: jax.Array, *, train: bool) -> jax.Array:
        """Joins the sub-layer's result y with its input x."""
        joined = x + self.dropout(y, train=train)
        return joined if self.cfg.norm_placement == "pre" else self.norm(joined)


class TransformerLayer(nn.Module):
    """Self-attention, cross-attention to a memory where `cross`, and an FFN."""

    cfg: ModelConfig
    cross: bool = False

    def setup(self) -> None:
        self.self_attention = Attention(self.cfg)
        self.self_attention_residual = Residual(self.cfg)
        if self.cross:
            self.cross_attention = Attention(self.cfg, cross=True)
            self.cross_attention_residual = Residual(self.cfg)
        self.ffn = FFN(self.cfg)
        self.ffn_residual = Residual(self.cfg)

    def __call__(
        self,
        x: jax.Array,
        memory: jax.Array | None = None,
        *,
        mask: jax.Array | None = None,
        memory_mask: jax.Array | None = None,
        cache: LayerCache | None = None,
        index: jax.Array | int = 0,
        train: bool = False,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Applies the sub-layers in turn.

        Args:
            x: [B, T, D].
            memory: [B, S, D], the encoder's output; not needed when `cache` holds its keys and values.
            mask, memory_mask: bool, broadcastable to [B, N, T, T or the cache's length] and [B, N, T, S].
            cache: earlier keys and values; those of x are written from slot `index` on.

        Returns:
            [B, T, D], and the cache that holds x, where there is one.
        """
        h, keys_values = self.self_attention(
            self.self_attention_residual.enter(x),
            mask=mask,
            cache=cache.self_attention if cache else None,
            index=index,
            train=train,
        )
        x = self.self_attention_residual.leave(x, h, train=train)
        if self.cross:
            h, _ = self.cross_attention(
                self.cross_attention_residual.enter(x),
                memory,
                mask=memory_mask,
                cache=cache.cross_attention if cache else None,
                train=train,
            )
            x = self.cross_attention_residual.leave(x, h, train=train)
        h = self.ffn(self.ffn_residual.enter(x), train=train)
        x = self.ffn_residual.leave(x, h, train=train)
        return x, dataclasses.replace(cache, self_attention=keys_values) if cache else None
