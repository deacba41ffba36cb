"""Settings of sharding over devices."""

import dataclasses
import re
from typing import Any, ClassVar

from tformer_jax.config.fields import SAME_TRAINING, ConfigError, Section, nearest, setting

MESH_AXES = ("data", "fsdp", "expert", "sequence", "tensor")
"""The mesh axes, ordered from the slowest to the fastest interconnect."""
MESH_PRESETS = {
    "dp": {"data": -1},
    "zero1": {"data": -1},
    "fsdp": {"fsdp": -1},
    "tp": {"tensor": -1},
    "fsdp+tp": {"fsdp": -1, "tensor": 2},
}
"""Sizes of mesh axes by preset; other axes have size 1."""


def _size(meaning: str) -> int | None:
    return setting(None, f"{meaning}; None: from the preset; -1: all remaining devices", low=-1)


@dataclasses.dataclass(frozen=True)
class ParallelConfig(Section):
    """How the model and its batches are sharded over devices.

    Results do not depend on it, except for rounding and, with `sequence`, for the random numbers of attention
    dropout.
    """

    path: ClassVar[str] = "parallel"
    resumable: ClassVar[str | None] = SAME_TRAINING

    preset: str = setting(
        "dp",
        "dp: shard the batch; zero1: also the optimizer state; fsdp: also the parameters; tp: shard heads, FFN widths "
        "and vocabularies; fsdp+tp: both",
        choices=tuple(MESH_PRESETS),
    )
    data: int | None = _size("devices that split the batch, each with all parameters")
    fsdp: int | None = _size("devices that split the batch and the model width of parameters")
    tensor: int | None = _size("devices that split heads, FFN widths and vocabularies")
    sequence: int | None = _size(
        "devices that shard the sequence dimension; model.attention_backend='ring' splits attention too"
    )
    expert: int | None = _size("devices that split the batch and the experts of FFNs")
    start_seconds: int = setting(300, "seconds within which all processes must start", low=1)
    lost_seconds: int = setting(
        60, "seconds without a heartbeat after which a process counts as lost and all processes end", low=2
    )

    def check(self) -> None:
        for name in MESH_AXES:
            if getattr(self, name) == 0:
                raise self.error(name, "must be -1 or at least 1")
        filling = [name for name in MESH_AXES if getattr(self, name) == -1]
        if len(filling) > 1:
            raise self.error(
                filling[0], f"parallel.{filling[1]} is also -1; only one axis can take all remaining devices"
            )
        for name, size in MESH_PRESETS[self.preset].items():
            if size == -1 and self.preset != "dp" and filling and filling != [name] and getattr(self, name) is None:
                raise self.error(
                    "preset",
                    f"gives {name} all remaining devices, and so does parallel.{filling[0]}=-1: write one size",
                )

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each mesh axis; at most one of them is -1."""
        written = {name: size for name in MESH_AXES if (size := getattr(self, name)) is not None}
        preset = MESH_PRESETS[self.preset]
        if -1 in written.values():
            preset = {name: 1 if size == -1 else size for name, size in preset.items()}
        return dict.fromkeys(MESH_AXES, 1) | preset | written


def read_mesh(text: str) -> ParallelConfig:
    """Parses a mesh, as after `--mesh`: sizes such as data=4,fsdp=8, a preset, or both, as in zero1,tensor=2.

    Axes not named have the preset's size, or 1.

    Raises:
        ConfigError: a preset or an axis is unknown, an axis is written twice, or a size is not a number.
    """
    first, *rest = text.split(",")
    preset = None if "=" in first else first
    if preset is not None and preset not in MESH_PRESETS:
        raise ConfigError(f"mesh {text!r}: {first!r} is neither AXIS=SIZE nor a preset{nearest(first, MESH_PRESETS)}")
    sizes: dict[str, Any] = {}
    for entry in rest if preset else (first, *rest):
        name, _, size = entry.partition("=")
        if name not in MESH_AXES:
            raise ConfigError(f"mesh {text!r}: {name!r} is not an axis of the mesh{nearest(name, MESH_AXES)}")
        if not re.fullmatch(r"-1|[1-9]\d*", size):
            raise ConfigError(
                f"mesh {text!r}: {name} must be at least 1, or -1 for all remaining devices, such as {name}=8"
            )
        if name in sizes:
            raise ConfigError(f"mesh {text!r}: {name} is written twice; write each axis once")
        sizes[name] = int(size)
    return ParallelConfig(preset=preset, **sizes) if preset else ParallelConfig(**dict.fromkeys(MESH_AXES, 1) | sizes)
