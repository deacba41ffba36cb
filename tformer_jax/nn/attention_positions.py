"""Position information applied inside attention: rotations of queries and keys, or biases on their scores.

Each kind is a module that all layers of a stack share, or that each layer has; it returns `PositionTerms`.
"""

import functools
import math
from typing import ClassVar

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from tformer_jax import axes
from tformer_jax.config import ModelConfig
from tformer_jax.nn.attention_ops import Bias
from tformer_jax.nn.module import Module
from tformer_jax.nn.positions import Positions, position_kind
from tformer_jax.nn.sharding import named

LLAMA3_LOW_FREQUENCY, LLAMA3_HIGH_FREQUENCY = 1.0, 4.0
"""Rotations in `rotary.original_length` tokens below which a pair is fully scaled, and above which it is not."""


@flax.struct.dataclass
class Rotation:
    """Rotates pairs of features by an angle proportional to the position ("RoFormer", 2021).

    The first R features of a head are rotated, and all others are unchanged.
    """

    cos: jax.Array
    """float32 [B or 1, T, 1, R/2]."""
    sin: jax.Array
    interleaved: bool = flax.struct.field(pytree_node=False)
    """Whether pairs are (0, 1), (2, 3), ... instead of (0, R/2), (1, R/2 + 1), ..."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """Rotates queries or keys: [B, T, N, H] -> [B, T, N, H]."""
        R = 2 * self.cos.shape[-1]
        x32 = x[..., :R].astype(jnp.float32)
        if self.interleaved:
            a, b = x32[..., 0::2], x32[..., 1::2]
        else:
            a, b = jnp.split(x32, 2, axis=-1)
        turned = a * self.cos - b * self.sin, a * self.sin + b * self.cos
        joined = jnp.stack(turned, axis=-1).reshape(x32.shape) if self.interleaved else jnp.concatenate(turned, axis=-1)
        rotated = joined.astype(x.dtype)
        return rotated if R == x.shape[-1] else jnp.concatenate([rotated, x[..., R:]], axis=-1)


@flax.struct.dataclass
class PositionTerms:
    """Rotation of queries and keys, or bias on their scores, by which self-attention uses positions."""

    rotation: Rotation | None = None
    bias: Bias | None = None


class AttentionPositions(Module, Positions):
    """Base class of position information applied inside attention.

    `bidirectional`: queries also attend to later positions.
    """

    cfg: ModelConfig
    bidirectional: bool = False
    at_scores: ClassVar[bool] = True
    """Layers of kind "nope" do without it."""
    adds_bias: ClassVar[bool] = False

    def __call__(self, positions: jax.Array, *, window: bool) -> PositionTerms:
        """Returns the rotation or bias of query positions int [B or 1, T]; `window`: for a sliding-window layer."""
        raise NotImplementedError


def rotary_frequencies(cfg: ModelConfig, *, window: bool) -> np.ndarray:
    """Returns the frequencies in radians per token, float64 [R/2]: `base^(-2i/R)`, scaled by `cfg.rotary.scaling`.

    R is `cfg.rotary_size`: H, unless only a fraction of each head is rotated.

    `linear` divides all frequencies by the factor ("Extending Context Window ... via Positional Interpolation", 2023).
    `llama3` divides frequencies of less than one rotation in `rotary.original_length` tokens, keeps frequencies of over
    4 rotations, and interpolates in between ("The Llama 3 Herd of Models", 2024). `yarn` interpolates between
    `beta_slow` and `beta_fast` rotations, linearly in the index i instead of the rotations ("YaRN", 2023, section 3.2).
    """
    rotary, exponents = cfg.rotary, -np.arange(0, cfg.rotary_size, 2) / cfg.rotary_size
    if window and rotary.window_base is not None:
        return rotary.window_base**exponents
    frequencies = rotary.base**exponents
    if rotary.scaling == "none":
        return frequencies
    stretched = frequencies / rotary.factor
    if rotary.scaling == "linear":
        return stretched
    keep = _yarn_weights(cfg) if rotary.scaling == "yarn" else _llama3_weights(frequencies, rotary.original_length)
    return keep * frequencies + (1 - keep) * stretched


def _llama3_weights(frequencies: np.ndarray, original_length: int) -> np.ndarray:
    """Returns the weight of the unscaled frequency of each pair, float64 [R/2]."""
    rotations = frequencies * original_length / (2 * math.pi)
    return np.clip((rotations - LLAMA3_LOW_FREQUENCY) / (LLAMA3_HIGH_FREQUENCY - LLAMA3_LOW_FREQUENCY), 0, 1)


def _yarn_weights(cfg: ModelConfig) -> np.ndarray:
    """Returns the weight of the unscaled frequency of each pair, float64 [R/2]: 1 for fast pairs, 0 for slow ones.

    As in the authors' code, the ramp's ends are rounded outward to whole indices, unless `rotary.rounded` is False, and
    its upper end is at most R - 1.
    """
    rotary, R = cfg.rotary, cfg.rotary_size

    def index(rotations: float) -> float:
        """Returns the (fractional) index of the pair that makes `rotations` rotations in `original_length` tokens."""
        return R * math.log(rotary.original_length / (2 * math.pi * rotations)) / (2 * math.log(rotary.base))

    first, last = index(rotary.beta_fast), index(rotary.beta_slow)
    if rotary.rounded:
        first, last = math.floor(first), math.ceil(last)
    first = max(first, 0)
    last = max(min(last, R - 1), first)
    return 1 - np.clip((np.arange(R // 2) - first) / (last - first or 1e-3), 0, 1)


def rotary_magnitude(cfg: ModelConfig, *, window: bool) -> float:
    """Returns the factor of rotated features: YaRN's `attention_factor`, sqrt(1 / t) for a temperature t, or 1."""
    rotary = cfg.rotary
    if rotary.scaling != "yarn" or (window and rotary.window_base is not None):
        return 1.0
    return 0.1 * math.log(rotary.factor) + 1 if rotary.attention_factor is None else rotary.attention_factor


class Rotary(AttentionPositions):
    """Rotary position embeddings: the score of two tokens depends only on their relative position."""

    settings: ClassVar[tuple[str, ...]] = ("rotary",)

    @staticmethod
    def check(cfg: ModelConfig) -> None:
        """Raises `ConfigError` if the rotated features are not pairs, or no layer uses `rotary.window_base`."""
        rotary, H, R = cfg.rotary, cfg.head_size, cfg.rotary_size
        if (R % 2 or not R) and rotary.fraction == 1:
            raise cfg.error("position", f"rotates pairs of features; the head size {H} must be even")
        if R % 2 or not R:
            raise cfg.error("rotary.fraction", f"rotates {R} of {H} features, which must be pairs")
        if rotary.window_base is not None and "window" not in cfg.layer_pattern:
            raise cfg.error("rotary.window_base", "no layer uses it; write 'window' in model.layer_pattern")
        if rotary.window_base is not None and "full" not in cfg.layer_pattern:
            raise cfg.error("rotary.window_base", "applies to all layers; write it as model.rotary.base")

    def __call__(self, positions: jax.Array, *, window: bool) -> PositionTerms:
        """Returns the rotation by `position * frequency`, which also multiplies by `rotary_magnitude`."""
        frequencies = rotary_frequencies(self.cfg, window=window).astype(np.float32)
        angles = (positions[..., None].astype(jnp.float32) * frequencies)[:, :, None, :]
        magnitude = rotary_magnitude(self.cfg, window=window)
        cos, sin = magnitude * jnp.cos(angles), magnitude * jnp.sin(angles)
        return PositionTerms(rotation=Rotation(cos, sin, self.cfg.rotary.pairing == "interleaved"))


@flax.struct.dataclass
class AlibiBias:
    """Bias `-slope * |query - key|` of each head."""

    slopes: jax.Array
    """float32 [N]."""

    def block(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
        """Returns the bias between positions int [..., T] and [..., S]: float32 [..., N, T, S]."""
        distances = abs(queries[..., None, :, None] - keys[..., None, None, :]).astype(jnp.float32)
        return -self.slopes[:, None, None] * distances


def alibi_slopes(heads: int) -> np.ndarray:
    """Returns ALiBi's slope of each head, float64 [N].

    The slopes are `2^(-8 i / N)` for i = 1..N if N is a power of two; else the slopes for the next lower power P,
    followed by every other slope for 2P.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = 2.0 ** (-8 * np.arange(1, power + 1) / power)
    between = 2.0 ** (-4 * np.arange(1, 2 * (heads - power), 2) / power)
    return np.concatenate([slopes, between])


class Alibi(AttentionPositions):
    """Attention with linear biases ("Train Short, Test Long", 2021); symmetric in bidirectional attention."""

    adds_bias = True

    def __call__(self, positions: jax.Array, *, window: bool) -> PositionTerms:
        """Returns the bias, which is the same for every layer."""
        return PositionTerms(bias=AlibiBias(jnp.asarray(alibi_slopes(self.cfg.num_heads), jnp.float32)))


@flax.struct.dataclass
class BucketBias:
    """Learned bias for each head and bucket of `key - query`."""

    table: jax.Array
    """[buckets, N]."""
    bidirectional: bool = flax.struct.field(pytree_node=False)
    farthest: int = flax.struct.field(pytree_node=False)

    def block(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
        """Returns the bias between positions int [..., T] and [..., S]: float32 [..., N, T, S]."""
        offsets = keys[..., None, :] - queries[..., :, None]
        buckets = relative_bucket(offsets, self.table.shape[0], self.farthest, bidirectional=self.bidirectional)
        return jnp.moveaxis(self.table.astype(jnp.float32)[buckets], -1, -3)


def relative_bucket(offset: jax.Array, buckets: int, farthest: int, *, bidirectional: bool) -> jax.Array:
    """Maps offsets `key - query` to buckets: int [...] -> int32 [...], less than `buckets`.

    "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer" (2020), section 2.1. Half of
    the buckets hold one distance each; the others grow logarithmically and the last one holds all from `farthest`
    on. If `bidirectional`, each direction has half of the buckets; otherwise later keys share bucket 0.
    """
    first = jnp.zeros_like(offset)
    if bidirectional:
        buckets //= 2
        first = jnp.where(offset > 0, buckets, 0)
        distance = abs(offset)
    else:
        distance = jnp.maximum(-offset, 0)
    exact = buckets // 2
    later = distance[..., None] >= jnp.asarray(_first_distances(exact, buckets - exact, farthest))
    return first + jnp.minimum(distance, exact) + later.sum(axis=-1, dtype=jnp.int32)


@functools.cache
def _first_distances(exact: int, count: int, farthest: int) -> np.ndarray:
    """Returns the smallest distance of each of `count` logarithmic buckets but the first: int32 [count - 1].

    That of bucket n is the smallest d with `d / exact >= (farthest / exact) ** (n / count)`, in integer arithmetic.
    """
    distances = []
    for n in range(1, count):
        near = int(exact * (farthest / exact) ** (n / count))
        reached = (d for d in (near, near + 1, near + 2) if d**count * exact**n >= farthest**n * exact**count)
        distances.append(next(reached))
    return np.array(distances, np.int32)


class RelativeBuckets(AttentionPositions):
    """Relative position biases of T5, with one table for all layers of a stack, or for each layer."""

    adds_bias = True
    settings: ClassVar[tuple[str, ...]] = ("relative",)

    @nn.compact
    def __call__(self, positions: jax.Array, *, window: bool) -> PositionTerms:
        """Returns the bias from the table."""
        cfg = self.cfg
        init = named(nn.initializers.normal(cfg.init_std), None, axes.HEADS)
        table = self.param("embedding", init, (cfg.relative.buckets, cfg.num_heads), jnp.dtype(cfg.param_dtype))
        return PositionTerms(bias=BucketBias(table, self.bidirectional, cfg.relative.distance))


def make_attention_positions(cfg: ModelConfig, *, bidirectional: bool) -> AttentionPositions | None:
    """Builds the module that `cfg.position` names; None if attention does not use positions."""
    kind = position_kind(cfg)
    return kind(cfg, bidirectional) if issubclass(kind, AttentionPositions) else None


def adds_bias(cfg: ModelConfig) -> bool:
    """Returns whether `cfg.position` requires an attention backend that can add a bias to the scores."""
    kind = position_kind(cfg)
    return issubclass(kind, AttentionPositions) and kind.adds_bias
