"""`attention_backend="auto"`: the fastest backend that can do what is needed on this device.

Chosen for each call when it is traced, by T and S alone of all sizes, so that a row's result does not depend on its
batch.
"""

import jax

from tformer_jax import axes
from tformer_jax.config import kinds
from tformer_jax.nn import sharding
from tformer_jax.nn.attention_ops.core import Backend, Bias, Needs, Scoring, lack, needs_of
from tformer_jax.nn.masks import Mask

SCORES = 2**19
"""Scores of one head, T x S, up to which `reference` is taken and above which `blockwise` is.

As configs/results/benchmarks/attention_backends.json has it for a CPU: with 1,024 x 1,024 scores `blockwise` is faster
and needs less than half of the memory; with 512 x 512 it is slower. Other devices are unmeasured.
"""
OF_DEVICE = {"gpu": ("cudnn",), "tpu": ("pallas",)}
"""By `jax.default_backend()`: what is taken before these, where it can do what is needed. Unmeasured."""


def choose(needs: Needs, T: int, S: int) -> str:
    """The name of the backend for T queries and S keys."""
    if sharding.mesh_axes(axes.LENGTH, T):
        return (
            "reference"  # blocks would bring all queries to every device; "ring" does not, and is for users to choose
        )
    for name in OF_DEVICE.get(jax.default_backend(), ()):
        if not lack(name, needs):
            return name
    return "reference" if T * S <= SCORES else "blockwise"


def beside_cache(name: str, T: int, mask: Mask) -> str:
    """What stands in for the backend `name` where T queries attend to a cache, under `mask`.

    One query, or beams, which only an array tells apart, need no more than `reference`.
    """
    if T == 1 or mask.explicit is not None:
        return "reference"
    knows = kinds.load(kinds.BACKENDS, name).rules
    return name if knows is None or "positions" in knows else "auto"


def auto(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Mask,
    bias: Bias | None,
    scoring: Scoring,
    dropout_key: jax.Array | None,
) -> jax.Array:
    """The backend of `choose`."""
    name = choose(needs_of(q, mask, bias, scoring), q.shape[1], k.shape[1])
    out: jax.Array = kinds.load(kinds.BACKENDS, name).run(q, k, v, mask, bias, scoring, dropout_key)
    return out


AUTO = Backend(auto)
