"""The report of `doctor.py`: this machine, the placement of a config on it, and the problems found."""

import argparse
import dataclasses
import functools
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tformer_jax import __version__
from tformer_jax.base.errors import UserError
from tformer_jax.base.numbers import GIB, counted
from tformer_jax.cli.common import FAILED, format_size
from tformer_jax.cli.tables import make_table, table_console
from tformer_jax.config import Config, TrainConfig
from tformer_jax.config.sizes import assumption, with_sizes
from tformer_jax.config.task import task_of
from tformer_jax.data.pipeline import check_divisible
from tformer_jax.lab.commands import machine_checks, placement
from tformer_jax.lab.commands.placement import Placement
from tformer_jax.models import registry
from tformer_jax.parallel import rules
from tformer_jax.parallel.mesh import BATCH_AXES, axis_sizes
from tformer_jax.runs import hardware, metrics, provenance, start_from

SHOWN = ("jax", "jaxlib", *machine_checks.PLUGINS, "libtpu", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
"""Packages whose versions are shown."""


class Findings:
    """Problems and hints."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.hints: list[str] = []

    def add(self, sentences: Iterable[str]) -> None:
        """Adds problems."""
        self.problems += sentences

    def attempt(self, action: Callable[[], object]) -> Any:
        """Returns the result of `action`; if it raises a `UserError`, adds the problem and returns None."""
        try:
            return action()
        except UserError as error:
            self.problems.append(str(error))
            return None


def print_report(cfg: Config | None, options: argparse.Namespace) -> None:
    """Prints the report; exits with 1 if there are problems.

    Raises:
        RunError: JAX has no device.
    """
    console, findings = table_console(), Findings()
    findings.add(machine_checks.check_unknown_flags())
    gpus = findings.attempt(machine_checks.find_gpus) or []
    machine_checks.find_devices()
    console.print(machine_table(gpus, options.run or Path("runs")))
    findings.add(machine_checks.check_accelerators(gpus, jax.default_backend()))
    findings.add(machine_checks.check_packages())
    findings.add(machine_checks.check_harmful_flags())
    findings.hints += machine_checks.check_slow_flags()
    estimate = examine_config(cfg, options, console, findings) if cfg else None
    run = options.run or Path("runs") / (cfg.name if cfg else "NAME")
    sizes = estimate.checkpoint if estimate else 0, checkpoints_on_disk(cfg.train) if cfg else 0
    findings.add(machine_checks.check_folder(run, *sizes))
    for label, sentences in (("problem", findings.problems), ("hint", findings.hints)):
        for sentence in sentences:
            console.print(escape(f"{label}: {sentence}"), soft_wrap=True, highlight=False)
    if findings.problems:
        sys.exit(FAILED)
    console.print("No problems found.")


def checkpoints_on_disk(train: TrainConfig) -> int:
    """Returns the maximum number of checkpoints on the disk at the same time.

    The newest stays while another one, or the final weights, are written.
    """
    permanent = train.steps // train.permanent_every if train.permanent_every else 0
    return train.keep_checkpoints + train.keep_best + permanent + 2


def machine_table(gpus: list[machine_checks.Gpu], run: Path) -> Table:
    """Returns a table of devices, hosts, versions, memory and disk space."""
    devices = jax.devices()
    memory, host = hardware.device_memory(), hardware.host_memory()
    disk = shutil.disk_usage(machine_checks.existing_parent(run))
    rows = {
        "devices": f"{len(devices)} x {devices[0].device_kind} ({jax.default_backend()})",
        "memory of a device": format_size(memory) if memory else "unknown",
        "processes": f"{jax.process_count()}; this is number {jax.process_index()}",
        "processor": "{processor}; cores: {cores}".format(**provenance.describe_hardware()),
        "memory of this host": format_size(host) if host else "unknown",
        "free disk": f"{format_size(disk.free)} of {format_size(disk.total)}",
        "NVIDIA": "; ".join(dict.fromkeys(f"{gpu.name}, {gpu.memory}, driver {gpu.driver}" for gpu in gpus)),
        "python": ".".join(map(str, sys.version_info[:3])),
        machine_checks.PACKAGE: __version__,
        **{name: provenance.version(name) for name in SHOWN},
        **{name: os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS")},
    }
    shown = [(label, escape(value)) for label, value in rows.items() if value]
    return make_table(("", "value"), shown, left=2, title="this machine")


def examine_config(cfg: Config, options: argparse.Namespace, console: Console, findings: Findings) -> Placement | None:
    """Prints the mesh of a config, and its placement if it fits; adds problems to `findings`."""
    findings.add(machine_checks.check_data(cfg, options.data))
    for check in (metrics.check_installed, task_of(cfg).check_installed, start_from.check_run):
        findings.attempt(functools.partial(check, cfg))
    devices = options.devices or jax.device_count()
    sizes = findings.attempt(lambda: axis_sizes(cfg.parallel, devices))
    if not sizes:
        return None
    console.print(mesh_table(sizes, devices))
    if (used := math.prod(sizes.values())) < devices:
        findings.hints.append(f"the mesh has {used} of {devices} devices: the others stay idle")
    parts = math.prod(sizes[axis] for axis in BATCH_AXES)
    before = len(findings.problems)
    findings.attempt(lambda: rules.check(cfg, sizes))
    findings.attempt(lambda: check_divisible(cfg, parts))
    fits = len(findings.problems) == before
    if cfg.model.dtype == "float32" and (options.devices or jax.default_backend() != "cpu"):
        findings.hints.append("model.dtype='float32' leaves much of a GPU or TPU unused: try 'bfloat16'")
    try:
        filled = with_sizes(cfg)
    except UserError as error:
        findings.hints.append(f"memory per device is not shown: {error}")
        return None
    findings.hints += [hint] if (hint := assumption(cfg)) else []
    if not fits or not (options.devices or findings.attempt(lambda: registry.build(filled, train=True))):
        return None
    estimate = findings.attempt(lambda: placement.estimate_placement(dataclasses.replace(cfg, model=filled), sizes))
    if estimate:
        console.print(parameter_table(estimate))
        console.print(memory_table(cfg, estimate))
        findings.add(memory_problems(estimate, device_memory(options)))
    return estimate


def device_memory(options: argparse.Namespace) -> int | None:
    """Returns the memory in bytes of one device that the report is for; None if unknown."""
    if options.memory:
        return int(options.memory * GIB)
    return None if options.devices and jax.default_backend() == "cpu" else hardware.device_memory()


def memory_problems(estimate: Placement, memory: int | None) -> Iterable[str]:
    """Yields a problem if a device is too small for its state, gradients and fewest activations."""
    fixed = estimate.state + estimate.gradients
    sizes = [format_size(size) for size in (fixed, estimate.activations, memory or 0)]
    if memory is None or fixed + estimate.activations <= memory:
        return
    if fixed > memory:
        yield (
            f"state and gradients take about {sizes[0]} per device, which has {sizes[2]}: shard them with "
            "parallel.preset='fsdp', or use more devices"
        )
        return
    yield (
        f"state and gradients take about {sizes[0]} and activations at least {sizes[1]} (estimated) per device, which "
        f"has {sizes[2]}: try train.accumulate, train.loss_chunk or a smaller batch"
    )


def mesh_table(sizes: dict[str, int], devices: int) -> Table:
    """Returns a table of the axes of the mesh, and what they split."""
    title = f"mesh of {math.prod(sizes.values())} of {counted(devices, 'device')}"
    split = {axis: ", ".join(name for name, where in rules.RULES.items() if axis in where) for axis in sizes}
    rows = [(axis, str(size), split[axis]) for axis, size in sizes.items()]
    table = make_table(("axis", "size", "splits"), rows, title=title)
    table.columns[2].justify = "left"
    return table


def parameter_table(estimate: Placement) -> Table:
    """Returns a table of the groups of parameters, and their placement."""
    rows = []
    for group in estimate.groups:
        placed = ["+".join(where) if isinstance(where, tuple) else where or "-" for where in group.spec]
        shape, axes = " x ".join(map(str, group.shape)), ", ".join(name or "-" for name in group.axes)
        where = ", ".join(placed) if any(name != "-" for name in placed) else "replicated"
        rows.append((group.name, str(group.count), shape, axes, where, format_size(group.device_bytes)))
    headings = ("parameter", "count", "shape", "logical axes", "mesh axes", "per device")
    table = make_table(headings, rows, left=5, title="parameters")
    table.columns[1].justify = "right"
    return table


def memory_table(cfg: Config, estimate: Placement) -> Table:
    """Returns a table of the memory that one device needs."""
    rows = {
        "rows of a batch": f"{estimate.rows} of {counted(estimate.length, 'token')}",
        "micro-batches": str(cfg.train.accumulate),
        "parameters": format_size(estimate.parameters),
        "optimizer state": format_size(estimate.optimizer),
        "EMA of the parameters": format_size(estimate.mean),
        "gradients (estimated)": format_size(estimate.gradients),
        "activations, at least (estimated)": format_size(estimate.activations),
        "checkpoint, on disk": format_size(estimate.checkpoint),
    }
    return make_table(("", "value"), rows.items(), title="one device")
