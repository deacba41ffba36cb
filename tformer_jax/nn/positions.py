"""Position embeddings, which are added to token embeddings; see `attention_positions` for positions in attention."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from tformer_jax import axes
from tformer_jax.base.errors import UserError
from tformer_jax.config import ModelConfig, kinds
from tformer_jax.nn.gathered import with_gathered
from tformer_jax.nn.lookup import lookup
from tformer_jax.nn.module import Module
from tformer_jax.nn.sharding import named


def sinusoid(positions: jax.Array, dim: int, *, steps: float | None = None) -> tuple[jax.Array, jax.Array]:
    """Computes sines and cosines of positions: int [...] -> float32 [..., D/2] each.

    They are `sin(p / 10000^(i/steps))` and `cos(p / 10000^(i/steps))` for i = 0..D/2-1, where `steps` is D/2 by default
    ("Attention Is All You Need", 2017, section 3.5). Defined for every position: PE(p + k) is a rotation of PE(p).
    """
    frequencies = 10_000.0 ** (-np.arange(dim // 2) / (steps or dim / 2))
    angles = positions[..., None].astype(jnp.float32) * frequencies.astype(np.float32)
    return jnp.sin(angles), jnp.cos(angles)


def sinusoidal(positions: jax.Array, dim: int) -> jax.Array:
    """Interleaves sines (even features) and cosines (odd features), as in the paper: int [...] -> float32 [..., D]."""
    return jnp.stack(sinusoid(positions, dim), axis=-1).reshape(*positions.shape, dim)


def token_positions(length: int, segments: jax.Array | None) -> jax.Array:
    """Returns positions 0, 1, ... that restart at each new segment of `segments` (int [B, T]): int [B or 1, T]."""
    indices = jnp.arange(length)[None]
    if segments is None:
        return indices
    starts = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    return indices - jax.lax.cummax(jnp.where(starts, indices, 0), axis=1)


class Positions:
    """Base of all kinds of positions."""


class EmbeddingPositions(Module, Positions):
    """Base class of position embeddings that are added to token embeddings."""

    cfg: ModelConfig

    def __call__(self, positions: jax.Array) -> jax.Array:
        """Embeds positions int [..., T] -> [..., T, D]."""
        raise NotImplementedError


class NoPositions(Positions):
    """Placeholder of `position="none"`: no module is built, so that an encoder is equivariant to permutations."""


class Sinusoidal(EmbeddingPositions):
    """Fixed vectors of `sinusoidal`."""

    @staticmethod
    def check(cfg: ModelConfig) -> None:
        """Raises `ConfigError` for an odd width."""
        if cfg.dim % 2:
            raise cfg.error("dim", f"must be even for model.position={cfg.position!r}")

    def __call__(self, positions: jax.Array) -> jax.Array:
        """Embeds positions int [..., T] -> [..., T, D]."""
        return sinusoidal(positions, self.cfg.dim).astype(self.cfg.dtype)


class SinusoidalHalves(Sinusoidal):
    """The sines and cosines of `sinusoid`, with all sines first, as in Marian."""

    def __call__(self, positions: jax.Array) -> jax.Array:
        """Embeds positions int [..., T] -> [..., T, D]."""
        return jnp.concatenate(sinusoid(positions, self.cfg.dim), axis=-1).astype(self.cfg.dtype)


class SinusoidalFairseq(Sinusoidal):
    """As `SinusoidalHalves`, but the last wavelength is 10000 times the first, as in tensor2tensor and fairseq.

    The first position is `cfg.position_offset`.
    """

    settings: ClassVar[tuple[str, ...]] = ("position_offset",)

    def __call__(self, positions: jax.Array) -> jax.Array:
        """Embeds positions int [..., T] -> [..., T, D]."""
        halves = sinusoid(self.cfg.position_offset + positions, self.cfg.dim, steps=self.cfg.dim / 2 - 1)
        return jnp.concatenate(halves, axis=-1).astype(self.cfg.dtype)


class Learned(EmbeddingPositions):
    """One learned vector for each position below `cfg.max_length`."""

    settings: ClassVar[tuple[str, ...]] = ("position_offset",)

    @nn.compact
    def __call__(self, positions: jax.Array) -> jax.Array:
        """Embeds positions int [..., T] -> [..., T, D]; NaN for positions outside the table.

        Raises:
            UserError: T exceeds `cfg.max_length`.
        """
        cfg = self.cfg
        if positions.shape[-1] > cfg.max_length:
            raise UserError(
                f"{positions.shape[-1]} positions exceed model.max_length={cfg.max_length}, where learned positions "
                "end: shorten the input, or increase model.max_length"
            )
        init = named(nn.initializers.normal(cfg.init_std), None, axes.EMBED)
        rows = cfg.position_offset + cfg.max_length
        table = self.param("embedding", init, (rows, cfg.dim), jnp.dtype(cfg.param_dtype))
        positions, wide = cfg.position_offset + positions, table.astype(jnp.float32)
        return with_gathered(_vectors, positions, wide, (None, axes.EMBED), dtype=table.dtype).astype(cfg.dtype)


def _vectors(positions: jax.Array, table: jax.Array) -> jax.Array:
    return lookup(table, positions)


def position_kind(cfg: ModelConfig) -> Any:
    """Returns the class that `cfg.position` names.

    Raises:
        ConfigError: other code has registered something else, which would be used as no positions.
    """
    kind = kinds.load(kinds.POSITIONS, cfg.position)
    if not (isinstance(kind, type) and issubclass(kind, Positions)):
        raise cfg.error("position", f"is {kind!r}, not a class derived from EmbeddingPositions or AttentionPositions")
    return kind


def make_positions(cfg: ModelConfig) -> EmbeddingPositions | None:
    """Builds the module that `cfg.position` names; None if attention uses the positions or there are none."""
    kind = position_kind(cfg)
    return kind(cfg) if issubclass(kind, EmbeddingPositions) else None
