"""One Transformer layer: sub-layers joined by residual connections."""

import dataclasses
from typing import Any

import flax
import jax
from flax import linen as nn

from tformer_jax import axes
from tformer_jax.config import ModelConfig, kinds
from tformer_jax.nn.attention import make_attention
from tformer_jax.nn.attention_positions import PositionTerms, make_attention_positions
from tformer_jax.nn.decoder_cache import mask_kind
from tformer_jax.nn.dropout import Dropout
from tformer_jax.nn.ffn import make_ffn
from tformer_jax.nn.kv_cache import LayerCache
from tformer_jax.nn.masks import Mask
from tformer_jax.nn.module import watch
from tformer_jax.nn.norms import make_norm
from tformer_jax.nn.sharding import constrain
from tformer_jax.nn.slots import Slots


@flax.struct.dataclass
class LayerContext:
    """Inputs shared by all layers of a stack, other than x [B, T, D]."""

    masks: dict[str, Mask]
    """Self-attention masks by `mask_kind` of layers."""
    padding_mask: jax.Array | None = None
    """bool [B, T]: True for tokens of x that are not padding; None: all."""
    segments: jax.Array | None = None
    """int [B, T]: segment ids of documents packed into a row; None: one document per row."""
    positions: dict[str, PositionTerms] = dataclasses.field(default_factory=dict)
    """Positions that attention uses, by `mask_kind` of layers."""
    token_positions: jax.Array | None = None
    """int [B or 1, T]: positions of x, if each layer makes what its attention uses."""
    memory: jax.Array | None = None
    """[B, S, D]: the encoder's output; not needed if a cache holds its keys and values."""
    cross_mask: Mask = Mask()
    """Mask of cross-attention."""
    slots: dict[str, Slots] = dataclasses.field(default_factory=dict)
    """Cache slots for the keys and values of x, by `mask_kind` of layers; empty without a cache."""
    parents: jax.Array | None = None
    """int32 [B, T]: for beams, the columns of recurrent states that they continue."""

    def for_attention(self, layer: str) -> dict[str, Any]:
        """Returns the arguments of self-attention in a kind of layer; layers of kind "nope" get no positions."""
        kind = mask_kind(layer)
        position = None if layer == "nope" else self.positions.get(kind)
        return {"mask": self.masks[kind], "position": position, "slots": self.slots.get(kind)}

    def for_recurrence(self) -> dict[str, Any]:
        """Returns the arguments of layers with a recurrent state."""
        return {"padding_mask": self.padding_mask, "segments": self.segments, "parents": self.parents}


class Residual(nn.Module):
    """Residual connection around a sub-layer f, with norms as in `cfg.norm_placement`.

    pre: `x + drop(f(norm(x)))`; post: `norm(x + drop(f(x)))`; both: `x + drop(norm(f(norm(x))))`; output:
    `x + drop(norm(f(x)))`. The value added to x is first multiplied by `cfg.residual_multiplier`.
    """

    cfg: ModelConfig
    normalized: bool = True
    """Whether the sub-layer's input is normalized if `cfg.norm_placement` is "pre"."""

    def setup(self) -> None:
        if self.normalized:
            self.norm = make_norm(self.cfg)
        if self.cfg.norm_placement == "both":
            self.norm_after = make_norm(self.cfg)
        self.dropout = Dropout(self.cfg.dropout)

    def sublayer_input(self, x: jax.Array) -> jax.Array:
        """Returns norm(x), or x without a norm of the input, as with `cfg.norm_placement` "post" or "output"."""
        watch(self, stream=x)
        return self.norm(x) if self.normalized and self.cfg.norm_placement not in ("post", "output") else x

    def add_output(self, x: jax.Array, y: jax.Array, *, train: bool) -> jax.Array:
        """Returns the residual sum of x and the sub-layer's output y after dropout, with norms as configured."""
        if self.cfg.norm_placement in ("both", "output"):
            y = (self.norm_after if self.cfg.norm_placement == "both" else self.norm)(y)
        y = y if self.cfg.residual_multiplier == 1 else y * self.cfg.residual_multiplier
        watch(self, added=y)
        joined = x + self.dropout(y, train=train)
        joined = constrain(joined, axes.BATCH, axes.LENGTH, None)
        return self.norm(joined) if self.cfg.norm_placement == "post" else joined


class TransformerLayer(nn.Module):
    """Self-attention or a recurrence, as `kind` names, cross-attention if `cross`, and an FFN."""

    cfg: ModelConfig
    cross: bool = False
    kind: str = "full"
    experts: bool = True
    """Whether the FFN has experts, if the model uses them."""
    bidirectional: bool = False
    first_norm: bool = True
    """Whether the input of self-attention is normalized if `cfg.norm_placement` is "pre"."""

    def setup(self) -> None:
        attention = self.cfg.attention_of(self.kind)
        self.recurrent = kinds.is_recurrent(attention)
        own_positions = self.cfg.relative.by_layer and self.kind != "nope" and not self.recurrent
        self.attention_positions = (
            make_attention_positions(self.cfg, bidirectional=self.bidirectional) if own_positions else None
        )
        self.self_attention = make_attention(self.cfg, attention)
        self.self_attention_residual = Residual(self.cfg, self.first_norm)
        if self.cross:
            self.cross_attention = make_attention(self.cfg, self.cfg.attention, cross=True)
            self.cross_attention_residual = Residual(self.cfg)
        self.ffn = make_ffn(self.cfg, experts=self.experts)
        self.ffn_residual = Residual(self.cfg)

    def __call__(
        self, x: jax.Array, ctx: LayerContext, cache: LayerCache | None = None, *, train: bool = False
    ) -> tuple[jax.Array, LayerCache | None]:
        """Applies the sub-layers in order.

        Args:
            x: [B, T, D].
            ctx: masks, positions and memory, shared by all layers.
            cache: the layer's entries of earlier tokens; keys and values of x are written to `ctx.slots`.

        Returns:
            [B, T, D], and the updated cache, or None without a cache.
        """
        arguments = ctx.for_recurrence() if self.recurrent else ctx.for_attention(self.kind)
        if self.attention_positions:
            assert ctx.token_positions is not None
            arguments["position"] = self.attention_positions(ctx.token_positions, window=self.kind == "window")
        h, state = self.self_attention(
            self.self_attention_residual.sublayer_input(x),
            **arguments,
            cache=cache.self_attention if cache else None,
            train=train,
        )
        x = self.self_attention_residual.add_output(x, h, train=train)
        if self.cross:
            h, _ = self.cross_attention(
                self.cross_attention_residual.sublayer_input(x),
                ctx.memory,
                mask=ctx.cross_mask,
                cache=cache.cross_attention if cache else None,
                train=train,
            )
            x = self.cross_attention_residual.add_output(x, h, train=train)
        h = self.ffn(
            self.ffn_residual.sublayer_input(x), padding_mask=ctx.padding_mask, segments=ctx.segments, train=train
        )
        x = self.ffn_residual.add_output(x, h, train=train)
        return x, dataclasses.replace(cache, self_attention=state) if cache else None
