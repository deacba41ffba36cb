"""Keys and values kept between decoding steps: plain pytrees that go in as arguments and come out as results."""

import dataclasses
from collections.abc import Sequence

import flax
import jax
import jax.numpy as jnp

from tformer_jax.config import ConfigError, ModelConfig
from tformer_jax.nn.masks import Mask


@flax.struct.dataclass
class KeyValues:
    """Keys and values of one attention layer, each [B, K, S, H]: a decoding step reads this order without a copy."""

    k: jax.Array
    v: jax.Array

    @classmethod
    def pack(cls, k: jax.Array, v: jax.Array) -> "KeyValues":
        """From keys and values [B, S, K, H]."""
        return cls(jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2))

    def unpack(self) -> tuple[jax.Array, jax.Array]:
        """Keys and values [B, S, K, H]."""
        return jnp.swapaxes(self.k, 1, 2), jnp.swapaxes(self.v, 1, 2)

    def write(self, new: "KeyValues", index: jax.Array | int) -> "KeyValues":
        """Puts the T tokens of `new` into slots `index`, ..., `index + T - 1`."""
        start = (0, 0, index, 0)
        return KeyValues(
            jax.lax.dynamic_update_slice(self.k, new.k.astype(self.k.dtype), start),
            jax.lax.dynamic_update_slice(self.v, new.v.astype(self.v.dtype), start),
        )


@flax.struct.dataclass
class LayerCache:
    """What one layer reads and writes while decoding."""

    self_attention: KeyValues
    cross_attention: KeyValues | None
    """Computed once from the encoder's output; None in a decoder-only model."""


@flax.struct.dataclass
class DecoderCache:
    """Everything a decoder remembers of the tokens it has read. All rows fill the same slots.

    Rows of different length are padded on the left: such slots stay invalid, and positions count real tokens only.
    The caller stops before `index` passes the number of slots.
    """

    layers: tuple[LayerCache, ...]
    memory_mask: jax.Array | None
    """bool [B, S]: the real tokens of the encoder's input."""
    valid: jax.Array
    """bool [B, S]: slots that hold a real token."""
    lengths: jax.Array
    """int32 [B]: real tokens so far."""
    index: jax.Array
    """int32 scalar: slots filled so far."""
    prefix: jax.Array | None = None
    """int32 scalar: so many first slots are seen by every token of the row; None: 0."""

    def admit(self, token_mask: jax.Array) -> tuple["DecoderCache", jax.Array, Mask]:
        """Takes T new tokens, of which those in `token_mask` (bool [B, T]) are real.

        Returns:
            The cache with its bookkeeping moved on (keys and values are the layers' to write), the tokens' positions
            (int32 [B, T]) and their self-attention mask.

        Raises:
            ConfigError: T exceeds the number of slots.
        """
        T, slots = token_mask.shape[1], self.valid.shape[1]
        if T > slots:
            raise ConfigError(f"{T} tokens do not fit a cache of {slots} slots; give `init_cache` a larger length")
        positions = self.lengths[:, None] + jnp.cumsum(token_mask, axis=1, dtype=jnp.int32) - 1
        valid = jax.lax.dynamic_update_slice(self.valid, token_mask, (0, self.index))
        prefix = None if self.prefix is None else jnp.broadcast_to(self.prefix, self.lengths.shape)
        mask = Mask(real=valid, causal=True, start=self.index, prefix=prefix)
        moved = dataclasses.replace(
            self,
            valid=valid,
            lengths=self.lengths + token_mask.sum(axis=1, dtype=jnp.int32),
            index=self.index + T,
        )
        return moved, jnp.maximum(positions, 0), mask


def empty_cache(
    cfg: ModelConfig,
    batch: int,
    length: int,
    cross_attention: Sequence[KeyValues] | None = None,
    memory_mask: jax.Array | None = None,
    prefix: int | None = None,
) -> DecoderCache:
    """A cache with room for `length` tokens in each row, holding none; `cross_attention` has one entry a layer.

    The first `prefix` slots are seen by every token.
    """
    room = jnp.zeros((batch, cfg.kv_heads, length, cfg.head_size), cfg.dtype)
    crosses: Sequence[KeyValues | None] = cross_attention or [None] * cfg.decoder_layers
    return DecoderCache(
        layers=tuple(LayerCache(KeyValues(room, room), cross) for cross in crosses),
        memory_mask=memory_mask,
        valid=jnp.zeros((batch, length), bool),
        lengths=jnp.zeros((batch,), jnp.int32),
        index=jnp.zeros((), jnp.int32),
        prefix=None if prefix is None else jnp.asarray(prefix, jnp.int32),
    )
