"""Choice of the next token from logits, by pure functions, with separate settings for each row."""

from collections.abc import Callable, Sequence
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np

from tformer_jax.config import DecodeConfig
from tformer_jax.nn.xla import most_probable


@flax.struct.dataclass
class RowSettings:
    """Decoding settings of B rows, as arrays, so that one compiled step serves rows of different requests."""

    sample: jax.Array
    """bool [B]: sample the next token; otherwise take the most probable one."""
    temperature: jax.Array
    """float32 [B]: divisor of the logits; 0 selects the most probable token."""
    top_k: jax.Array
    """int32 [B]: number of most probable tokens to sample from; 0 disables the limit."""
    top_p: jax.Array
    """float32 [B]: probability mass of the most probable tokens to sample from; 1 disables the limit."""
    min_p: jax.Array
    """float32 [B]: minimum probability of a token relative to the most probable one; 0 disables the limit."""
    repetition: jax.Array
    """float32 [B]: strength of the repetition penalty; 1 disables it."""
    min_tokens: jax.Array
    """int32 [B]: minimum number of tokens before the end of an output."""
    beams: jax.Array
    """int32 [B]: beam width, at most the width that the step is compiled for."""
    placeholders: jax.Array
    """int32 [B]: number of placeholders of the source that the output may have."""

    @property
    def draw(self) -> jax.Array:
        """bool [B]: rows whose next token is random."""
        return self.sample & (self.temperature > 0)

    @classmethod
    def from_config(cls, cfg: DecodeConfig, rows: int) -> "RowSettings":
        """Returns the settings of `rows` rows with the same config."""
        return cls.from_configs([cfg] * rows)

    @classmethod
    def from_configs(cls, configs: Sequence[DecodeConfig], placeholders: Sequence[int] = ()) -> "RowSettings":
        """Returns the settings of one row per config, and per number of placeholders; others have none."""

        def column(dtype: str, value: Callable[[DecodeConfig], float]) -> Any:
            return np.array([value(cfg) for cfg in configs], dtype)

        counts: Any = np.array([*placeholders, *[0] * (len(configs) - len(placeholders))], np.int32)
        return cls(
            sample=column("bool", lambda cfg: cfg.strategy == "sample"),
            temperature=column("float32", lambda cfg: cfg.temperature),
            top_k=column("int32", lambda cfg: cfg.top_k or 0),
            top_p=column("float32", lambda cfg: 1 if cfg.top_p is None else cfg.top_p),
            min_p=column("float32", lambda cfg: cfg.min_p),
            repetition=column("float32", lambda cfg: cfg.repetition_penalty),
            min_tokens=column("int32", lambda cfg: cfg.min_new_tokens),
            beams=column("int32", lambda cfg: cfg.beams),
            placeholders=counts,
        )


def choose(logits: jax.Array, settings: RowSettings, keys: jax.Array) -> jax.Array:
    """Chooses the next token of each row.

    Args:
        logits: float32 [B, V].
        keys: [B] PRNG keys, one per row, so that a row's token does not depend on other rows; ignored by rows that
            are not sampled.

    Returns:
        int32 [B].
    """
    best = most_probable(logits)

    def draw() -> jax.Array:
        drawn = jax.vmap(jax.random.categorical)(keys, restrict(logits, settings))
        return jnp.where(settings.draw, drawn.astype(jnp.int32), best)

    return jax.lax.cond(settings.draw.any(), draw, lambda: best)


def among(tokens: jax.Array, ids: Sequence[int]) -> jax.Array:
    """Returns whether each token is one of `ids`: int [...] -> bool [...]."""
    return (tokens[..., None] == jnp.array(ids, jnp.int32)).any(axis=-1)


def restrict(logits: jax.Array, settings: RowSettings) -> jax.Array:
    """Applies temperature, top-k, top-p and min-p: logits [B, V] -> logits [B, V] to sample from."""
    temperature = jnp.where(settings.temperature > 0, settings.temperature, 1)
    logits = logits / temperature[:, None]
    for needed, keep, limit in (
        (settings.top_k > 0, keep_top_k, settings.top_k),
        (settings.top_p < 1, keep_top_p, settings.top_p),
    ):
        logits = jax.lax.cond((needed & settings.sample).any(), keep, lambda logits, _: logits, logits, limit)
    return keep_min_p(logits, settings.min_p)


def keep_top_k(logits: jax.Array, k: jax.Array) -> jax.Array:
    """Sets the logits of tokens less probable than the k-th to -inf: [B, V], int [B] -> [B, V]; k = 0 keeps all."""
    lowest = _largest_threshold(logits, lambda least: (logits >= least).sum(axis=-1) >= k)
    return jnp.where((logits < lowest[:, None]) & (k > 0)[:, None], -jnp.inf, logits)


def keep_top_p(logits: jax.Array, p: jax.Array) -> jax.Array:
    """Keeps the smallest set of most probable tokens with a total probability of at least p: [B, V], [B] -> [B, V].

    "The Curious Case of Neural Text Degeneration" (2020). The most probable token is always kept, and so are all tokens
    as probable as the last of the set; p = 1 keeps all.
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


def _largest_threshold(logits: jax.Array, enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Finds the largest float32 threshold per row, at most its largest logit, for which `enough` holds, or -inf: [B].

    Bisects the 2^32 bit patterns of float32: exact, and much faster than sorting a vocabulary.

    Args:
        logits: float32 [B, V].
        enough: maps thresholds [B, 1] to bool [B], True up to some threshold and False above it.
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
    """Maps float32 to int32 and preserves the order."""
    return _flip_negative(jax.lax.bitcast_convert_type(values, jnp.int32))


def _from_rank(ranks: jax.Array) -> jax.Array:
    """The inverse of `_to_rank`."""
    return jax.lax.bitcast_convert_type(_flip_negative(ranks), jnp.float32)


def _flip_negative(bits: jax.Array) -> jax.Array:
    """Reverses the order of negative numbers, which the bit patterns of float32, read as int32, invert."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
