"""`scripts/benchmark.py train --operations`: profile of a train step by operation and module."""

import collections
import dataclasses
import itertools
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console

from tformer_jax.cli.tables import make_table
from tformer_jax.lab.aot import hlo
from tformer_jax.lab.benchmarks.processes import Remote
from tformer_jax.lab.benchmarks.train_cases import Case
from tformer_jax.lab.benchmarks.train_systems import Ours

WARM_UP_STEPS = 2
MAX_ROWS = 25
"""Maximum number of rows in the printed table; the JSON has all."""
CONTROL_FLOW = {"while", "call", "conditional"}
"""Opcodes to exclude: the operations inside are traced separately."""
PRODUCTS = {"dot", "convolution", "ragged-dot"}
LOOPS = {"while", "body", "cond", "checkpoint", "rematted_computation", "closed_call"}
"""Components that loops and rematerialization add to the paths of operations."""
WITHOUT_GRAPHS = "--xla_gpu_enable_command_buffer="
"""Flag that turns off CUDA graphs. XLA runs most GPU operations in them, and a trace does not name their parts."""
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(?P<name>[\w.-]+) = .*?\s(?P<opcode>[a-z][a-z0-9-]*)\(")


class Operation(NamedTuple):
    """An operation of the compiled step."""

    kind: str
    """`product` for matrix products, also fused ones; otherwise XLA's name without its number."""
    direction: str
    """forward, backward or update (the optimizer step)."""
    module: str
    """Path in the model, with `layers_*` for all layers of a stack; or loss, or optimizer."""


UNKNOWN = Operation("other", "", "")


class Traced(Ours):
    """Training with profiled steps."""

    def __init__(self, case: Case):
        super().__init__(case)
        self.step = self.step.lower(self.state, self.batch()).compile()

    def operations(self, steps: int) -> dict[str, Any]:
        """Returns milliseconds per step, by `Operation` (summed over threads) and total, with and without tracing."""
        self.steps(WARM_UP_STEPS)
        wall, _ = self.steps(steps)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder, profiler_options=options):
                traced, _ = self.steps(steps)
            (path,) = Path(folder).rglob("*.xplane.pb")
            events = list(iterate_events(path))
        rows = table_rows(parse_program(self.step.as_text()), events, steps)
        return {
            "milliseconds": 1000 * wall,
            "traced_milliseconds": 1000 * traced,
            "summed_milliseconds": sum(row["milliseconds"] for row in rows),
            "operations": rows,
        }


def measure_operations(cases: Sequence[Case], steps: int) -> dict[str, Any]:
    """Profiles each case in its own process, prints a table for each, and returns the record; sets XLA_FLAGS."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {WITHOUT_GRAPHS}"
    results = []
    for case in cases:
        with Remote("tformer_jax.lab.benchmarks.operations:Traced", case) as traced:
            shape = {"case": case.name, "rows": case.rows, "length": case.length, "dtype": case.cfg.model.dtype}
            results.append(shape | traced.call("operations", steps))
        print_operations(results[-1])
    return {"cases": results}


def iterate_events(path: Path) -> Iterator[tuple[str, float]]:
    """Yields name and milliseconds of each operation in a trace, of all threads and devices.

    On GPUs an event itself has the name of its kernel, which several operations may share.
    """
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            for event in line.events:
                name = next((value for key, value in event.stats if key == "hlo_op"), None)
                if event.duration_ns and name is not None:
                    yield name, event.duration_ns / 1e6


def table_rows(
    operations: Mapping[str, Operation], events: Iterable[tuple[str, float]], steps: int
) -> list[dict[str, Any]]:
    """Groups events by operation, longest first; names missing from `operations` belong to other programs."""
    spent: dict[Operation, float] = collections.defaultdict(float)
    count: collections.Counter[Operation] = collections.Counter()
    for name, milliseconds in events:
        operation = operations.get(name, UNKNOWN)
        if operation.kind not in CONTROL_FLOW:
            spent[operation] += milliseconds / steps
            count[operation] += 1
    total = sum(spent.values())
    return [
        {**operation._asdict(), "count": count[operation] / steps, "milliseconds": time, "share": time / total}
        for operation, time in sorted(spent.items(), key=lambda item: -item[1])
    ]


@dataclasses.dataclass
class Instruction:
    """One HLO instruction."""

    opcode: str
    op_name: str
    calls: str | None


def parse_program(text: str) -> dict[str, Operation]:
    """Parses a compiled program, `compiled.as_text()`, into operations by their names in traces."""
    instructions = parse_instructions(text)
    return {
        name: describe_instruction(name, instruction, list(instructions.get(instruction.calls or "", {}).values()))
        for inside in instructions.values()
        for name, instruction in inside.items()
    }


def parse_instructions(text: str) -> dict[str, dict[str, Instruction]]:
    """Parses a compiled program into the instructions of each computation by name."""
    return {name: dict(iterate_instructions(inside)) for name, inside in hlo.computations(text)[0].items()}


def iterate_instructions(lines: Iterable[str]) -> Iterator[tuple[str, Instruction]]:
    """Yields the instructions of a computation by name."""
    for line in lines:
        if match := INSTRUCTION.match(line):
            op_name, calls = re.search(r'op_name="(.*?)"', line), re.search(r"calls=%?([\w.-]+)", line)
            yield match["name"], Instruction(match["opcode"], op_name[1] if op_name else "", calls and calls[1])


def describe_instruction(name: str, instruction: Instruction, fused: Sequence[Instruction]) -> Operation:
    """Classifies an instruction; a fusion has the path of its product, else its own, else the path of a part."""
    products = [part for part in (instruction, *fused) if part.opcode in PRODUCTS]
    if instruction.opcode in CONTROL_FLOW:
        kind = instruction.opcode
    else:
        kind = "product" if products else re.sub(r"(\.\d+|\.clone)+$", "", name)
    op_name = next((part.op_name for part in (*products, instruction, *fused) if part.op_name), "")
    return Operation(kind, *direction_and_module(op_name))


def direction_and_module(op_name: str) -> tuple[str, str]:
    """Parses a path such as `jit(step)/transpose(jvp(Model))/decoder/layers_0/ffn/expand/dot_general`.

    Components with parentheses are transformations, `module.method` belongs to `module`, and the last is a primitive.
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


def print_operations(case: Mapping[str, Any]) -> None:
    """Prints the longest operations, and their sum next to the time of the step."""
    wall, traced, total = (case[f"{kind}milliseconds"] for kind in ("", "traced_", "summed_"))
    title = f"{case['case']}: {case['rows']} x {case['length']} tokens, {case['dtype']}"
    caption = f"{wall:.1f} ms per step, {traced:.1f} with tracing; all operations, summed over threads: {total:.1f} ms"
    headings = ("operation", "pass", "module", "ms/step", "share", "count")
    rows = [
        (
            *(row["kind"], row["direction"], row["module"]),
            *(f"{row['milliseconds']:.2f}", f"{row['share']:.1%}", f"{row['count']:.0f}"),
        )
        for row in case["operations"][:MAX_ROWS]
    ]
    Console(width=120).print(make_table(headings, rows, left=3, title=title, caption=caption))
