"""Reads the HLO text of a compiled program: its computations, and the collectives among their instructions."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) .*\{$")
_REDUCE_SCATTER = re.compile(r"^%?(?P<name>all-reduce-scatter[\w.\-]*) .*-> (?P<result>\S+) \{$", re.MULTILINE)
"""A reduce-scatter for TPUs: a fused computation with an all-reduce, whose result each device keeps in part."""
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
    """Collective operations of one kind and result shape."""

    kind: str
    shape: str
    """Shape of the result on one device, such as bf16[4096,14336]; several are joined by "+"."""
    size: int
    """Bytes of the result on one device."""
    devices: int
    """Number of devices that take part in one operation."""
    times: int
    """Number of executions on one device per call of the program."""

    @property
    def bytes_sent(self) -> float:
        """Total bytes that one device sends, with a bandwidth-optimal algorithm."""
        n = self.devices
        factor = {"all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1, "collective-permute": 1.0}
        return self.times * self.size * factor.get(self.kind, (n - 1) / n)


def collectives(text: str, devices: int) -> list[Collective]:
    """Returns the collectives of a program (`compiled.as_text()`) on `devices` devices, most bytes sent first.

    An operation in a loop counts once per iteration if the loop's condition states a limit, else once.
    """
    operations: dict[tuple[str, ...], tuple[Collective, int]] = {}
    lines, entry = computations(text)
    scattered = dict(_REDUCE_SCATTER.findall(text))
    for name, times in _times(lines, entry).items():
        for number, line in enumerate(lines[name]):
            if operation := _COLLECTIVE.search(line):
                collective, source = _collective(operation, line, devices), _SOURCE.search(line)
                if name in scattered:
                    shape, size = _shape(_arrays(scattered[name]))
                    collective = collective._replace(kind="reduce-scatter", shape=shape, size=size)
                # an operation spread over several fusions keeps its channel and source, and counts once
                key = (collective.kind, collective.shape, *source.groups()) if source else (name, str(number))
                operations[key] = collective, times
    counts: Counter[Collective] = Counter()
    for collective, times in operations.values():
        counts[collective] += times
    merged = [collective._replace(times=times) for collective, times in counts.items()]
    return sorted(merged, key=lambda collective: collective.bytes_sent, reverse=True)


def computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Returns the lines of each computation by its name, and the name of the entry computation."""
    named: dict[str, list[str]] = {}
    lines, entry = [], ""
    for line in text.splitlines():
        if heading := _COMPUTATION.match(line):
            lines = named.setdefault(heading["name"], [])
            entry = heading["name"] if heading["entry"] else entry
        else:
            lines.append(line)
    return named, entry


def _times(lines: dict[str, list[str]], entry: str) -> dict[str, int]:
    """Returns the number of executions of each computation per call of the program."""
    times: defaultdict[str, int] = defaultdict(int)

    def run(name: str, repeated: int) -> None:
        times[name] += repeated
        for called, factor in _calls(lines, name):
            if called in lines:
                run(called, repeated * factor)

    run(entry, 1)
    return times


def _calls(lines: dict[str, list[str]], name: str) -> Iterator[tuple[str, int]]:
    for line in lines[name]:
        factor = 1
        if loop := _LOOP.search(line):
            limits = (_LIMIT.search(condition) for condition in lines[loop["condition"]])
            factor = max((int(limit["limit"]) for limit in limits if limit), default=1)
        for called in _CALLED.findall(line):
            yield from ((computation.strip().lstrip("%"), factor) for computation in called.split(","))


def _collective(operation: re.Match[str], line: str, devices: int) -> Collective:
    arrays, kind = _arrays(operation["result"]), operation["kind"]
    if operation["start"] and kind != "all-reduce":  # the tuple has operands first, counters (u32[]) last
        results = [array for array in arrays if not array[0].startswith("u32[]")]
        arrays = results[len(results) // 2 :]
    return Collective(kind, *_shape(arrays), _group(line, devices), 0)


def _arrays(result: str) -> list[tuple[str, int]]:
    """Returns the shape and the bytes of each array in the type of a result."""
    return [(array[0], _bytes(array["type"], array["sizes"])) for array in _ARRAY.finditer(result)]


def _shape(arrays: list[tuple[str, int]]) -> tuple[str, int]:
    """Returns the shapes of all arrays, and their bytes in total."""
    return " + ".join(name for name, _ in arrays), sum(size for _, size in arrays)


def _group(line: str, devices: int) -> int:
    """Returns the number of devices in one group of a collective."""
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
    bits = 8 if dtype == "pred" else int(re.sub(r"\D", "", dtype))
    return math.prod(int(size) for size in sizes.split(",") if size) * bits // 8
