"""`scripts/benchmark.py train`: how fast a step of training is, beside PyTorch's with the same weights and batches."""

import contextlib
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from tformer_jax.benchmarks import train_cases
from tformer_jax.benchmarks.processes import Remote
from tformer_jax.benchmarks.train_cases import Case
from tformer_jax.train.errors import RunError

OURS, PYTORCH = "tformer_jax", "PyTorch"
CHECKED_STEPS = 20
TOLERANCES = {"float32": 1e-4, "bfloat16": 3e-2}
"""By how much losses may differ, relative to PyTorch's."""
SQUARES = (1024, 2048)
"""Sizes of the square products by which the machine's rate of products is measured."""
PAUSE = 0.3
"""Seconds before each measurement: threads of the system before it may spin so long."""
UNCOUNTED = 1
"""Steps at the start of each turn that are not measured."""
PRODUCTS = 10
"""Repetitions of each product, of which the best counts."""
MIB = 2**20


def measure_training(cases: Sequence[Case], rounds: int, steps: int) -> dict[str, Any]:
    """Measures the cases in turn, prints a table for each, and gives what `--record` writes.

    Raises:
        RunError: PyTorch's losses are not ours.
    """
    found = []
    for case in cases:
        found.append(measure(case, rounds, steps))
        show(found[-1])
    return {"cases": found}


def measure(case: Case, rounds: int, steps: int) -> dict[str, Any]:
    """One case: its losses are compared, then the systems take turns."""
    deterministic = train_cases.without_dropout(case)
    with started(case) as systems:
        built = {name: system.seconds for name, system in systems.items()}
        first = {name: timed_call(system, "steps", 1) for name, system in systems.items()}
        compilations = systems[OURS].call("facts")["compilations"]
        losses = None
        if PYTORCH in systems and deterministic == case:
            losses = {
                name: [*first[name][1][1], *system.call("steps", CHECKED_STEPS - 1)[1]]
                for name, system in systems.items()
            }
        seconds = alternate(systems, rounds, steps)
        facts = {name: system.call("facts") for name, system in systems.items()}
        work = systems[OURS].call("work")
        shapes = [(size, size, size) for size in SQUARES] + [case.product]
        rates = {name: system.call("product_rates", shapes, PRODUCTS) for name, system in systems.items()}
    if PYTORCH in facts and losses is None:
        with started(deterministic, compiled=False) as systems:
            losses = {name: system.call("steps", CHECKED_STEPS)[1] for name, system in systems.items()}
    for name, fact in facts.items():
        fact["first_step_seconds"] = built[name] + first[name][0]
    facts[OURS]["compilations_at_first_step"] = compilations
    return {
        "case": case.name,
        "rows": case.rows,
        "length": case.length,
        "dtype": case.cfg.model.dtype,
        **speeds(work, seconds, rates),
        "products": {"shapes": shapes, "flops_per_second": rates},
        "loss_difference": losses and loss_difference(case, losses),
        "systems": facts,
        "seconds": seconds,
    }


@contextlib.contextmanager
def started(case: Case, *, compiled: bool = True) -> Iterator[dict[str, Remote]]:
    """This library and, where it can do the same, PyTorch, each in a process of its own; says so if it cannot."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        ours = stack.enter_context(Remote("tformer_jax.benchmarks.train_systems:Ours", case))
        hardware = ours.call("hardware")
        systems = {OURS: ours}
        if reason := without_peer(case, hardware["backend"]):
            print(f"{case.name}: {PYTORCH} is left out: {reason}", flush=True)
        else:
            path = Path(scratch) / "start.npz"
            ours.call("save", path)
            arguments = (case.cfg, path, hardware["cores"], compiled)
            systems[PYTORCH] = stack.enter_context(Remote("tformer_jax.benchmarks.torch_systems:PyTorch", *arguments))
        yield systems


def without_peer(case: Case, backend: str) -> str | None:
    """Why PyTorch cannot be compared; None: it can."""
    if importlib.util.find_spec("torch") is None:
        return 'it is not installed: pip install -e ".[benchmark]"'
    if backend != "cpu":
        return f"it is measured on the CPU, but JAX uses the {backend}: JAX_PLATFORMS=cpu"
    if settings := train_cases.inexpressible(case.cfg):
        return f"its model here has no {', '.join(settings)}"
    return None


def timed_call(system: Remote, *call: Any) -> tuple[float, Any]:
    """Seconds of a call, and its result."""
    start = time.perf_counter()
    result = system.call(*call)
    return time.perf_counter() - start, result


def alternate(systems: Mapping[str, Remote], rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds of each system's steps; every round begins with another system."""
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    names = list(systems)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            time.sleep(PAUSE)
            seconds[name] += systems[name].call("steps", UNCOUNTED + steps)[0][UNCOUNTED:]
    return seconds


def speeds(
    work: Mapping[str, int], seconds: Mapping[str, Sequence[float]], rates: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """What follows from a step's tokens and FLOPs, the seconds of steps, and FLOP/s of products, squares first.

    The rate of products is that of the best square product of any system.
    """
    median = {name: statistics.median(times) for name, times in seconds.items()}
    rate = max(max(found[: len(SQUARES)]) for found in rates.values())
    return {
        **work,
        "milliseconds": {name: 1000 * time for name, time in median.items()},
        "tokens_per_second": {name: work["tokens"] / time for name, time in median.items()},
        "flops_per_second": {name: work["flops"] / time for name, time in median.items()},
        "share_of_product_rate": {name: work["flops"] / time / rate for name, time in median.items()},
        "times_as_fast": {name: time / median[OURS] for name, time in median.items() if name != OURS},
    }


def loss_difference(case: Case, losses: Mapping[str, Sequence[float]]) -> float:
    """The largest difference of two losses of one step, relative to PyTorch's.

    Raises:
        RunError: it is too large for a comparison of speed.
    """
    ours, theirs = (np.array(losses[name]) for name in (OURS, PYTORCH))
    difference = np.abs(ours - theirs) / np.abs(theirs)
    tolerance, worst = TOLERANCES[case.cfg.model.dtype], int(np.argmax(difference))
    if not difference.max() <= tolerance:
        raise RunError(
            f"{case.name}: the loss of step {worst + 1} is {ours[worst]:.6g}, {PYTORCH}'s {theirs[worst]:.6g}: they "
            f"differ by more than {tolerance:g} of it, so that the speeds are not compared"
        )
    return float(difference.max())


def show(case: Mapping[str, Any]) -> None:
    """A table with a row for each system."""
    title = f"{case['case']}: {case['rows']} x {case['length']} tokens, {case['dtype']}"
    caption = "of peak: of the rate of square products; first step: from the start of the process, nothing cached"
    columns = ("", "ms/step", "tokens/s", "GFLOP/s", "of peak", "memory", "first step", "speed")
    table = Table(*columns, title=title, caption=caption)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, facts in case["systems"].items():
        table.add_row(
            name,
            f"{case['milliseconds'][name]:.1f}",
            f"{case['tokens_per_second'][name]:,.0f}",
            f"{case['flops_per_second'][name] / 1e9:.1f}",
            f"{case['share_of_product_rate'][name]:.0%}",
            f"{facts['peak_bytes'] / MIB:,.0f} MiB",
            f"{facts['first_step_seconds']:.1f} s",
            ", ".join(f"{ratio:.2f} x {peer}" for peer, ratio in case["times_as_fast"].items() if name == OURS),
        )
    Console(width=100).print(table)
