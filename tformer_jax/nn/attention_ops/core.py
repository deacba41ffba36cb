"""Scaled dot-product attention as a pure function, and what a backend of it must be."""

import dataclasses
import math
from collections.abc import Callable
from typing import Protocol

import jax

from tformer_jax.config import ConfigError, kinds
from tformer_jax.nn.masks import Mask, as_mask


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
    dtypes: tuple[str, ...] = ("float32", "bfloat16")


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | Mask | None = None,
    *,
    bias: Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    backend: str = "reference",
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
    chosen = usable(backend, softcap=softcap is not None, bias=bias is not None, dropout=rate > 0, dtype=str(q.dtype))
    return chosen.run(q, k, v, as_mask(mask), bias, scoring, dropout_key if rate else None)


def usable(name: str, *, softcap: bool, bias: bool, dropout: bool, dtype: str) -> Backend:
    """The backend `name`, able to do what is asked on this machine.

    Raises:
        ConfigError: it is unknown or unable; the message names those that are able.
    """

    def lack(name: str) -> str | None:
        if name not in kinds.BACKENDS:
            return "is not known"
        return _lacks(kinds.load(kinds.BACKENDS, name), softcap=softcap, bias=bias, dropout=dropout, dtype=dtype)

    if problem := lack(name):
        able = ", ".join(other for other in kinds.BACKENDS if not lack(other))
        raise ConfigError(f"model.attention_backend={name!r} {problem}; write one of {able}")
    backend: Backend = kinds.load(kinds.BACKENDS, name)
    return backend


def _lacks(backend: Backend, *, softcap: bool, bias: bool, dropout: bool, dtype: str) -> str | None:
    """Why a backend will not do; None: it will."""
    platform = jax.default_backend()
    if backend.platforms and platform not in backend.platforms:
        return f"needs a {' or '.join(backend.platforms)}, and this machine has a {platform}"
    if softcap and not backend.softcap:
        return "cannot cap scores (model.attention_softcap)"
    if bias and not backend.bias:
        return "cannot add a bias to scores (model.position)"
    if dropout and not backend.dropout:
        return "cannot drop attention weights (model.attention_dropout)"
    if dtype not in backend.dtypes:
        return f"computes in {' or '.join(backend.dtypes)}, not {dtype} (model.dtype)"
    return None
