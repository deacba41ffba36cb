"""`scripts/benchmark.py train`: training speed compared with PyTorch, with the same weights and batches."""

import contextlib
import functools
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from tformer_jax.base import checks
from tformer_jax.base.errors import RunError
from tformer_jax.base.numbers import MIB
from tformer_jax.cli.tables import make_table
from tformer_jax.lab.benchmarks import train_cases
from tformer_jax.lab.benchmarks.processes import Remote
from tformer_jax.lab.benchmarks.train_cases import Case
from tformer_jax.lab.benchmarks.turns import alternate_runs
from tformer_jax.nn.linear import BFLOAT16_PRECISIONS

OURS, COMPILED, EAGER = "tformer_jax", "torch.compile", "PyTorch, eager"
PEERS = (COMPILED, EAGER)
"""Both, because neither is faster in all cases."""
CHECKED_STEPS = 20
TOLERANCES = {"float32": 1e-4, "tensorfloat32": 4e-3, "bfloat16": 3e-2}
"""Maximum difference of losses, relative to PyTorch's, by the dtype of products.

TensorFloat-32 has 3 bits more than bfloat16, which makes rounding errors 8 times smaller.
"""
SQUARES = {"cpu": (1024, 2048), "gpu": (4096, 8192), "tpu": (4096, 8192)}
"""Sizes of the square matrix products that measure the machine's peak FLOP/s, by backend."""
WARM_UP_STEPS = 1
"""Steps at the start of each turn that are not measured."""
PRODUCT_GROUPS, PRODUCTS = 5, 4
"""Repetitions of each product: number of groups (the fastest one counts), and products per group."""


def measure_training(cases: Sequence[Case], rounds: int, steps: int) -> dict[str, Any]:
    """Measures the cases, prints a table for each, and returns the record for `--record`.

    Raises:
        RunError: PyTorch's losses differ from ours.
    """
    results = []
    for case in cases:
        results.append(measure_case(case, rounds, steps))
        print_speeds(results[-1])
    return {"cases": results}


def measure_case(case: Case, rounds: int, steps: int) -> dict[str, Any]:
    """Compares the losses of the systems on a case and measures their steps alternately.

    The losses of a case with dropout are compared without it, in new processes.
    """
    compared = train_cases.without_dropout(case)
    losses: dict[str, list[float]] = {}
    with start_systems(case, PEERS) as systems:
        first_steps = {name: first_step(system) for name, system in systems.items()}
        if compared == case:
            losses = {
                name: [first_steps[name][0], *system.call("steps", CHECKED_STEPS - 1)[1]]
                for name, system in systems.items()
            }
        turns = {name: functools.partial(time_steps, system, steps) for name, system in systems.items()}
        seconds = alternate_runs(turns, rounds)
        facts = {name: system.call("facts") | first_steps[name][1] for name, system in systems.items()}
        work, hardware = systems[OURS].call("work"), systems[OURS].call("hardware")
        shapes = [(size, size, size) for size in SQUARES[hardware["backend"]]] + [case.product]
        counts = PRODUCT_GROUPS, PRODUCTS
        rates = {name: system.call("product_rates", shapes, *counts) for name, system in systems.items()}
    if compared != case and len(facts) > 1:
        with start_systems(compared, (EAGER,)) as systems:
            losses = {name: system.call("steps", CHECKED_STEPS)[1] for name, system in systems.items()}
    products = product_dtype(case.cfg.model.dtype, hardware)
    return {
        "case": case.name,
        "rows": case.rows,
        "length": case.length,
        "dtype": case.cfg.model.dtype,
        **compute_speeds(work, seconds, rates),
        "products": {"shapes": shapes, "dtype": products, "flops_per_second": rates},
        "loss_difference": loss_differences(case.name, losses, TOLERANCES[products]),
        "systems": facts,
        "seconds": seconds,
    }


@contextlib.contextmanager
def start_systems(case: Case, peers: Sequence[str]) -> Iterator[dict[str, Remote]]:
    """Starts this library and, if PyTorch supports the case, `peers`, each in a separate process."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        ours = stack.enter_context(Remote("tformer_jax.lab.benchmarks.train_systems:Ours", case))
        hardware = ours.call("hardware")
        systems = {OURS: ours}
        if reason := reason_to_skip(case, hardware["backend"], hardware["device_count"]):
            print(f"{case.name}: skipping PyTorch: {reason}", flush=True)
            peers = ()
        else:
            ours.call("save", Path(scratch) / "start.npz")
        products = product_dtype(case.cfg.model.dtype, hardware)
        for name in peers:
            start = case.cfg, Path(scratch) / "start.npz"
            how = hardware["cores"], name == COMPILED, hardware["backend"], products
            systems[name] = stack.enter_context(
                Remote("tformer_jax.lab.benchmarks.torch_systems:PyTorch", *start, *how)
            )
        yield systems


def first_step(system: Remote) -> tuple[float, dict[str, Any]]:
    """Runs the first step; returns its loss, the seconds with the construction, and the number of compilations."""
    start = time.perf_counter()
    _, (loss,) = system.call("steps", 1)
    seconds = system.seconds + time.perf_counter() - start
    compilations = system.call("facts").get("compilations")
    return loss, {"first_step_seconds": seconds, "compilations_at_first_step": compilations}


def reason_to_skip(case: Case, backend: str, devices: int) -> str | None:
    """Returns why PyTorch cannot be compared, or None."""
    if checks.not_installed(["torch"]):
        return 'it is not installed: pip install -e ".[benchmark]"'
    if backend not in ("cpu", "gpu"):
        return f"the comparison runs on a CPU or a GPU, but JAX uses the {backend}: set JAX_PLATFORMS=cpu"
    if backend == "gpu" and devices > 1:
        return f"the comparison runs on one GPU, but JAX uses {devices}: set CUDA_VISIBLE_DEVICES=0"
    if settings := train_cases.unsupported_settings(case.cfg):
        return f"its model does not support {', '.join(settings)}"
    return None


def product_dtype(dtype: str, hardware: Mapping[str, Any]) -> str:
    """Returns the dtype to which the operands of matrix products are rounded on what `Ours.hardware` describes.

    JAX's matmul precision determines it for float32. By default, it is TensorFloat-32 on GPUs (since Ampere), and
    bfloat16 on TPUs (`jax.lax.Precision`). On a CPU, only products with kernels and embeddings are rounded.
    """
    precision = hardware["matmul_precision"]
    if dtype != "float32" or precision in ("highest", "float32"):
        return dtype
    if precision in BFLOAT16_PRECISIONS:
        return "bfloat16"
    return {"gpu": "tensorfloat32", "tpu": "bfloat16"}.get(hardware["backend"], dtype)


def time_steps(system: Remote, steps: int) -> float:
    """Returns the mean seconds of a step; steps are not synchronized, so that a GPU need not wait for the host."""
    system.call("steps", WARM_UP_STEPS)
    seconds: float = system.call("steps", steps)[0]
    return seconds


def compute_speeds(
    work: Mapping[str, int], seconds: Mapping[str, Sequence[float]], rates: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """Computes speeds and ratios, from medians.

    Args:
        work: tokens and FLOPs of a step.
        seconds: mean seconds of the steps of each round, by system.
        rates: FLOP/s of matrix products of each system. The fastest product of any system is the peak.
    """
    median = {name: statistics.median(times) for name, times in seconds.items()}
    peak = max(map(max, rates.values()))
    return {
        **work,
        "milliseconds": {name: 1000 * time for name, time in median.items()},
        "tokens_per_second": {name: work["tokens"] / time for name, time in median.items()},
        "flops_per_second": {name: work["flops"] / time for name, time in median.items()},
        "share_of_product_rate": {name: work["flops"] / time / peak for name, time in median.items()},
        "times_as_fast": {name: time / median[OURS] for name, time in median.items() if name != OURS},
    }


def loss_differences(case: str, losses: Mapping[str, Sequence[float]], tolerance: float) -> dict[str, float]:
    """Returns the largest difference between our loss and each peer's in a step, relative to the peer's loss.

    Raises:
        RunError: a difference exceeds `tolerance`.
    """
    differences = {}
    for name in [name for name in losses if name != OURS]:
        ours, theirs = np.array(losses[OURS]), np.array(losses[name])
        difference = np.abs(ours - theirs) / np.abs(theirs)
        worst = int(np.argmax(difference))
        if not difference[worst] <= tolerance:
            raise RunError(
                f"{case}: the loss of step {worst + 1} is {ours[worst]:.6g}, but {theirs[worst]:.6g} with {name}: "
                f"their relative difference exceeds {tolerance:g}, so their speeds cannot be compared"
            )
        differences[name] = float(difference[worst])
    return differences


def print_speeds(result: Mapping[str, Any]) -> None:
    """Prints a table with one row per system."""
    title = f"{result['case']}: {result['rows']} x {result['length']} tokens, {result['dtype']}"
    if (products := result["products"]["dtype"]) != result["dtype"]:
        title += f", products of {products}"
    caption = "of peak: share of the FLOP/s of the fastest matmul; first step: with construction and empty caches"
    headings = ("", "ms/step", "tokens/s", "GFLOP/s", "of peak", "memory", "first step", f"{OURS} is")
    rows = [
        (
            name,
            f"{result['milliseconds'][name]:.1f}",
            f"{result['tokens_per_second'][name]:,.0f}",
            f"{result['flops_per_second'][name] / 1e9:.1f}",
            f"{result['share_of_product_rate'][name]:.0%}",
            f"{facts['peak_bytes'] / MIB:,.0f} MiB",
            f"{facts['first_step_seconds']:.1f} s",
            f"{result['times_as_fast'][name]:.2f} x" if name in result["times_as_fast"] else "",
        )
        for name, facts in result["systems"].items()
    ]
    Console(width=100).print(make_table(headings, rows, title=title, caption=caption))
