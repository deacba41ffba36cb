"""`scripts/benchmark.py train --operations`: where the time of a training step goes, by operation and module."""

import collections
import dataclasses
import itertools
import re
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.table import Table

from tformer_jax.benchmarks.processes import Remote
from tformer_jax.benchmarks.train_cases import Case
from tformer_jax.benchmarks.train_systems import Ours

WARM_UP_STEPS = 2
SHOWN = 25
"""Rows of the table; the JSON has all."""
CONTAINERS = {"while", "call", "conditional"}
"""Opcodes whose time is that of the operations inside, which are traced themselves."""
PRODUCTS = {"dot", "convolution", "ragged-dot"}
LOOPS = {"while", "body", "cond", "checkpoint", "rematted_computation", "closed_call"}
"""Names that loops and recomputation put into the paths of operations."""
COMPUTATION = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.-]+) .*\{$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(?P<name>[\w.-]+) = .*?\s(?P<opcode>[a-z][a-z0-9-]*)\(")


class Operation(NamedTuple):
    """An operation of the compiled step."""

    kind: str
    """`product`, alone or fused with others; else what XLA calls it, without its number."""
    direction: str
    """forward, backward, or update: what comes after the gradients."""
    module: str
    """Path in the model, `layers_*` for all layers of a stack; or loss, or optimizer."""


UNKNOWN = Operation("other", "", "")


class Traced(Ours):
    """Training whose steps can be traced."""

    def __init__(self, case: Case):
        super().__init__(case)
        self.step = self.step.lower(self.state, self.batch()).compile()

    def operations(self, steps: int) -> dict[str, Any]:
        """Milliseconds a step of each `Operation`, summed over threads, and of the step itself, traced and not."""
        self.steps(WARM_UP_STEPS)
        wall, _ = self.steps(steps)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder, profiler_options=options):
                traced, _ = self.steps(steps)
            (path,) = Path(folder).rglob("*.xplane.pb")
            events = list(read_events(path))
        rows = table_rows(parse(self.step.as_text()), events, steps)
        return {
            "milliseconds": 1000 * statistics.median(wall),
            "traced_milliseconds": 1000 * statistics.mean(traced),
            "summed_milliseconds": sum(row["milliseconds"] for row in rows),
            "operations": rows,
        }


def measure_operations(cases: Sequence[Case], steps: int) -> dict[str, Any]:
    """Traces each case in a process of its own, prints a table, and gives what `--record` writes."""
    found = []
    for case in cases:
        with Remote("tformer_jax.benchmarks.operations:Traced", case) as traced:
            shape = {"case": case.name, "rows": case.rows, "length": case.length, "dtype": case.cfg.model.dtype}
            found.append(shape | traced.call("operations", steps))
        show(found[-1])
    return {"cases": found}


def read_events(path: Path) -> Iterator[tuple[str, float]]:
    """Name and milliseconds of each operation in a trace, by whatever thread or device it was done."""
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            for event in line.events:
                if event.duration_ns and any(key == "hlo_op" for key, _ in event.stats):
                    yield event.name, event.duration_ns / 1e6


def table_rows(known: Mapping[str, Operation], events: Iterable[tuple[str, float]], steps: int) -> list[dict[str, Any]]:
    """Events by operation, the most time first; names that `known` has not are those of other programs."""
    spent: dict[Operation, float] = collections.defaultdict(float)
    count: collections.Counter[Operation] = collections.Counter()
    for name, milliseconds in events:
        operation = known.get(name, UNKNOWN)
        if operation.kind not in CONTAINERS:
            spent[operation] += milliseconds / steps
            count[operation] += 1
    total = sum(spent.values())
    return [
        {**operation._asdict(), "count": count[operation] / steps, "milliseconds": time, "share": time / total}
        for operation, time in sorted(spent.items(), key=lambda item: -item[1])
    ]


@dataclasses.dataclass
class Instruction:
    """A line of HLO."""

    opcode: str
    op_name: str
    calls: str | None


def parse(hlo: str) -> dict[str, Operation]:
    """The operations of a compiled program, `compiled.as_text()`, by the names that traces have."""
    computations: dict[str, dict[str, Instruction]] = {}
    inside: dict[str, Instruction] = {}
    for line in hlo.splitlines():
        if begins := COMPUTATION.match(line):
            inside = computations.setdefault(begins["name"], {})
        elif found := INSTRUCTION.match(line):
            op_name, calls = re.search(r'op_name="(.*?)"', line), re.search(r"calls=%?([\w.-]+)", line)
            inside[found["name"]] = Instruction(found["opcode"], op_name[1] if op_name else "", calls and calls[1])
    return {
        name: describe(name, instruction, list(computations.get(instruction.calls or "", {}).values()))
        for instructions in computations.values()
        for name, instruction in instructions.items()
    }


def describe(name: str, instruction: Instruction, fused: Sequence[Instruction]) -> Operation:
    """What an instruction is; the place of a fusion is that of its product, else its own, else one inside."""
    products = [part for part in (instruction, *fused) if part.opcode in PRODUCTS]
    if instruction.opcode in CONTAINERS:
        kind = instruction.opcode
    else:
        kind = "product" if products else re.sub(r"(\.\d+|\.clone)+$", "", name)
    op_name = next((part.op_name for part in (*products, instruction, *fused) if part.op_name), "")
    return Operation(kind, *place(op_name))


def place(op_name: str) -> tuple[str, str]:
    """Direction and module of a path such as `jit(step)/transpose(jvp(Model))/decoder/layers_0/ffn/expand/dot_general`.

    Names in parentheses are transformations; `module.method` stands for its module; the last one is a primitive.
    """
    if not op_name:
        return "", ""
    direction = "backward" if "transpose(" in op_name else "forward" if "jvp(" in op_name else "update"
    parts = [part for part in op_name.split("/")[:-1] if "(" not in part and part not in LOOPS]
    names = [part if "->" in part else part.partition(".")[0] for part in parts]
    scopes = [name for name, _ in itertools.groupby(names) if f"({name})" not in op_name]
    if not scopes:
        return direction, "optimizer" if direction == "update" else "loss"
    return direction, re.sub(r"layers_\d+", "layers_*", "/".join(scopes))


def show(case: Mapping[str, Any]) -> None:
    """The operations that take the most time, and their sum beside the time of the step."""
    wall, traced, total = (case[f"{kind}milliseconds"] for kind in ("", "traced_", "summed_"))
    title = f"{case['case']}: {case['rows']} x {case['length']} tokens, {case['dtype']}"
    caption = (
        f"{wall:.1f} ms a step, {traced:.1f} while it is traced; all operations, summed over threads: {total:.1f} ms"
    )
    table = Table("ms/step", "share", "count", "operation", "pass", "module", title=title, caption=caption)
    for column in table.columns[:3]:
        column.justify = "right"
    for row in case["operations"][:SHOWN]:
        numbers = f"{row['milliseconds']:.2f}", f"{row['share']:.1%}", f"{row['count']:.0f}"
        table.add_row(*numbers, row["kind"], row["direction"], row["module"])
    Console(width=120).print(table)
