"""One Transformer layer: sub-layers joined by residual connections."""

import dataclasses

import flax
import jax
from flax import linen as nn

from tformer_jax import axes
from tformer_jax.config import ModelConfig
from tformer_jax.nn.attention import make_attention
from tformer_jax.nn.dropout import Dropout
from tformer_jax.nn.ffn import make_ffn
from tformer_jax.nn.kv_cache import LayerCache
from tformer_jax.nn.masks import Mask
from tformer_jax.nn.norms import make_norm
from tformer_jax.nn.relative import AttentionPosition
from tformer_jax.nn.sharding import constrain
from tformer_jax.nn.slots import Slots


@flax.struct.dataclass
class LayerContext:
    """What all layers of a stack read besides x [B, T, D]."""

    masks: dict[str, Mask]
    """Of self-attention, for each kind of layer, "full" and "window"."""
    real: jax.Array | None = None
    """bool [B, T]: tokens of x that are not padding; None: all."""
    segments: jax.Array | None = None
    """int [B, T]: documents packed into a row; None: one."""
    positions: dict[str, AttentionPosition] = dataclasses.field(default_factory=dict)
    """For each kind of layer that uses positions in attention."""
    memory: jax.Array | None = None
    """[B, S, D]: the encoder's output; not needed where a cache holds its keys and values."""
    memory_mask: Mask = Mask()
    """Of cross-attention."""
    slots: dict[str, Slots] = dataclasses.field(default_factory=dict)
    """For each kind of layer, where the keys and values of x are put, where there is a cache."""


class Residual(nn.Module):
    """The connection around a sub-layer f, by `cfg.norm_placement`.

    pre: `x + drop(f(norm(x)))`; post: `norm(x + drop(f(x)))`; both: `x + drop(norm(f(norm(x))))`.
    """

    cfg: ModelConfig

    def setup(self) -> None:
        self.norm = make_norm(self.cfg)
        if self.cfg.norm_placement == "both":
            self.norm_after = make_norm(self.cfg)
        self.dropout = Dropout(self.cfg.dropout)

    def enter(self, x: jax.Array) -> jax.Array:
        """What the sub-layer reads."""
        return x if self.cfg.norm_placement == "post" else self.norm(x)

    def leave(self, x: jax.Array, y: jax.Array, *, train: bool) -> jax.Array:
        """Joins the sub-layer's result y with its input x."""
        if self.cfg.norm_placement == "both":
            y = self.norm_after(y)
        joined = x + self.dropout(y, train=train)
        joined = constrain(joined, axes.BATCH, axes.LENGTH, None)
        return self.norm(joined) if self.cfg.norm_placement == "post" else joined


class TransformerLayer(nn.Module):
    """Self-attention (to the last `cfg.window` tokens where `kind` is "window"), cross-attention, and an FFN."""

    cfg: ModelConfig
    cross: bool = False
    kind: str = "full"

    def setup(self) -> None:
        self.self_attention = make_attention(self.cfg)
        self.self_attention_residual = Residual(self.cfg)
        if self.cross:
            self.cross_attention = make_attention(self.cfg, cross=True)
            self.cross_attention_residual = Residual(self.cfg)
        self.ffn = make_ffn(self.cfg)
        self.ffn_residual = Residual(self.cfg)

    def __call__(
        self, x: jax.Array, ctx: LayerContext, cache: LayerCache | None = None, *, train: bool = False
    ) -> tuple[jax.Array, LayerCache | None]:
        """Applies the sub-layers in turn.

        Args:
            x: [B, T, D].
            ctx: masks, positions and memory.
            cache: earlier keys and values; those of x are put where `ctx.slots` says.

        Returns:
            [B, T, D], and the cache that holds x, where there is one.
        """
        h, keys_values = self.self_attention(
            self.self_attention_residual.enter(x),
            mask=ctx.masks[self.kind],
            position=ctx.positions.get(self.kind),
            cache=cache.self_attention if cache else None,
            slots=ctx.slots.get(self.kind),
            train=train,
        )
        x = self.self_attention_residual.leave(x, h, train=train)
        if self.cross:
            h, _ = self.cross_attention(
                self.cross_attention_residual.enter(x),
                ctx.memory,
                mask=ctx.memory_mask,
                cache=cache.cross_attention if cache else None,
                train=train,
            )
            x = self.cross_attention_residual.leave(x, h, train=train)
        h = self.ffn(self.ffn_residual.enter(x), ctx.real, segments=ctx.segments, train=train)
        x = self.ffn_residual.leave(x, h, train=train)
        return x, dataclasses.replace(cache, self_attention=keys_values) if cache else None
