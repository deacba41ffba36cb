"""Reads the collectives of compiled programs."""

import math
import re
from typing import NamedTuple

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
OPERATION = re.compile(rf"= (\(.*?\)|\S+) ({'|'.join(KINDS)})(?:-start)?\(")


class Collective(NamedTuple):
    """One collective operation on one device."""

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the floating-point results."""
    name: str
    """Name of the operation in the traced function."""

    @property
    def largest(self) -> int:
        """Number of elements in the largest result."""
        return max(map(math.prod, self.shapes), default=0)


def collectives(text: str) -> list[Collective]:
    """Returns the collectives of a compiled program (`compiled.as_text()`), in program order."""
    actual = []
    for line in text.splitlines():
        if operation := OPERATION.search(line):
            shapes = tuple(
                tuple(int(size) for size in sizes.split(",") if size)
                for sizes in re.findall(r"\b(?:f32|bf16)\[([\d,]*)\]", operation[1])
            )
            name = re.search(r'op_name="([^"]*)"', line)
            actual.append(Collective(operation[2], shapes, name[1] if name else ""))
    return actual
