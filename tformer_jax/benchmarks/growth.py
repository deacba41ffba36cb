"""`scripts/benchmark.py growth`: speed and memory of a training step as context, depth, vocabulary or experts grow."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from tformer_jax.benchmarks import train_cases
from tformer_jax.benchmarks.processes import Remote
from tformer_jax.benchmarks.train_cases import Case
from tformer_jax.config import Config, DataConfig, ModelConfig

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
"""What is not changed."""
DATA = DataConfig(source="stdlib_text", batching="windows")
MIB = 2**20


class Growth(NamedTuple):
    """One size that grows."""

    values: tuple[int, ...]
    setting: str | None
    """Of the model; None: the number of tokens in a row."""
    tokens: int
    """Of a step."""
    length: int
    model: dict[str, Any]

    def cases(self, name: str) -> Iterator[tuple[int, Case]]:
        """The case of each value."""
        for value in self.values:
            changed = {} if self.setting is None else {self.setting: value}
            length = self.length if self.setting else value
            model = ModelConfig(**(MODEL | self.model | changed))
            cfg = train_cases.resolved(Config(model=model, data=DATA), model.known("vocab_size"))
            yield value, Case(f"{name} {value:,}", cfg, self.tokens // length, length)


GROWTHS = {
    "context": Growth((256, 1024, 4096, 16_384), None, 16_384, 0, {}),
    "depth": Growth((4, 8, 12, 24), "decoder_layers", 1024, 128, {"dim": 128, "ffn_dim": 512, "num_heads": 4}),
    "vocabulary": Growth((1000, 8000, 32_000, 128_000), "vocab_size", 512, 128, {}),
    "experts": Growth((2, 8, 32), "num_experts", 1024, 128, {"ffn": "moe", "experts_per_token": 2}),
}


def measure_growth(names: Sequence[str], steps: int) -> dict[str, Any]:
    """Measures each size in a process of its own, prints a table for each growth, and gives what `--record` writes."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        found[name] = [{name: value} | measure(case, steps) for value, case in GROWTHS[name].cases(name)]
        show(name, found[name])
    return {"growths": found}


def measure(case: Case, steps: int) -> dict[str, Any]:
    """Milliseconds, tokens/s and peak memory of a step; the first one is not measured."""
    with Remote("tformer_jax.benchmarks.train_systems:Ours", case) as ours:
        ours.call("steps", 1)
        seconds, _ = ours.call("steps", steps)
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


def show(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """A table with a row for each value."""
    table = Table(name, "rows x tokens", "ms/step", "ms/layer", "tokens/s", "GFLOP/s", "memory")
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        table.add_row(
            f"{row[name]:,}",
            f"{row['rows']} x {row['length']:,}",
            f"{row['milliseconds']:.1f}",
            f"{row['milliseconds_per_layer']:.2f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['flops_per_second'] / 1e9:.1f}",
            f"{row['peak_bytes'] / MIB:,.0f} MiB",
        )
    Console(width=100).print(table)
