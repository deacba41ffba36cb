"""What a compiled program sends between devices, read from its text."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
ITEM_BITS = {"pred": 8, "bf16": 16}
"""Of types whose names do not end with their bits."""

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) .*\{$")
_COLLECTIVE = re.compile(rf"= (?P<result>\(.*?\)|\S+) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\(")
_ARRAY = re.compile(r"\b(?P<type>pred|bf16|[fsu]\d+)\[(?P<sizes>[\d,]*)\]")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|branch_computations)=\{?(%[\w.\-]+(?:, ?%[\w.\-]+)*)")
_LOOP = re.compile(r"\bwhile\(.*condition=%(?P<condition>[\w.\-]+)")
_LIMIT = re.compile(r"= s32\[\]\S* constant\((?P<limit>\d+)\)")
_SOURCE = re.compile(r'channel_id=(\d+),.*op_name="([^"]*)"')
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[(?P<axes>[^\]]*)\] \{(?P<used>[^}]*)\}")
_LISTED_GROUPS = re.compile(r"replica_groups=\{\{(?P<first>[\d,]*)\}")
_IOTA_GROUPS = re.compile(r"replica_groups=\[\d+,(?P<size>\d+)\]<=")


class Collective(NamedTuple):
    """Operations of one kind on arrays of one shape."""

    kind: str
    shape: str
    """Of the result on one device, such as bf16[4096,14336]; several are joined by "+"."""
    size: int
    """Bytes of that."""
    devices: int
    """That take part in one of them."""
    times: int
    """How often one device runs it in one call of the program."""

    @property
    def sent(self) -> float:
        """Bytes that a device sends in all of them, by an algorithm that sends as few as possible."""
        n = self.devices
        factor = {"all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1, "collective-permute": 1.0}
        return self.times * self.size * factor.get(self.kind, (n - 1) / n)


def collectives(text: str, devices: int) -> list[Collective]:
    """The collectives of a program (`compiled.as_text()`) on a number of devices, those that send the most first.

    An operation in a loop counts as often as the loop's condition lets it run, once where that does not say.
    """
    operations: dict[tuple[str, ...], tuple[Collective, int]] = {}
    computations, entry = _computations(text)
    for name, times in _times(computations, entry).items():
        for number, line in enumerate(computations[name]):
            if operation := _COLLECTIVE.search(line):
                one, source = _collective(operation, line, devices), _SOURCE.search(line)
                # parts of one operation that is spread over several fusions keep its channel and its source
                key = (one.kind, one.shape, *source.groups()) if source else (name, str(number))
                operations[key] = one, times
    found: Counter[Collective] = Counter()
    for one, times in operations.values():
        found[one] += times
    merged = [one._replace(times=times) for one, times in found.items()]
    return sorted(merged, key=lambda one: one.sent, reverse=True)


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation, and the name of the first one that runs."""
    found: dict[str, list[str]] = {}
    lines, entry = [], ""
    for line in text.splitlines():
        if heading := _COMPUTATION.match(line):
            lines = found.setdefault(heading["name"], [])
            entry = heading["name"] if heading["entry"] else entry
        else:
            lines.append(line)
    return found, entry


def _times(computations: dict[str, list[str]], entry: str) -> dict[str, int]:
    """How often each computation runs in one call of the program."""
    times: defaultdict[str, int] = defaultdict(int)

    def run(name: str, repeated: int) -> None:
        times[name] += repeated
        for called, factor in _calls(computations, name):
            if called in computations:
                run(called, repeated * factor)

    run(entry, 1)
    return times


def _calls(computations: dict[str, list[str]], name: str) -> Iterator[tuple[str, int]]:
    for line in computations[name]:
        factor = 1
        if loop := _LOOP.search(line):
            limits = (_LIMIT.search(condition) for condition in computations[loop["condition"]])
            factor = max((int(limit["limit"]) for limit in limits if limit), default=1)
        for called in _CALLED.findall(line):
            yield from ((one.strip().lstrip("%"), factor) for one in called.split(","))


def _collective(operation: re.Match[str], line: str, devices: int) -> Collective:
    arrays = [(array[0], _bytes(array["type"], array["sizes"])) for array in _ARRAY.finditer(operation["result"])]
    kind = operation["kind"]
    if operation["start"] and kind != "all-reduce":  # operands come first, and counters of a permutation last
        results = [array for array in arrays if not array[0].startswith("u32[]")]
        arrays = results[len(results) // 2 :]
    shape = " + ".join(name for name, _ in arrays)
    return Collective(kind, shape, sum(size for _, size in arrays), _group(line, devices), 0)


def _group(line: str, devices: int) -> int:
    """How many devices take part in a collective together."""
    if groups := _MESH_GROUPS.search(line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", groups["axes"]))
        parts = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", groups["used"])
        return math.prod(int(part or sizes[axis]) for axis, part in parts)
    if groups := _LISTED_GROUPS.search(line):
        return groups["first"].count(",") + 1
    if groups := _IOTA_GROUPS.search(line):
        return int(groups["size"])
    return devices


def _bytes(dtype: str, sizes: str) -> int:
    bits = ITEM_BITS.get(dtype) or int(re.sub(r"\D", "", dtype))
    return math.prod(int(size) for size in sizes.split(",") if size) * bits // 8
