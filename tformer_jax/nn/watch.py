"""Exposes intermediate values of modules on request.

`model.apply(..., mutable=["watch"])` also returns the collection "watch", a tree by module name. Without it, nothing is
computed or stored: the traced program is the same. `inference.watch` reads the collection.

=====================  ============  ==================================================================
module                 name          value
=====================  ============  ==================================================================
attention              `operands`    `attention_ops.Operands`, after norms, rotation and KV cache
`Residual`             `stream`      [B, T, D], the residual stream before the sub-layer
`Residual`             `added`       [B, T, D], what the sub-layer adds to it, before dropout
`Stack`                `stream`      [B, T, D], the residual stream after all layers
=====================  ============  ==================================================================

Each value is in a tuple, as `flax.linen.Module.sow` stores it: of one element, or with `model.shared_layers` of one for
each use of the layer. Scanned layers have a leading axis of repetitions in each leaf. Attention to a paged KV cache is
not watched, and neither is `LatentAttention` with a cache.
"""

from typing import Any

from flax import linen as nn

COLLECTION = "watch"


def watch(module: nn.Module, **values: Any) -> None:
    """Stores values, which are pytrees, if the collection "watch" is requested."""
    if module.is_mutable_collection(COLLECTION) and not module.is_initializing():
        for name, value in values.items():
            module.sow(COLLECTION, name, value)
