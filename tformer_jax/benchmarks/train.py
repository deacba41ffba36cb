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

OURS, COMPILED, EAGER = "tformer_jax", "torch.compile", "PyTorch, eager"
PEERS = (COMPILED, EAGER)
"""Both, since neither is the faster one in all cases."""
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
    compared = train_cases.without_dropout(case)
    losses: dict[str, list[float]] = {}
    with started(case, PEERS) as systems:
        first = {name: first_step(system) for name, system in systems.items()}
        if compared == case:
            losses = {name: [first[name][0], *more_losses(system)] for name, system in systems.items()}
        seconds = alternate(systems, rounds, steps)
        facts = {name: system.call("facts") | first[name][1] for name, system in systems.items()}
        work = systems[OURS].call("work")
        shapes = [(size, size, size) for size in SQUARES] + [case.product]
        rates = {name: system.call("product_rates", shapes, PRODUCTS) for name, system in systems.items()}
    if compared != case and len(facts) > 1:
        with started(compared, (EAGER,)) as systems:
            losses = {name: system.call("steps", CHECKED_STEPS)[1] for name, system in systems.items()}
    return {
        "case": case.name,
        "rows": case.rows,
        "length": case.length,
        "dtype": case.cfg.model.dtype,
        **speeds(work, seconds, rates),
        "products": {"shapes": shapes, "flops_per_second": rates},
        "loss_difference": loss_differences(case, losses),
        "systems": facts,
        "seconds": seconds,
    }


@contextlib.contextmanager
def started(case: Case, peers: Sequence[str]) -> Iterator[dict[str, Remote]]:
    """This library and, where PyTorch can do the same, these peers, each in a process of its own."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        ours = stack.enter_context(Remote("tformer_jax.benchmarks.train_systems:Ours", case))
        hardware = ours.call("hardware")
        systems = {OURS: ours}
        if reason := without_peer(case, hardware["backend"]):
            print(f"{case.name}: PyTorch is left out: {reason}", flush=True)
            peers = ()
        else:
            ours.call("save", Path(scratch) / "start.npz")
        for name in peers:
            arguments = (case.cfg, Path(scratch) / "start.npz", hardware["cores"], name == COMPILED)
            systems[name] = stack.enter_context(Remote("tformer_jax.benchmarks.torch_systems:PyTorch", *arguments))
        yield systems


def first_step(system: Remote) -> tuple[float, dict[str, Any]]:
    """The first step: its loss; seconds since the process was started, and what was compiled until then, if known."""
    start = time.perf_counter()
    _, (loss,) = system.call("steps", 1)
    seconds = system.seconds + time.perf_counter() - start
    compilations = system.call("facts").get("compilations")
    return loss, {"first_step_seconds": seconds, "compilations_at_first_step": compilations}


def more_losses(system: Remote) -> list[float]:
    """Those of the steps after the first one."""
    losses: list[float] = system.call("steps", CHECKED_STEPS - 1)[1]
    return losses


def without_peer(case: Case, backend: str) -> str | None:
    """Why PyTorch cannot be compared; None: it can."""
    if importlib.util.find_spec("torch") is None:
        return 'it is not installed: pip install -e ".[benchmark]"'
    if backend != "cpu":
        return f"it is measured on the CPU, but JAX uses the {backend}: JAX_PLATFORMS=cpu"
    if settings := train_cases.inexpressible(case.cfg):
        return f"its model here has no {', '.join(settings)}"
    return None


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


def loss_differences(case: Case, losses: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The largest difference of two losses of one step, relative to PyTorch's, for each peer.

    Raises:
        RunError: it is too large for a comparison of speed.
    """
    found, tolerance = {}, TOLERANCES[case.cfg.model.dtype]
    for name in [name for name in losses if name != OURS]:
        ours, theirs = np.array(losses[OURS]), np.array(losses[name])
        difference = np.abs(ours - theirs) / np.abs(theirs)
        worst = int(np.argmax(difference))
        if not difference[worst] <= tolerance:
            raise RunError(
                f"{case.name}: the loss of step {worst + 1} is {ours[worst]:.6g}, that of {name} {theirs[worst]:.6g}: "
                f"they differ by more than {tolerance:g} of it, so that the speeds are not compared"
            )
        found[name] = float(difference[worst])
    return found


def show(case: Mapping[str, Any]) -> None:
    """A table with a row for each system."""
    title = f"{case['case']}: {case['rows']} x {case['length']} tokens, {case['dtype']}"
    caption = "of peak: of the rate of square products; first step: from the start of the process, nothing cached"
    columns = ("", "ms/step", "tokens/s", "GFLOP/s", "of peak", "memory", "first step", f"{OURS} is")
    table = Table(*columns, title=title, caption=caption)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, facts in case["systems"].items():
        ratio = case["times_as_fast"].get(name)
        table.add_row(
            name,
            f"{case['milliseconds'][name]:.1f}",
            f"{case['tokens_per_second'][name]:,.0f}",
            f"{case['flops_per_second'][name] / 1e9:.1f}",
            f"{case['share_of_product_rate'][name]:.0%}",
            f"{facts['peak_bytes'] / MIB:,.0f} MiB",
            f"{facts['first_step_seconds']:.1f} s",
            "" if ratio is None else f"{ratio:.2f} x",
        )
    Console(width=100).print(table)
