"""Scaled dot-product attention as a pure function, and the interface of its backends."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol

import flax
import jax
import jax.numpy as jnp

from tformer_jax.base import checks
from tformer_jax.base.errors import UserError
from tformer_jax.config import kinds
from tformer_jax.nn import sharding
from tformer_jax.nn.masks import Mask, as_mask

CONDITION_NAMES = {
    "cross": "cross-attention",
    "explicit": "mask arrays (such as model.lookahead's)",
    "positions": "caches",
    "prefix": "prefixes (model.prefix_lm)",
    "window": "windows (model.window)",
}
"""Names in error messages of the `Mask.conditions` that some backends do not support."""


class Bias(Protocol):
    """A pytree that computes a bias on the scaled scores from the positions of queries and keys."""

    def block(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
        """Returns the bias between positions int [..., T] and [..., S]: float32 [..., N, T, S]."""


@dataclasses.dataclass(frozen=True)
class Scoring:
    """Parameters of the attention weights, `softmax(softcap(scale * q k^T) + bias)` with sinks and dropout."""

    scale: float
    softcap: float | None
    dropout_rate: float


@flax.struct.dataclass
class Operands:
    """Inputs of one attention call."""

    q: jax.Array
    """[B, T, N, H]."""
    k: jax.Array
    """[B, S, K, H]; query head n reads key/value head n // G."""
    v: jax.Array
    """[B, S, K, H]."""
    mask: Mask
    scoring: Scoring = flax.struct.field(pytree_node=False)
    bias: Bias | None = None
    dropout_key: jax.Array | None = None
    """None: no dropout."""
    sinks: jax.Array | None = None
    """float32 [N]: `exp(sink)` is added to the denominator of each head's softmax."""

    @classmethod
    def pack(
        cls,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: jax.Array | Mask | None = None,
        *,
        bias: Bias | None = None,
        sinks: jax.Array | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        dropout_rate: float = 0.0,
        dropout_key: jax.Array | None = None,
    ) -> "Operands":
        """Packs the arguments of `attend`.

        Args:
            bias: added to the scores, after the soft-cap.
            sinks: float [N]: the softmax of a head has one more score, `sink`, without a value ("gpt-oss-120b &
                gpt-oss-20b Model Card", 2025), so that its weights may sum to less than 1. None: no sinks.
            scale: factor of the scores; None: 1 / sqrt(H).
            softcap: scores become `cap * tanh(scores / cap)` ("Gemma 2", 2024).
            dropout_rate: probability of setting a weight to zero, if `dropout_key` is given.
        """
        rate = 0.0 if dropout_key is None else dropout_rate
        scoring = Scoring(1 / math.sqrt(q.shape[-1]) if scale is None else scale, softcap, rate)
        return cls(q, k, v, as_mask(mask), scoring, bias, dropout_key if rate else None, sinks)


@dataclasses.dataclass(frozen=True)
class Backend:
    """An implementation of attention, and what it supports."""

    run: Callable[[Operands], jax.Array]
    """Returns [B, T, N, H] in the dtype of q."""
    platforms: tuple[str, ...] = ()
    """Supported platforms of the mesh (`nn.sharding.platform`); empty: all."""
    softcap: bool = True
    bias: bool = True
    dropout: bool = True
    sinks: bool = False
    conditions: frozenset[str] | None = None
    """Supported `Mask.conditions`; None: all."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    head_multiple: int = 1
    """H must be a multiple of this number."""
    head_limit: Callable[[], int] | None = None
    """Maximum H; None: no limit."""
    extra: str | None = None
    """Extra that installs the library of the same name; None: none is needed."""


@dataclasses.dataclass(frozen=True)
class Needs:
    """Requirements on a backend that are known when a function is traced."""

    dtype: str
    head_size: int
    softcap: bool
    bias: bool
    dropout: bool
    conditions: frozenset[str]
    """`Mask.conditions` of the masks."""
    sinks: bool = False


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | Mask | None = None,
    *,
    backend: str = "auto",
    **options: Any,
) -> jax.Array:
    """Computes `softmax(scale * q k^T) v` ("Attention Is All You Need", 2017), where G query heads share a k/v head.

    The output of a query that may attend to no key is zero, and so are its gradients.

    Args:
        q: [B, T, N, H].
        k, v: [B, S, K, H]; query head n reads key/value head n // G.
        mask: a `Mask`, or bool with four axes, broadcastable to [B, N, T, S]; True = may attend. None: no masking.
        backend: a name in `config.kinds.BACKENDS`.
        options: `bias`, `sinks`, `scale`, `softcap`, `dropout_rate` and `dropout_key`, as in `Operands.pack`.

    Returns:
        [B, T, N, H] in the dtype of q; scores and softmax are float32.

    Raises:
        UserError: the backend is unknown, or does not support the platform of the mesh or the inputs.
    """
    operands = Operands.pack(q, k, v, mask, **options)
    run = get_backend(backend, needs_of(operands)).run
    if not q.shape[1] or not k.shape[1]:
        return jnp.zeros((*q.shape[:3], v.shape[-1]), q.dtype)
    return run(operands)


def needs_of(x: Operands) -> Needs:
    """Returns the requirements of the operands on a backend."""
    return Needs(
        dtype=str(x.q.dtype),
        head_size=x.q.shape[-1],
        softcap=x.scoring.softcap is not None,
        bias=x.bias is not None,
        dropout=x.scoring.dropout_rate > 0,
        conditions=x.mask.conditions,
        sinks=x.sinks is not None,
    )


def get_backend(name: str, needs: Needs) -> Backend:
    """Returns the backend `name`, which must support `needs` on the current mesh.

    Raises:
        UserError: it is unknown or does not support them; the message names the backends that do.
    """
    if problem := unsupported_reason(name, needs):
        supported = ", ".join(other for other in kinds.BACKENDS if not unsupported_reason(other, needs))
        raise UserError(f"model.attention_backend={name!r} {problem}; write one of {supported}")
    backend: Backend = kinds.load(kinds.BACKENDS, name)
    return backend


def unsupported_reason(name: str, needs: Needs) -> str | None:
    """Returns why the backend `name` does not support `needs` on the current mesh; None if it does."""
    if name not in kinds.BACKENDS:
        return "is not known"
    backend, platform = kinds.load(kinds.BACKENDS, name), sharding.platform()
    if backend.platforms and platform not in backend.platforms:
        return f"needs a {' or '.join(backend.platforms)}, but this mesh is on a {platform}"
    if needs.softcap and not backend.softcap:
        return "cannot cap scores (model.attention_softcap)"
    if needs.bias and not backend.bias:
        return "cannot add a bias to scores (model.position)"
    if needs.sinks and not backend.sinks:
        return "cannot add sinks to the softmax (model.attention_sinks)"
    if needs.dropout and not backend.dropout:
        return "cannot drop attention weights (model.attention_dropout)"
    if needs.dtype not in backend.dtypes:
        return f"computes in {' or '.join(backend.dtypes)}, not {needs.dtype} (model.dtype)"
    limit = backend.head_limit() if backend.head_limit else None
    if needs.head_size % backend.head_multiple or needs.head_size > (limit or needs.head_size):
        most = f" and at most {limit}" if limit else ""
        multiple = f"needs a head size that is a multiple of {backend.head_multiple}"
        return f"{multiple}{most}, not {needs.head_size} (model.head_dim)"
    unsupported = [] if backend.conditions is None else sorted(needs.conditions - backend.conditions)
    if unsupported:
        return f"does not support {', '.join(map(CONDITION_NAMES.__getitem__, unsupported))}"
    if backend.extra and checks.not_installed([backend.extra]):
        return f"needs {backend.extra}: pip install -e '.[{backend.extra}]', with Python 3.12 or later"
    return None
