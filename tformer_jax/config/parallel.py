"""The settings that spread one computation over many devices."""

import dataclasses
from typing import ClassVar

from tformer_jax.config.fields import Section, setting

MESH_AXES = ("data", "fsdp", "expert", "sequence", "tensor")
"""The axes of the mesh, from that whose neighbours are far apart to that whose neighbours are close."""
PRESETS = {
    "dp": {"data": -1},
    "zero1": {"data": -1},
    "fsdp": {"fsdp": -1},
    "tp": {"tensor": -1},
    "fsdp+tp": {"fsdp": -1, "tensor": 2},
}
"""Sizes of mesh axes; those that are not named have size 1."""


def _size(meaning: str) -> int | None:
    return setting(None, f"{meaning}; None: what the preset says; -1: all devices that are left", low=-1)


@dataclasses.dataclass(frozen=True)
class ParallelConfig(Section):
    """How a model and its batches are spread over devices. Results do not depend on it."""

    path: ClassVar[str] = "parallel"

    preset: str = setting(
        "dp",
        "dp: every device has the whole model; zero1: the optimizer's state is split; fsdp: parameters, too; tp: heads "
        "and FFNs are split; fsdp+tp: both",
        choices=tuple(PRESETS),
    )
    data: int | None = _size("devices that share a batch, each with all parameters")
    fsdp: int | None = _size("devices that share a batch and the model width of parameters")
    tensor: int | None = _size("devices that share heads, FFN widths and vocabularies")
    sequence: int | None = _size(
        "devices that share the positions of a row; model.attention_backend='ring' keeps it so in attention"
    )
    expert: int | None = _size("devices that share a batch and the experts of FFNs")
    start_seconds: int = setting(300, "how long processes wait for each other when they start", low=1)
    lost_seconds: int = setting(60, "a process of which nothing is heard for so long is lost, and all end", low=2)

    def check(self) -> None:
        for name in MESH_AXES:
            if getattr(self, name) == 0:
                raise self.error(name, "must be -1 or at least 1")
        filling = [name for name in MESH_AXES if getattr(self, name) == -1]
        if len(filling) > 1:
            raise self.error(filling[0], f"parallel.{filling[1]} is -1, too; only one axis can have all that is left")

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each mesh axis, of which at most one is -1."""
        written = {name: size for name in MESH_AXES if (size := getattr(self, name)) is not None}
        preset = PRESETS[self.preset]
        if -1 in written.values():
            preset = {name: 1 if size == -1 else size for name, size in preset.items()}
        return dict.fromkeys(MESH_AXES, 1) | preset | written
