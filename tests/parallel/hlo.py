"""What a compiled program sends between devices."""

import math
import re
from typing import NamedTuple

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
OPERATION = re.compile(rf"= (\(.*?\)|\S+) ({'|'.join(KINDS)})(?:-start)?\(")


class Collective(NamedTuple):
    """One of its operations on one device."""

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    """Of floating-point results."""
    name: str
    """Where in the traced function it comes from."""

    @property
    def largest(self) -> int:
        """Numbers in the largest result."""
        return max(map(math.prod, self.shapes), default=0)


def collectives(text: str) -> list[Collective]:
    """The collectives of a compiled program (`compiled.as_text()`), in the order of the text."""
    found = []
    for line in text.splitlines():
        if operation := OPERATION.search(line):
            shapes = tuple(
                tuple(int(size) for size in sizes.split(",") if size)
                for sizes in re.findall(r"\b(?:f32|bf16)\[([\d,]*)\]", operation[1])
            )
            name = re.search(r'op_name="([^"]*)"', line)
            found.append(Collective(operation[2], shapes, name[1] if name else ""))
    return found
