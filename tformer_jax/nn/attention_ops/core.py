"""Scaled dot-product attention as a pure function, and what a backend of it must be."""

import dataclasses
import math
from collections.abc import Callable
from typing import Protocol

import jax

from tformer_jax.config import ConfigError, kinds
from tformer_jax.nn.masks import Mask, as_mask

RULES = {
    "cross": "cross-attention",
    "explicit": "arrays",
    "positions": "caches",
    "prefix": "prefixes (model.prefix_lm)",
    "window": "windows (model.window)",
}
"""What people call the rules of a `Mask` that not every backend knows."""


class Bias(Protocol):
    """A pytree of float32 arrays that is added to the scaled scores, a function of the positions of query and key."""

    def block(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
        """int [..., T] and [..., S] -> float32 [..., N, T, S]."""


@dataclasses.dataclass(frozen=True)
class Scoring:
    """How scores become weights: `softmax(softcap(scale * q k^T) + bias)`, then dropout."""

    scale: float
    softcap: float | None
    dropout_rate: float


@dataclasses.dataclass(frozen=True)
class Backend:
    """One way to compute attention, and what it can do.

    `run(q, k, v, mask, bias, scoring, dropout_key)` gives [B, T, N, H] for q [B, T, N, H] and k, v [B, S, K, H].
    """

    run: Callable[..., jax.Array]
    platforms: tuple[str, ...] = ()
    """Devices it runs on, by `jax.default_backend()`; empty: any."""
    softcap: bool = True
    bias: bool = True
    dropout: bool = True
    rules: frozenset[str] | None = None
    """The `Mask.rules` that it knows; None: all."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Needs:
    """What is asked of a backend, as far as it is known when a function is traced."""

    dtype: str
    softcap: bool
    bias: bool
    dropout: bool
    rules: frozenset[str]
    """Of the masks, see `Mask.rules`."""


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | Mask | None = None,
    *,
    bias: Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    backend: str = "auto",
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """`softmax(scale * q k^T) v` ("Attention Is All You Need", 2017), with G = N / K queries to a key/value head.

    A query with nothing to attend to gives zeros, in the result and in every gradient.

    Args:
        q: [B, T, N, H].
        k, v: [B, S, K, H]; query head n reads key/value head n // G.
        mask: a `Mask`, or bool with four axes, broadcastable to [B, N, T, S]; True = may attend. None hides nothing.
        bias: added to the scores, after the soft-cap.
        scale: factor of the scores; None: 1 / sqrt(H).
        softcap: scores become `cap * tanh(scores / cap)` ("Gemma 2", 2024).
        backend: a name in `config.kinds.BACKENDS`.
        dropout_rate: share of the weights set to zero, when `dropout_key` is given.

    Returns:
        [B, T, N, H] in the dtype of q; scores and softmax are float32.

    Raises:
        ConfigError: the backend is unknown, not for this device, or cannot do what is asked.
    """
    rate = 0.0 if dropout_key is None else dropout_rate
    scoring = Scoring(1 / math.sqrt(q.shape[-1]) if scale is None else scale, softcap, rate)
    mask = as_mask(mask)
    chosen = usable(backend, needs_of(q, mask, bias, scoring))
    return chosen.run(q, k, v, mask, bias, scoring, dropout_key if rate else None)


def needs_of(q: jax.Array, mask: Mask, bias: Bias | None, scoring: Scoring) -> Needs:
    """What these arguments of `Backend.run` ask for."""
    return Needs(str(q.dtype), scoring.softcap is not None, bias is not None, scoring.dropout_rate > 0, mask.rules)


def usable(name: str, needs: Needs) -> Backend:
    """The backend `name`, able to do what is asked on this machine.

    Raises:
        ConfigError: it is unknown or unable; the message names those that are able.
    """

    if problem := lack(name, needs):
        able = ", ".join(other for other in kinds.BACKENDS if not lack(other, needs))
        raise ConfigError(f"model.attention_backend={name!r} {problem}; write one of {able}")
    backend: Backend = kinds.load(kinds.BACKENDS, name)
    return backend


def lack(name: str, needs: Needs) -> str | None:
    """Why the backend `name` cannot do what is needed on this machine; None: it can."""
    if name not in kinds.BACKENDS:
        return "is not known"
    backend, platform = kinds.load(kinds.BACKENDS, name), jax.default_backend()
    if backend.platforms and platform not in backend.platforms:
        return f"needs a {' or '.join(backend.platforms)}, and this machine has a {platform}"
    if needs.softcap and not backend.softcap:
        return "cannot cap scores (model.attention_softcap)"
    if needs.bias and not backend.bias:
        return "cannot add a bias to scores (model.position)"
    if needs.dropout and not backend.dropout:
        return "cannot drop attention weights (model.attention_dropout)"
    if needs.dtype not in backend.dtypes:
        return f"computes in {' or '.join(backend.dtypes)}, not {needs.dtype} (model.dtype)"
    unknown = sorted(needs.rules - backend.rules) if backend.rules is not None else []
    return f"cannot apply masks of {', '.join(map(RULES.__getitem__, unknown))}" if unknown else None
