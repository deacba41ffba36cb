"""`scripts/benchmark.py growth`: training speed and memory by context length, depth, vocabulary or experts."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console

from tformer_jax.base.numbers import MIB
from tformer_jax.cli.tables import make_table
from tformer_jax.config import Config, DataConfig, ModelConfig
from tformer_jax.lab.benchmarks import train_cases
from tformer_jax.lab.benchmarks.processes import Remote
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
DATA = DataConfig(source="stdlib_text", batching="windows")


class Growth(NamedTuple):
    """A series of cases in which one size grows."""

    values: tuple[int, ...]
    tokens: int
    """Tokens per step."""
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
            yield value, Case(f"{name} {value:,}", cfg, self.tokens // length, length)


GROWTHS = {
    "context": Growth((256, 1024, 4096, 16_384), 16_384, None, lambda _: {}),
    "depth": Growth((4, 8, 12, 24), 1024, 128, lambda L: {"decoder_layers": L, **WIDER}),
    "vocabulary": Growth((1000, 8000, 32_000, 128_000), 512, 128, lambda V: {"vocab_size": V}),
    "experts": Growth((2, 8, 32), 1024, 128, lambda E: {"ffn": "moe", "moe": {"num_experts": E}}),
}


def measure_growth(names: Sequence[str], steps: int) -> dict[str, Any]:
    """Measures each case in a separate process, prints a table per series, and returns the record for `--record`."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        rows[name] = [{name: value} | measure_case(case, steps) for value, case in GROWTHS[name].cases(name)]
        print_growth(name, rows[name])
    return {"growths": rows}


def measure_case(case: Case, steps: int) -> dict[str, Any]:
    """Measures milliseconds, tokens/s and peak memory of a step, after one warm-up step."""
    with Remote("tformer_jax.lab.benchmarks.train_systems:Ours", case) as ours:
        ours.call("steps", 1)
        seconds = [ours.call("steps", 1)[0] for _ in range(steps)]
        facts, work = ours.call("facts"), ours.call("work")
    time = statistics.median(seconds)
    return {
        "layers": case.cfg.model.decoder_layers,
        "rows": case.rows,
        "length": case.length,
        **work,
        "milliseconds": 1000 * time,
        "milliseconds_per_layer": 1000 * time / case.cfg.model.decoder_layers,
        "tokens_per_second": work["tokens"] / time,
        "flops_per_second": work["flops"] / time,
        "peak_bytes": facts["peak_bytes"],
    }


def print_growth(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints a table with one row per value."""
    headings = (name, "rows x tokens", "ms/step", "ms/layer", "tokens/s", "GFLOP/s", "memory")
    cells = [
        (
            f"{row[name]:,}",
            f"{row['rows']} x {row['length']:,}",
            f"{row['milliseconds']:.1f}",
            f"{row['milliseconds_per_layer']:.2f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['flops_per_second'] / 1e9:.1f}",
            f"{row['peak_bytes'] / MIB:,.0f} MiB",
        )
        for row in rows
    ]
    Console(width=100).print(make_table(headings, cells, left=0))
