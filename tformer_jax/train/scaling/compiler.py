"""What XLA makes of a step beyond what the program says, by the kind of device it compiles for."""

import dataclasses

from tformer_jax.train.chips import Chip


@dataclasses.dataclass(frozen=True)
class Compiler:
    """The defaults are what a program on a GPU can be held to, and no less than it needs."""

    fuses: bool = False
    """Whatever elementwise operations give is computed again in the backward pass, inside what reads it."""
    copies_state: bool = False
    """The optimizer's old state is copied before the step; its buffers hold other values until the new one is there."""
    reduces_in_place: bool = True
    """The sum of all devices' gradients takes the place of a device's own."""
    scatters: bool = True
    """A device receives its part of a sum only; else the whole, of which it cuts its part."""
    gathers_again: bool = True
    """Parameters that rest in parts are put together anew for the backward pass; else they stay there."""
    merges_sums: bool = True
    """The gradients of what queries, keys and values are made of are added up before the devices sum them."""
    keeps_remat: bool = True
    """What `model.remat` computes again is not merged with the first time; loops over layers keep it in any case."""
    dropped_bytes: int = 1
    """Kept for each number that dropout decides about: a boolean, or the random bits that it is read from."""
    bfloat16: bool = True
    """Arrays of bfloat16 are held and sent as such; else as float32."""


GPU = Compiler()
TPU = Compiler(fuses=True)
CPU = Compiler(
    copies_state=True,
    reduces_in_place=False,
    scatters=False,
    gathers_again=False,
    merges_sums=False,
    keeps_remat=False,
    dropped_bytes=8,
    bfloat16=False,
)
"""XLA's host platform, on which eight devices of one process are compared with what is predicted."""


def of(chip: Chip | None) -> Compiler:
    """XLA for a chip; without one, for a GPU."""
    return TPU if chip and chip.kind.startswith("TPU") else GPU
