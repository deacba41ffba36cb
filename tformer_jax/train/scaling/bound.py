"""The highest utilisation that a chip's arithmetic and links leave possible."""

import dataclasses
import math
from collections.abc import Sequence

from tformer_jax.config import MESH_AXES
from tformer_jax.models import cost, registry
from tformer_jax.train.chips import Chip
from tformer_jax.train.scaling.layout import Layout
from tformer_jax.train.scaling.traffic import RING, Transfer

TRAINING = 3
"""FLOPs of a step as a multiple of the forward pass: the backward pass has two products for each."""


@dataclasses.dataclass(frozen=True)
class Bound:
    """Seconds of one step on a device, at the vendor's peak rates."""

    useful: float
    """Of the products that the model's formula asks for."""
    compute: float
    """Of all products, those that `model.remat` and `train.loss_chunk` compute again included."""
    communication: float

    @property
    def without_overlap(self) -> float:
        """Utilisation (useful FLOPs of the peak) where devices wait for whatever is sent."""
        return self.useful / (self.compute + self.communication)

    @property
    def with_overlap(self) -> float:
        """Utilisation where sending and computing hide each other as far as they can."""
        return self.useful / max(self.compute, self.communication)


def bound(layout: Layout, transfers: Sequence[Transfer], chip: Chip) -> Bound:
    """Of a step on this chip: bfloat16 products at the peak rate, collectives at the full rate of the links."""
    cfg, share, rows = layout.cfg, layout.share, layout.rows * layout.cfg.train.accumulate
    forward = cost.forward_flops(share, registry.example_batch(share, rows, layout.length)) / layout.sizes["sequence"]
    head = 2 * share.dim * rows * layout.length // layout.sizes["sequence"] * (share.vocab_size or 0)
    again = (forward - head if cfg.model.remat != "none" else 0) + (head if cfg.train.loss_chunk else 0)
    useful = TRAINING * forward / chip.flops
    return Bound(useful, useful + again / chip.flops, sum(seconds(layout, transfer, chip) for transfer in transfers))


def seconds(layout: Layout, transfer: Transfer, chip: Chip) -> float:
    """Of one transfer, by the slower of what its devices send inside a node and between nodes.

    Devices are numbered as the mesh is, its last axes fastest: a node has neighbours along those. Between nodes, the
    devices of a node share what the group needs there.
    """
    local = near(layout, transfer.axes, chip)
    nodes = transfer.devices // local
    if nodes == 1:
        return transfer.sent / chip.link
    if transfer.kind == RING:
        return transfer.sent / chip.network
    whole = transfer.sent * transfer.devices / (transfer.devices - 1)
    inside, between = whole * (local - 1) / local / chip.link, whole * (nodes - 1) / nodes / local / chip.network
    return max(inside, between)


def near(layout: Layout, axes: Sequence[str], chip: Chip) -> int:
    """How many devices of a group along these axes share a node."""
    found, stride = 1, 1
    for axis in reversed(MESH_AXES):
        fitting = math.gcd(layout.sizes[axis], max(chip.node // stride, 1))
        found *= fitting if axis in axes else 1
        stride *= layout.sizes[axis]
    return found
