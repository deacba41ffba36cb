"""Layers on top of each other, and the norm that may close them."""

import dataclasses
from typing import Any

import jax
from flax import linen as nn

from tformer_jax.config import ModelConfig
from tformer_jax.nn import masks
from tformer_jax.nn.kv_cache import DecoderCache, KeyValues
from tformer_jax.nn.layers import TransformerLayer
from tformer_jax.nn.norms import make_norm


class Encoder(nn.Module):
    """`cfg.encoder_layers` layers in which every real token sees every real token."""

    cfg: ModelConfig

    def setup(self) -> None:
        self.layers = [TransformerLayer(self.cfg) for _ in range(self.cfg.encoder_layers)]
        self.norm = make_norm(self.cfg) if self.cfg.norms_output else None

    def __call__(self, x: jax.Array, real: jax.Array | None, *, train: bool = False) -> jax.Array:
        """x [B, S, D], real tokens bool [B, S] (None: all) -> [B, S, D]."""
        mask = None if real is None else masks.padding(real)
        for layer in self.layers:
            x, _ = layer(x, mask=mask, train=train)
        return self.norm(x) if self.norm else x


class Decoder(nn.Module):
    """`cfg.decoder_layers` causal layers, each with cross-attention where `cross`."""

    cfg: ModelConfig
    cross: bool = False

    def setup(self) -> None:
        self.layers = [TransformerLayer(self.cfg, self.cross) for _ in range(self.cfg.decoder_layers)]
        self.norm = make_norm(self.cfg) if self.cfg.norms_output else None

    def __call__(
        self,
        x: jax.Array,
        real: jax.Array | None = None,
        memory: jax.Array | None = None,
        memory_real: jax.Array | None = None,
        *,
        train: bool = False,
    ) -> jax.Array:
        """The full pass: x [B, T, D], memory [B, S, D], their real tokens bool [B, T] and [B, S] -> [B, T, D]."""
        mask = masks.combine(masks.causal(x.shape[1]), None if real is None else masks.padding(real))
        memory_mask = None if memory_real is None else masks.padding(memory_real)
        for layer in self.layers:
            x, _ = layer(x, memory, mask=mask, memory_mask=memory_mask, train=train)
        return self.norm(x) if self.norm else x

    def step(
        self, x: jax.Array, cache: DecoderCache, mask: jax.Array, index: jax.Array
    ) -> tuple[jax.Array, DecoderCache]:
        """Continues from `cache`, which has admitted the tokens: x [B, T, D], mask [B, 1, T, S] -> [B, T, D].

        `index` is the slot of the first new token.
        """
        memory_mask = None if cache.memory_mask is None else masks.padding(cache.memory_mask)
        layer_caches: list[Any] = []
        for layer, layer_cache in zip(self.layers, cache.layers, strict=True):
            x, written = layer(x, mask=mask, memory_mask=memory_mask, cache=layer_cache, index=index)
            layer_caches.append(written)
        x = self.norm(x) if self.norm else x
        return x, dataclasses.replace(cache, layers=tuple(layer_caches))

    def cross_keys_values(self, memory: jax.Array) -> tuple[KeyValues, ...]:
        """What each layer's cross-attention reads of memory [B, S, D]."""
        return tuple(layer.cross_attention.keys_values(memory) for layer in self.layers)
