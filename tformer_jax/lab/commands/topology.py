"""`scripts/describe.py --topology`: shows the program that XLA compiles for one device of a TPU slice."""

import argparse

from rich.table import Table

from tformer_jax.base.numbers import counted
from tformer_jax.cli.common import format_size
from tformer_jax.cli.tables import make_table, table_console
from tformer_jax.config import Config
from tformer_jax.lab.aot import programs, topology
from tformer_jax.lab.aot.programs import Program
from tformer_jax.runs.hardware import CHIPS, Chip


def print_program(config: Config, options: argparse.Namespace, length: int) -> None:
    """Compiles the train step or, with `--decode`, a decoding step, and prints its figures.

    Raises:
        UserError: libtpu is missing, the slice is unknown, or the config does not fit it.
    """
    devices = topology.slice_devices(options.topology)
    compile_step = programs.decode_step if options.decode else programs.train_step
    program, _ = compile_step(config, devices, options.batch, length)
    chip, console = CHIPS[options.topology.partition(":")[0]], table_console()
    mesh = ", ".join(f"{axis}={size}" for axis, size in program.mesh.items()) or "one device"
    step = "decoding step" if options.decode else "train step"
    size = f"{counted(program.rows, 'row')} of {counted(program.length, 'token')}"
    console.print(f"{config.name}, {step}, {mesh}: {size}")
    console.print(memory_table(program, chip))
    console.print(collectives_table(program))
    console.print(bound_table(options.topology, program, chip))
    if config.model.dtype != "bfloat16":
        console.print(f"The rate is for bfloat16; the config computes in {config.model.dtype} (model.dtype).")


def memory_table(program: Program, chip: Chip) -> Table:
    """Returns a table of the memory use of one device."""
    parts = {
        "arguments: state and batch": program.arguments,
        "outputs not aliased to arguments": program.outputs,
        "temporaries at the peak": program.temporaries,
        "program": program.code,
    }
    table = make_table(("memory of one device", "bytes"), [(name, format_size(size)) for name, size in parts.items()])
    table.add_section()
    table.add_row(
        f"total; XLA rejects programs that exceed the HBM, {format_size(chip.memory)}", format_size(program.hbm)
    )
    return table


def collectives_table(program: Program) -> Table:
    """Returns a table of the collectives of one device in a step, from the compiled program."""
    rows = [
        (part.kind, part.shape, str(part.devices), str(part.times), format_size(int(part.bytes_sent)))
        for part in program.collectives
    ]
    table = make_table(("collective", "result", "devices", "times", "sent"), rows, left=2)
    table.add_section()
    table.add_row("total", "", "", "", format_size(int(sum(part.bytes_sent for part in program.collectives))))
    return table


def bound_table(name: str, program: Program, chip: Chip) -> Table:
    """Returns a table of lower bounds on a step's time at the chip's peak rates, and the MFU that they allow."""
    parts = {
        f"computation, {program.flops:.4g} FLOPs (estimated by tracing)": program.seconds_computing(chip),
        "arguments, results and temporaries, once through HBM": program.seconds_moving(chip),
        "communication, over all links": program.seconds_sending(chip),
    }
    total = sum(parts.values())
    rows = [(part, f"{1e3 * seconds:.4g} ms", f"{seconds / total:.0%}") for part, seconds in parts.items()]
    table = make_table((f"lower bounds on {name}", "one step", "share"), rows)
    table.add_section()
    for overlap, how in ((False, "communication follows"), (True, "communication is hidden")):
        mfu = f"MFU {program.utilization_bound(chip, overlap=overlap):.1%}"
        table.add_row(f"step, if {how}", f"{1e3 * program.seconds(chip, overlap=overlap):.4g} ms", mfu)
    return table
