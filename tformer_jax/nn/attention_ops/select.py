"""`attention_backend="auto"`: the fastest backend that supports the inputs on the current mesh.

It is selected for each call at trace time. The only sizes that matter are T and S, so that the result of a row does
not depend on the batch size.
"""

import jax

from tformer_jax import axes
from tformer_jax.config import kinds
from tformer_jax.nn import sharding
from tformer_jax.nn.attention_ops.core import Backend, Needs, Operands, needs_of, unsupported_reason
from tformer_jax.nn.masks import Mask

MAX_REFERENCE_SCORES = 2**19
"""Maximum number of scores per head, T x S, for which `reference` is used; above it, `blockwise` is.

Measured on a CPU in configs/results/benchmarks/attention_backends.json: with 1,024 x 1,024 scores `blockwise` is
faster and XLA plans half of the memory; with 512 x 512 it is slower. Unmeasured in float32 on other devices.
"""
PLATFORM_BACKENDS = {"gpu": "cudnn", "tpu": "splash"}
"""Preferred backend by the platform of the mesh, used if it supports the inputs.

On an H200, in configs/results/benchmarks/attention_h200.json, cuDNN is the fastest from 1,024 tokens on, and 5 to 10
times as fast as `reference`. `splash` is unmeasured.
"""


def choose(needs: Needs, T: int, S: int) -> str:
    """Returns the name of the backend for T queries and S keys."""
    if sharding.mesh_axes(axes.LENGTH, T):
        return "reference"  # other backends, except "ring" (by name only), gather all queries on every device
    fused = PLATFORM_BACKENDS.get(sharding.platform())
    odd = fused == "cudnn" and (T % 2 or S % 2)  # cuDNN rejects odd lengths with a mask
    if fused and not odd and not unsupported_reason(fused, needs):
        return fused
    return "reference" if T * S <= MAX_REFERENCE_SCORES else "blockwise"


def backend_for_cache(name: str, T: int, mask: Mask) -> str:
    """Returns the backend to use instead of `name` when T queries attend to a cache under `mask`.

    It is `reference` for one query, and for beams, which need an explicit mask; and `auto` instead of a backend that
    does not support positions.
    """
    if T == 1 or mask.explicit is not None:
        return "reference"
    supported = kinds.load(kinds.BACKENDS, name).conditions
    return name if supported is None or "positions" in supported else "auto"


def auto(x: Operands) -> jax.Array:
    """Runs the backend that `choose` selects."""
    out: jax.Array = kinds.load(kinds.BACKENDS, choose(needs_of(x), x.q.shape[1], x.k.shape[1])).run(x)
    return out


AUTO = Backend(auto, sinks=True)
