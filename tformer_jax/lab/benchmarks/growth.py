"""`scripts/benchmark.py growth`: training speed and memory by context length, depth, vocabulary or experts.

PyTorch, eager, is measured beside each case that its model supports.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console

from tformer_jax.cli.common import format_size
from tformer_jax.cli.tables import make_table
from tformer_jax.config import Config, DataConfig, ModelConfig
from tformer_jax.lab.benchmarks import train_cases
from tformer_jax.lab.benchmarks.processes import Remote
from tformer_jax.lab.benchmarks.train import EAGER, OURS, start_systems
from tformer_jax.lab.benchmarks.train_cases import Case

MODEL: dict[str, Any] = {
    "family": "decoder_lm",
    "vocab_size": 256,
    "max_length": 2**20,
    "dim": 64,
    "decoder_layers": 2,
    "num_heads": 2,
    "ffn_dim": 256,
    "position": "rotary",
    "dropout": 0.0,
}
"""Common settings of all cases."""
WIDER: dict[str, Any] = {"dim": 128, "ffn_dim": 512, "num_heads": 4}
HEADINGS = ("rows x tokens", "step", "tokens/s", "exponent", "memory", "exponent", "PyTorch", "its memory")
CAPTION = "exponent: of the size, with which time and memory per token grow from the row before"
DATA = DataConfig(source="stdlib_text", batching="windows")


class Growth(NamedTuple):
    """A series of cases in which one size grows."""

    values: tuple[int, ...]
    tokens: int
    """Tokens per step; a longer row is a step of its own."""
    length: int | None
    """Tokens per row; None: the row length grows."""
    model: Callable[[int], dict[str, Any]]
    """Value -> settings of the model."""

    def cases(self, name: str) -> Iterator[tuple[int, Case]]:
        """Yields each value with its case."""
        for value in self.values:
            length = self.length or value
            model = ModelConfig(**MODEL | self.model(value))
            cfg = train_cases.for_timing(Config(model=model, data=DATA), model.size("vocab_size"))
            yield value, Case(f"{name} {value:,}", cfg, max(1, self.tokens // length), length)


GROWTHS = {
    "context": Growth((256, 1024, 4096, 16_384, 65_536), 16_384, None, lambda _: {}),
    "gated-delta context": Growth(
        (1024, 4096, 16_384, 65_536, 131_072), 16_384, None, lambda _: {"attention": "gated_delta", "position": "none"}
    ),
    "depth": Growth((4, 8, 12, 24, 128), 1024, 128, lambda L: {"decoder_layers": L, **WIDER}),
    "vocabulary": Growth((1000, 8000, 32_000, 128_000, 256_000), 512, 128, lambda V: {"vocab_size": V}),
    "experts": Growth((2, 8, 32, 128), 1024, 128, lambda E: {"ffn": "moe", "moe": {"num_experts": E}}),
}


def measure_growth(names: Sequence[str], steps: int) -> dict[str, Any]:
    """Measures each case in separate processes, prints a table per series, and returns the record for `--record`."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        rows[name] = [{name: value} | measure_case(case, steps, (EAGER,)) for value, case in GROWTHS[name].cases(name)]
        table = make_table((name, *HEADINGS), growth_cells(name, rows[name]), left=0, caption=CAPTION)
        Console(width=120).print(table)
    return {"growths": rows}


def measure_case(case: Case, steps: int, peers: Sequence[str] = ()) -> dict[str, Any]:
    """Measures milliseconds, tokens/s and peak memory of a step, after one warm-up step, here and in each peer."""
    with start_systems(case, peers) as systems:
        milliseconds = {name: 1000 * time_step(system, steps) for name, system in systems.items()}
        memory = {name: system.call("facts")["peak_bytes"] for name, system in systems.items()}
        work = systems[OURS].call("work")
    ours = milliseconds.pop(OURS)
    return {
        "layers": case.cfg.model.decoder_layers,
        "rows": case.rows,
        "length": case.length,
        **work,
        "milliseconds": ours,
        "tokens_per_second": 1000 * work["tokens"] / ours,
        "flops_per_second": 1000 * work["flops"] / ours,
        "peak_bytes": memory.pop(OURS),
        "peers": {name: {"milliseconds": milliseconds[name], "peak_bytes": memory[name]} for name in milliseconds},
    }


def time_step(system: Remote, steps: int) -> float:
    """Returns the median seconds of a step, after one that is not measured."""
    system.call("steps", 1)
    return statistics.median(system.call("steps", 1)[0] for _ in range(steps))


def exponents(name: str, rows: Sequence[Mapping[str, Any]]) -> list[tuple[float, float] | None]:
    """Returns the exponents of size with which time and memory per token grow from the row before; None for the first.

    Args:
        name: key of the size.
    """

    def exponent(before: Mapping[str, Any], row: Mapping[str, Any], cost: str) -> float:
        ratio = row[cost] / row["tokens"] / (before[cost] / before["tokens"])
        return math.log(ratio) / math.log(row[name] / before[name])

    return [None] + [
        (exponent(before, row, "milliseconds"), exponent(before, row, "peak_bytes"))
        for before, row in itertools.pairwise(rows)
    ]


def growth_cells(name: str, rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Returns the cells of a table with one row per value, under the `HEADINGS` after the size."""
    cells: list[tuple[str, ...]] = []
    for row, powers in zip(rows, exponents(name, rows), strict=True):
        time, memory = ("", "") if powers is None else (f"{power:.2f}" for power in powers)
        peer = row.get("peers", {}).get(EAGER)
        theirs = ("", "") if peer is None else (f"{peer['milliseconds']:,.1f} ms", format_size(peer["peak_bytes"]))
        size = f"{row[name]:,}", f"{row['rows']} x {row['length']:,}"
        speed = f"{row['milliseconds']:,.1f} ms", f"{row['tokens_per_second']:,.0f}"
        cells.append((*size, *speed, time, format_size(row["peak_bytes"]), memory, *theirs))
    return cells
