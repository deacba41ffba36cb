"""`scripts/describe.py --mesh`: training on many devices, on paper."""

import argparse
import dataclasses

from rich.console import Console
from rich.table import Table

from tformer_jax.cli.common import size_of
from tformer_jax.config import Config, ConfigError, read_mesh
from tformer_jax.train import chips
from tformer_jax.train.chips import Chip
from tformer_jax.train.scaling import compiler as compilers
from tformer_jax.train.scaling.bound import Bound, bound, seconds
from tformer_jax.train.scaling.layout import Layout, layout, mesh_sizes
from tformer_jax.train.scaling.memory import Memory, memory
from tformer_jax.train.scaling.traffic import Transfer, traffic


def show_scaling(config: Config, options: argparse.Namespace, length: int) -> None:
    """Prints memory and traffic of one device, and with a chip the bound on its utilisation.

    Raises:
        ConfigError: the mesh is missing, or does not fit the model, the batch or the number of devices.
    """
    if not (options.mesh or options.devices):
        raise ConfigError(f"--chip {options.chip}: add --mesh, such as --mesh data=8")
    chip = chips.named(options.chip) if options.chip else None
    cfg = read_mesh(options.mesh) if options.mesh else config.parallel
    config = dataclasses.replace(config, parallel=cfg)
    found = layout(config, mesh_sizes(cfg, options.devices), options.batch, length)
    compiler = compilers.of(chip)
    needed, transfers = memory(found, compiler), traffic(found, compiler)
    console = Console()
    console.print(memory_table(config.name, found, needed))
    console.print(traffic_table(found, transfers, chip))
    if chip:
        console.print(bound_table(options.chip, bound(found, transfers, chip)))
        if config.model.dtype != "bfloat16":
            console.print(f"These are rates of bfloat16; the config computes in {config.model.dtype} (model.dtype).")
        console.print(fits(options.chip, chip, needed.peak), soft_wrap=True)


def memory_table(name: str, found: Layout, needed: Memory) -> Table:
    """Each part at the two moments that need the most."""
    mesh = ", ".join(f"{axis}={size}" for axis, size in found.sizes.items() if size > 1) or "one device"
    shape = f"{found.batch} rows of {found.length} tokens"
    table = Table("memory of one device", "start of backward pass", "end", title=f"{name}, {mesh}: {shape}")
    _right(table)
    for part, size in needed.held.items():
        table.add_row(part, size_of(size), size_of(size))
    for part in [name for name, size in (needed.backward | needed.update).items() if size]:
        table.add_row(
            part, *(size_of(sizes[part]) if part in sizes else "" for sizes in (needed.backward, needed.update))
        )
    table.add_section()
    table.add_row("together", *map(size_of, needed.moments))
    return table


def traffic_table(found: Layout, transfers: list[Transfer], chip: Chip | None) -> Table:
    """What each device sends, by purpose."""
    columns = ["collective", "of", "along", "array", "sent"] + (["time"] if chip else [])
    table = Table(*columns, title="sent by each device in one step")
    _right(table, first=3)
    for one in transfers:
        time = [f"{1e3 * seconds(found, one, chip):.3g} ms"] if chip else []
        table.add_row(one.kind, one.purpose, ", ".join(one.axes), size_of(one.array), size_of(one.sent), *time)
    table.add_section()
    table.add_row("together", "", "", "", size_of(sum(one.sent for one in transfers)))
    return table


def bound_table(name: str, found: Bound) -> Table:
    """Times and the utilisation that they allow."""
    table = Table(f"at best on {name}", "one step")
    _right(table)
    table.add_row("computing", f"{1e3 * found.compute:.4g} ms")
    table.add_row("sending", f"{1e3 * found.communication:.4g} ms")
    table.add_row("utilisation, nothing overlaps", f"{found.without_overlap:.1%}")
    table.add_row("utilisation, all overlaps", f"{found.with_overlap:.1%}")
    return table


def fits(name: str, chip: Chip, peak: int) -> str:
    """One sentence: whether a device's part finds room in its memory."""
    if peak > chip.memory:
        return f"It does not fit: a device needs {size_of(peak)}, and {name} has {size_of(chip.memory)}."
    return f"It fits: a device needs {size_of(peak)} of the {size_of(chip.memory)} of {name}."


def _right(table: Table, first: int = 1) -> None:
    for column in table.columns[first:]:
        column.justify = "right"
