"""`scripts/describe.py --topology`: shows the program that XLA compiles for one device of a TPU slice."""

import argparse

from rich.console import Console
from rich.table import Table

from tformer_jax.cli.common import size_of
from tformer_jax.config import Config
from tformer_jax.lab.aot import programs, topology
from tformer_jax.lab.aot.programs import Program
from tformer_jax.runs.chips import CHIPS, Chip


def show_topology(config: Config, options: argparse.Namespace, length: int) -> None:
    """Compiles the train step or, with `--decode`, a decoding step, and prints its figures.

    Raises:
        UserError: libtpu is missing, the slice is unknown, or the config does not fit it.
    """
    devices = topology.devices(options.topology)
    compile_step = programs.decode_step if options.decode else programs.train_step
    program, _ = compile_step(config, devices, options.batch, length)
    chip, console = CHIPS[options.topology.partition(":")[0]], Console()
    mesh = ", ".join(f"{axis}={size}" for axis, size in program.mesh.items()) or "one device"
    step = "decoding step" if options.decode else "train step"
    console.print(f"{config.name}, {step}, {mesh}: {program.rows} rows of {program.length} tokens", highlight=False)
    console.print(memory_table(program, chip))
    console.print(collectives_table(program))
    console.print(bound_table(options.topology, program, chip))
    if config.model.dtype != "bfloat16":
        console.print(f"The rate is that of bfloat16; the config computes in {config.model.dtype} (model.dtype).")


def memory_table(program: Program, chip: Chip) -> Table:
    """Returns a table of the memory use of one device."""
    table = _table("memory of one device", "bytes")
    table.add_row("arguments: state and batch", size_of(program.arguments))
    table.add_row("outputs not aliased to arguments", size_of(program.outputs))
    table.add_row("temporaries at the peak", size_of(program.temporaries))
    table.add_row("program", size_of(program.code))
    table.add_section()
    table.add_row(f"total; XLA rejects programs that exceed the HBM, {size_of(chip.memory)}", size_of(program.hbm))
    return table


def collectives_table(program: Program) -> Table:
    """Returns a table of the collectives of one device in a step, from the compiled program."""
    table = _table("collective", "result", "devices", "times", "sent", text=2)
    for one in program.collectives:
        table.add_row(one.kind, one.shape, str(one.devices), str(one.times), size_of(int(one.bytes_sent)))
    table.add_section()
    table.add_row("total", "", "", "", size_of(int(sum(one.bytes_sent for one in program.collectives))))
    return table


def bound_table(name: str, program: Program, chip: Chip) -> Table:
    """Returns a table of times at the chip's peak rates, and of the utilization that they allow."""
    table = _table(f"upper bounds on {name}", "one step")
    table.add_row("FLOPs of a device (estimated by tracing)", f"{program.flops:.4g}")
    table.add_row("compute time", f"{1e3 * program.seconds_computing(chip):.4g} ms")
    table.add_row("communication time, over all links", f"{1e3 * program.seconds_sending(chip):.4g} ms")
    table.add_row("MFU without overlap", f"{program.utilization(chip, overlap=False):.1%}")
    table.add_row("MFU with full overlap", f"{program.utilization(chip, overlap=True):.1%}")
    return table


def _table(*columns: str, text: int = 1) -> Table:
    """Returns a table; all columns after the first `text` ones are right-aligned."""
    table = Table(*columns)
    for column in table.columns[text:]:
        column.justify = "right"
    return table
