"""How the next token is chosen from logits, as pure functions. Each row of a batch has settings of its own."""

from collections.abc import Callable, Sequence
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np

from tformer_jax.config import DecodeConfig
from tformer_jax.special_tokens import BOS, PAD

NEVER_GENERATED = (PAD, BOS)
"""They mark structure around a text; no text contains them."""
BLOCK = 64
"""Members of a block of `top_k`."""
SHORT = 512
"""Up to so many values are searched as a whole."""


@flax.struct.dataclass
class RowSettings:
    """Settings of B rows: arrays, so that one compiled step serves rows of different requests."""

    sample: jax.Array
    """bool [B]: draw a token; False: take the most probable one."""
    temperature: jax.Array
    """float32 [B]: logits are divided by it; 0 takes the most probable token."""
    top_k: jax.Array
    """int32 [B]: only the k most probable tokens; 0: all."""
    top_p: jax.Array
    """float32 [B]: only the most probable tokens that hold this mass; 1: all."""
    min_p: jax.Array
    """float32 [B]: only tokens at least this many times as probable as the most probable one; 0: all."""
    repetition: jax.Array
    """float32 [B]: strength of the repetition penalty; 1: none."""
    min_tokens: jax.Array
    """int32 [B]: tokens before EOS; 0: any number."""
    beams: jax.Array
    """int32 [B]: beam width, at most the one that a step is compiled for."""

    @property
    def draw(self) -> jax.Array:
        """bool [B]: whether chance decides."""
        return self.sample & (self.temperature > 0)

    @classmethod
    def of(cls, cfg: DecodeConfig, rows: int) -> "RowSettings":
        """The same settings for every row."""
        return cls.of_each([cfg] * rows)

    @classmethod
    def of_each(cls, configs: Sequence[DecodeConfig]) -> "RowSettings":
        """The settings of a row each."""

        def column(dtype: str, value: Callable[[DecodeConfig], float]) -> Any:
            return np.array([value(cfg) for cfg in configs], dtype)

        return cls(
            sample=column("bool", lambda cfg: cfg.strategy == "sample"),
            temperature=column("float32", lambda cfg: cfg.temperature),
            top_k=column("int32", lambda cfg: cfg.top_k or 0),
            top_p=column("float32", lambda cfg: 1 if cfg.top_p is None else cfg.top_p),
            min_p=column("float32", lambda cfg: cfg.min_p),
            repetition=column("float32", lambda cfg: cfg.repetition_penalty),
            min_tokens=column("int32", lambda cfg: cfg.min_new_tokens),
            beams=column("int32", lambda cfg: cfg.beams),
        )


def row_keys(seed: int, places: np.ndarray) -> jax.Array:
    """One PRNG key a row, by its place among all inputs (int [B]): batching does not change what is sampled."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(seed), places)


def choose(logits: jax.Array, settings: RowSettings, keys: jax.Array) -> jax.Array:
    """The next token of each row, as its settings say; never PAD or BOS.

    Args:
        logits: float32 [B, V].
        keys: [B] PRNG keys, one a row, so that a row's choice depends on no other row; rows that do not sample ignore
            them.

    Returns:
        int32 [B].
    """
    logits = forbid(logits)
    best = most_probable(logits)

    def draw() -> jax.Array:
        drawn = jax.vmap(jax.random.categorical)(keys, restrict(logits, settings))
        return jnp.where(settings.draw, drawn.astype(jnp.int32), best)

    return jax.lax.cond(settings.draw.any(), draw, lambda: best)


def forbid(logits: jax.Array) -> jax.Array:
    """Excludes (-inf) what is never generated: [..., V] -> [..., V]."""
    return jnp.where(jnp.isin(jnp.arange(logits.shape[-1]), jnp.array(NEVER_GENERATED)), -jnp.inf, logits)


def most_probable(logits: jax.Array) -> jax.Array:
    """The index of the largest logit, the first one of equals: [..., V] -> int32 [...]."""
    return top_k(logits, 1)[1][..., 0]


def restrict(logits: jax.Array, settings: RowSettings) -> jax.Array:
    """Logits of the distributions that are sampled from: temperature, top-k, top-p, min-p; [B, V] -> [B, V]."""
    temperature = jnp.where(settings.temperature > 0, settings.temperature, 1)
    logits = logits / temperature[:, None]
    for needed, keep, limit in (
        (settings.top_k > 0, keep_top_k, settings.top_k),
        (settings.top_p < 1, keep_top_p, settings.top_p),
    ):
        logits = jax.lax.cond((needed & settings.sample).any(), keep, lambda logits, _: logits, logits, limit)
    return keep_min_p(logits, settings.min_p)


def keep_top_k(logits: jax.Array, k: jax.Array) -> jax.Array:
    """Excludes (-inf) every token less probable than the k-th: [B, V], int [B] -> [B, V]; 0 excludes none."""
    lowest = _largest_threshold(logits, lambda least: (logits >= least).sum(axis=-1) >= k)
    return jnp.where((logits < lowest[:, None]) & (k > 0)[:, None], -jnp.inf, logits)


def keep_top_p(logits: jax.Array, p: jax.Array) -> jax.Array:
    """Keeps the most probable tokens up to and including the one that brings their mass to p: [B, V], [B] -> [B, V].

    "The Curious Case of Neural Text Degeneration" (2020). The most probable token always stays, and 1 excludes none.
    """
    masses = jnp.exp(logits - logits.max(axis=-1, keepdims=True))
    needed = p * masses.sum(axis=-1)
    lowest = _largest_threshold(logits, lambda least: jnp.where(logits >= least, masses, 0).sum(axis=-1) >= needed)
    return jnp.where((logits < lowest[:, None]) & (p < 1)[:, None], -jnp.inf, logits)


def keep_min_p(logits: jax.Array, p: jax.Array) -> jax.Array:
    """Keeps the tokens at least p times as probable as the most probable one: [B, V], [B] -> [B, V].

    "Turning Up the Heat: Min-p Sampling for Creative and Coherent LLM Outputs" (2025).
    """
    lowest = logits.max(axis=-1) + jnp.log(p)
    return jnp.where(logits < lowest[:, None], -jnp.inf, logits)


def top_k(values: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest along the last axis, largest first, and of equals the first: as `jax.lax.top_k`, but faster.

    Only the k blocks of the largest maxima are searched: no member of another block is larger than k members of these.

    Args:
        values: float [..., V], -inf among them.
        k: at most V.

    Returns:
        [..., k] of the dtype of `values`, and their indices, int32 [..., k].
    """
    *leading, V = values.shape
    blocks = -(-V // BLOCK)
    if V <= SHORT or blocks <= k:
        # without the barrier XLA sorts all values wherever a part of the result is used; its third member keeps it from
        # standing right behind the search, where XLA's search on a mesh cannot bear it
        found, places, _ = jax.lax.optimization_barrier((*jax.lax.top_k(values, k), jnp.zeros(())))
        return found, places
    missing = [(0, 0)] * len(leading) + [(0, blocks * BLOCK - V)]
    maxima = jnp.pad(values, missing, constant_values=-jnp.inf).reshape(*leading, blocks, BLOCK).max(axis=-1)
    chosen = jnp.sort(top_k(maxima, k)[1], axis=-1)
    members = (chosen[..., None] * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)).reshape(*leading, k * BLOCK)
    there = jnp.take_along_axis(values, jnp.minimum(members, V - 1), axis=-1)
    found, order = top_k(jnp.where(members < V, there, -jnp.inf), k)
    return found, jnp.take_along_axis(members, order, axis=-1)


def _largest_threshold(logits: jax.Array, enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The largest float32 [B] up to each row's maximum that is still `enough`; -inf, where none is.

    Bisection over the 2^32 numbers, exact and much faster than sorting a vocabulary.

    Args:
        logits: float32 [B, V].
        enough: takes thresholds [B, 1] and gives bool [B]: True up to some threshold and False beyond it.
    """

    def narrow(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low | high) - ((low ^ high) >> 1)  # their mean, rounded up without overflow
        holds = enough(_from_rank(middle)[:, None])
        return jnp.where(holds, middle, low), jnp.where(holds, high, middle - 1)

    high = _to_rank(logits.max(axis=-1))
    low = _to_rank(jnp.full_like(logits[:, 0], -jnp.inf))
    return _from_rank(jax.lax.fori_loop(0, 32, narrow, (low, high))[0])


def _to_rank(values: jax.Array) -> jax.Array:
    """float32 -> int32 in the same order."""
    return _flip_negative(jax.lax.bitcast_convert_type(values, jnp.int32))


def _from_rank(ranks: jax.Array) -> jax.Array:
    """The inverse of `_to_rank`."""
    return jax.lax.bitcast_convert_type(_flip_negative(ranks), jnp.float32)


def _flip_negative(bits: jax.Array) -> jax.Array:
    """Reverses the order of negative numbers, which the bits of float32 give the wrong way round."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
