"""`scripts/benchmark.py train --memory`: what holds the memory of a train step, by stage and by module."""

import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from tformer_jax.base.cpu import peak_bytes
from tformer_jax.base.errors import RunError
from tformer_jax.base.numbers import MIB
from tformer_jax.base.workarounds import silenced_orbax
from tformer_jax.cli.tables import make_table
from tformer_jax.lab.benchmarks.operations import UNKNOWN, Operation, parse_instructions, parse_program
from tformer_jax.lab.benchmarks.processes import Remote
from tformer_jax.lab.benchmarks.train_cases import Case
from tformer_jax.lab.benchmarks.train_systems import Ours

MAX_ROWS = 20
"""Maximum number of rows in the printed table of buffers; the JSON has all."""
PROGRAM = "jit_on_mesh"
"""Name of the compiled train step."""
LIVE = re.compile(r"^ +(?P<name>[\w.\-]+)\{[\d,]*\}: (?P<size>\d+) bytes", re.MULTILINE)
"""A buffer that is live at the peak, in a file of live ranges."""
ARGUMENTS = {"state.params": "parameters", "state.opt_state": "optimizer", "state.ema": "mean of parameters"}
"""Arguments of the step, by the beginnings of their paths; the others are the batch and counters."""


class Measured(Ours):
    """Training whose memory is read after each stage, and whose compiler writes the live ranges of its buffers."""

    def __init__(self, case: Case):
        with tempfile.TemporaryDirectory() as folder:
            dump = f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_module_re={PROGRAM}"
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {dump}"
            jax.devices()
            self.peaks = {"libraries": peak_bytes()}
            super().__init__(case)
            self.add_peak("state")
            self.step = self.step.lower(self.state, self.batch()).compile()
            self.add_peak("compilation")
            self.ranges = read_ranges(Path(folder))

    def memory(self, steps: int) -> dict[str, Any]:
        """Returns the process's peak bytes after each stage, XLA's count for the step, and the buffers at its peak."""
        self.steps(steps)
        self.add_peak("steps")
        self.save_checkpoint()
        self.add_peak("checkpoint")
        counted = self.step.memory_analysis()
        return {
            "peak_bytes": self.peaks,
            "state_bytes": counted.argument_size_in_bytes,
            "temporary_bytes": counted.temp_size_in_bytes,
            "buffers": table_rows(self.ranges, self.step.as_text()),
        }

    def add_peak(self, stage: str) -> None:
        """Reads the peak after a stage; the system counts pages of threads with a delay."""
        self.peaks[stage] = max(peak_bytes(), *self.peaks.values())

    def save_checkpoint(self) -> None:
        """Saves the state as a run does, with a copy of it on the host."""
        from tformer_jax.runs.checkpoint import Checkpointer  # loads Orbax, which the stages before do not need

        with tempfile.TemporaryDirectory() as folder, silenced_orbax():
            checkpointer = Checkpointer(Path(folder), keep=1)
            checkpointer.save(1, self.state, {})
            checkpointer.close()


def measure_memory(cases: Sequence[Case], steps: int) -> dict[str, Any]:
    """Measures each case in a separate process, prints two tables, and returns the record for `--record`."""
    results = []
    for case in cases:
        with Remote("tformer_jax.lab.benchmarks.memory:Measured", case) as measured:
            shape = {"case": case.name, "rows": case.rows, "length": case.length, "dtype": case.cfg.model.dtype}
            results.append(shape | measured.call("memory", steps))
        print_memory(results[-1])
    return {"cases": results}


def read_ranges(folder: Path) -> str:
    """Returns the live ranges of the train step.

    Raises:
        RunError: XLA has written none.
    """
    paths = list(folder.glob(f"*{PROGRAM}*live-range.txt"))
    if not paths:
        raise RunError("this version of XLA writes no live ranges of buffers for this device")
    return paths[0].read_text(encoding="utf-8")


def table_rows(ranges: str, program: str) -> list[dict[str, Any]]:
    """Groups the buffers at the peak by pass, module and operation, largest first.

    Args:
        program: the compiled step, `compiled.as_text()`.
    """
    operations = parse_program(program) | dict(_arguments(program))
    sizes: dict[Operation, list[int]] = {}
    for buffer in LIVE.finditer(ranges.partition("(peak):\n")[2].partition("Stack trace")[0]):
        sizes.setdefault(operations.get(buffer["name"], UNKNOWN), []).append(int(buffer["size"]))
    return [
        {**operation._asdict(), "count": len(each), "bytes": sum(each)}
        for operation, each in sorted(sizes.items(), key=lambda item: -sum(item[1]))
    ]


def _arguments(program: str) -> Iterator[tuple[str, Operation]]:
    for inside in parse_instructions(program).values():
        for name, instruction in inside.items():
            if instruction.opcode == "parameter" and instruction.op_name:
                begins = (module for begin, module in ARGUMENTS.items() if instruction.op_name.startswith(begin))
                yield name, Operation("argument", "", next(begins, "batch and counters"))


def print_memory(case: Mapping[str, Any]) -> None:
    """Prints the peaks of the process by stage, and the largest buffers of the step."""
    title = f"{case['case']}: {case['rows']} x {case['length']} tokens, {case['dtype']}"
    console = Console(width=120)
    peaks = [(stage, _mebibytes(size)) for stage, size in case["peak_bytes"].items()]
    state, temporary = (_mebibytes(case[f"{name}_bytes"]) for name in ("state", "temporary"))
    caption = f"the step: {state} of state and batch, {temporary} of temporary arrays"
    console.print(make_table(("after", "peak of the process"), peaks, title=title, caption=caption))
    rows = [
        (row["kind"], row["direction"], row["module"], str(row["count"]), _mebibytes(row["bytes"]))
        for row in case["buffers"][:MAX_ROWS]
    ]
    headings = ("operation", "pass", "module", "count", "memory")
    console.print(make_table(headings, rows, left=3, title="buffers of the step when most are live"))


def _mebibytes(size: int) -> str:
    return f"{size / MIB:,.1f} MiB"
