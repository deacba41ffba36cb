"""`attention_backend="auto"`: the fastest backend that can do what is needed on the devices of the mesh.

Chosen for each call when it is traced, by T and S alone of all sizes, so that a row's result does not depend on its
batch.
"""

import jax

from tformer_jax import axes
from tformer_jax.config import kinds
from tformer_jax.nn import sharding
from tformer_jax.nn.attention_ops.core import Backend, Needs, Operands, lack, needs_of
from tformer_jax.nn.masks import Mask

SCORES = 2**19
"""Scores of one head, T x S, up to which `reference` is taken and above which `blockwise` is.

As configs/results/benchmarks/attention_backends.json has it for a CPU: with 1,024 x 1,024 scores `blockwise` is faster
and needs less than half of the memory; with 512 x 512 it is slower. Other devices are unmeasured.
"""
OF_PLATFORM = {"gpu": "cudnn", "tpu": "splash"}
"""What is taken before these, by the platform of the mesh, where it can do what is needed. Unmeasured."""


def choose(needs: Needs, T: int, S: int) -> str:
    """The name of the backend for T queries and S keys."""
    if sharding.mesh_axes(axes.LENGTH, T):
        return "reference"  # others gather all queries on every device, but for "ring", which users choose
    fused = OF_PLATFORM.get(sharding.platform())
    odd = fused == "cudnn" and (T % 2 or S % 2)  # which cuDNN refuses beside a mask
    if fused and not odd and not lack(fused, needs):
        return fused
    return "reference" if T * S <= SCORES else "blockwise"


def beside_cache(name: str, T: int, mask: Mask) -> str:
    """What stands in for the backend `name` where T queries attend to a cache, under `mask`.

    One query, or beams, which only an array tells apart, need no more than `reference`.
    """
    if T == 1 or mask.explicit is not None:
        return "reference"
    knows = kinds.load(kinds.BACKENDS, name).rules
    return name if knows is None or "positions" in knows else "auto"


def auto(x: Operands) -> jax.Array:
    """The backend of `choose`."""
    out: jax.Array = kinds.load(kinds.BACKENDS, choose(needs_of(x), x.q.shape[1], x.k.shape[1])).run(x)
    return out


AUTO = Backend(auto)
