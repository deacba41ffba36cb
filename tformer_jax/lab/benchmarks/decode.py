"""`scripts/benchmark.py decode`: decoding speed of this library, Hugging Face and CTranslate2 with the same weights."""

import argparse
import dataclasses
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from tformer_jax import presets
from tformer_jax.base import checks
from tformer_jax.base.errors import RunError, UserError
from tformer_jax.cli.common import add_number
from tformer_jax.cli.tables import make_table, table_console
from tformer_jax.config import ModelConfig
from tformer_jax.config.fields import INT32_MAX, flag
from tformer_jax.interop import hf
from tformer_jax.lab.benchmarks import decode_systems
from tformer_jax.lab.benchmarks.decode_systems import PEERS, Rows, System
from tformer_jax.lab.benchmarks.turns import alternate_runs, time_second_call
from tformer_jax.models import registry
from tformer_jax.runs import provenance
from tformer_jax.special_tokens import BOS, EOS, PAD, PAD_TOKEN, SPECIAL_TOKENS, UNK

OURS = "tformer_jax"
LOOP = "its jitted loop"
"""Decoding by one compiled loop per batch, without the engine; shows the overhead of the engine."""
GAINS = {"embedding": 4.0, "['ffn']": 4.0, "query": 2.0, "key": 2.0}
"""Factors on initial weights by part of the parameter's path, so that outputs do not repeat tokens or depend on
rounding errors."""
BANNED_BIAS = -1e4
"""Output bias of tokens that must not be generated."""
MIN_EQUAL_ROWS = 0.95
"""Minimum share of rows on which two systems must agree."""


FLAGS = {
    "layers": (3, 1, 48, "encoder layers, and decoder layers"),
    "dim": (256, 2, 8192, "model width"),
    "heads": (8, 1, 128, "attention heads"),
    "ffn_dim": (1024, 1, 65_536, "FFN width"),
    "vocab": (8000, 64, 1_000_000, "vocabulary size"),
    "batch": (32, 1, 4096, "rows per batch"),
    "source": (24, 2, 256, "source tokens per row of the batch; lines of the file have from 4 to twice this number"),
    "length": (32, 1, 512, "tokens to generate per row"),
    "beams": (4, 2, 16, "beam width of beam search"),
    "lines": (1000, 0, 10_000_000, "lines of the file; 0: no file"),
    "rounds": (7, 1, 1000, "measurements per system; the median is reported"),
    "seed": (0, 0, INT32_MAX, "random seed of weights and sources"),
}
"""Command-line flags: their defaults, lowest and highest values, and meanings."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """Rows to decode, and the beam width (1: greedy)."""

    name: str
    rows: Rows
    beams: int

    @property
    def title(self) -> str:
        """Description for tables and messages."""
        return f"{self.name}, beam {self.beams}" if self.beams > 1 else f"{self.name}, greedy"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags for the sizes of model and workload."""
    for name, (default, lowest, highest, meaning) in FLAGS.items():
        add_number(parser, flag(name), meaning, default, lowest=lowest, highest=highest)


def measure_decoding(options: argparse.Namespace) -> dict[str, Any]:
    """Measures every installed system, prints a table per workload, and returns the record for `--record`.

    Raises:
        UserError: as `check_options`.
        RunError: the outputs of a system differ from this library's.
    """
    check_options(options)
    threads = provenance.describe_hardware()["cores"]
    systems = installed_systems(*random_model(options), options, threads)
    cases = []
    for workload in workloads(options):
        cases.append(measure_workload(workload, systems, options.rounds))
        print_speeds(workload.title, cases[-1])
    return {
        "sizes": {name: vars(options)[name] for name in FLAGS},
        "threads": threads,
        "versions": {name: decode_systems.versions(system) for name, system in systems.items()},
        "cases": cases,
    }


def check_options(options: argparse.Namespace) -> None:
    """Raises `UserError` if the heads do not divide the width or JAX does not use the CPU."""
    if options.dim % (2 * options.heads):
        raise UserError(f"--dim {options.dim}: must be a multiple of {2 * options.heads}, twice --heads")
    if jax.default_backend() != "cpu":
        raise UserError(
            f"this benchmark runs on the CPU, but JAX uses the {jax.default_backend()}: set JAX_PLATFORMS=cpu"
        )


def random_model(options: argparse.Namespace) -> tuple[ModelConfig, Any]:
    """Builds a model of Marian's architecture with random weights that never generates EOS.

    CTranslate2 drops Marian's last token and starts decoding from a zero vector. Therefore the last token is banned and
    the embedding of BOS is zero. The second kernel of each FFN is centered over its inputs, because their mean is not
    zero: otherwise all outputs of the FFN would share a large component.
    """
    sizes = {"dim": options.dim, "num_heads": options.heads, "ffn_dim": options.ffn_dim}
    sizes |= dict.fromkeys(("encoder_layers", "decoder_layers"), options.layers)
    sizes |= dict.fromkeys(("vocab_size", "source_vocab_size"), options.vocab)
    cfg = presets.build("opus_mt", initializer="xavier", **sizes)

    def adjust(path: Any, leaf: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        leaf = leaf * next((gain for part, gain in GAINS.items() if part in name), 1.0)
        if "embedding" in name:
            return leaf.at[np.array([PAD_TOKEN, BOS])].set(0)
        if "head" in name:
            return leaf.at[np.array([PAD_TOKEN, BOS, EOS, UNK, -1])].set(BANNED_BIAS)
        return leaf - leaf.mean(axis=0) if "contract" in name else leaf

    @jax.jit
    def init(key: jax.Array) -> Any:
        return jax.tree_util.tree_map_with_path(adjust, nn.unbox(registry.init(registry.build(cfg), key)))

    return cfg, init(jax.random.key(options.seed))


def installed_systems(cfg: ModelConfig, params: Any, options: argparse.Namespace, threads: int) -> dict[str, System]:
    """Builds this library's systems and the installed peers, by name; prints which peers are not installed."""
    model: Any = registry.build(cfg)
    parts = model, params, options.batch, options.length
    systems: dict[str, System] = {OURS: decode_systems.Ours(*parts), LOOP: decode_systems.JittedLoop(*parts)}
    absent = {name: checks.not_installed(modules) for name, (_, modules) in PEERS.items()}
    for name in filter(absent.get, absent):
        print(f'skipping {name}: {", ".join(absent[name])} not installed: pip install -e ".[benchmark]"', flush=True)
    present = [name for name in absent if not absent[name]]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if present:
            hf.save(folder, "marian", cfg, params)
        return systems | {name: PEERS[name][0](folder, options.batch, options.length, threads) for name in present}


def workloads(options: argparse.Namespace) -> list[Workload]:
    """Returns greedy and beam search on one batch, and on the lines of a file."""
    rng = np.random.default_rng(options.seed)

    def rows(lengths: np.ndarray) -> Rows:
        return [[*rng.integers(len(SPECIAL_TOKENS), options.vocab - 1, size - 1).tolist(), EOS] for size in lengths]

    batch = rows(np.full(options.batch, options.source))
    file = rows(rng.integers(4, 2 * options.source + 1, options.lines))
    sources = {f"a batch of {options.batch}": batch} | ({f"{options.lines:,} lines": file} if file else {})
    return [Workload(name, rows, beams) for name, rows in sources.items() for beams in (1, options.beams)]


def measure_workload(workload: Workload, systems: Mapping[str, System], rounds: int) -> dict[str, Any]:
    """Compares the outputs of the systems, which also compiles, then measures them alternately."""
    runs = {name: system.prepare(workload.rows, workload.beams) for name, system in systems.items()}
    outputs = {name: system.tokens(runs[name]()) for name, system in systems.items()}
    equal = {name: equal_row_share(workload, name, outputs[OURS], outputs[name]) for name in systems if name != OURS}
    seconds = alternate_runs({name: time_second_call(run) for name, run in runs.items()}, rounds)
    produced = outputs[OURS].size
    speeds = {name: produced / statistics.median(times) for name, times in seconds.items()}
    return {
        "work": workload.name,
        "beams": workload.beams,
        "tokens": produced,
        "distinct_tokens_per_row": float(np.mean([len(set(row)) for row in outputs[OURS].tolist()])),
        "equal_rows": equal,
        "tokens_per_second": speeds,
        "times_as_fast": {name: speeds[OURS] / speeds[name] for name in equal},
        "seconds": seconds,
    }


def equal_row_share(workload: Workload, name: str, ours: np.ndarray, theirs: np.ndarray) -> float:
    """Returns the share of rows of full length with equal tokens in both outputs, int [rows, length].

    Raises:
        RunError: the share is below `MIN_EQUAL_ROWS`.
    """
    equal = (ours == theirs).all(axis=1) & (ours != PAD).all(axis=1)
    if equal.mean() < MIN_EQUAL_ROWS:
        raise RunError(
            f"{workload.title}: the outputs of {name} and {OURS} differ in {(~equal).sum():,} of "
            f"{len(equal):,} rows, so their speeds cannot be compared"
        )
    return float(equal.mean())


def print_speeds(title: str, case: dict[str, Any]) -> None:
    """Prints a table with one row per system."""
    rows = []
    for name, speed in case["tokens_per_second"].items():
        peer = name in case["equal_rows"]
        ratio = f"{case['times_as_fast'][name]:.2f} x as fast" if peer else ""
        rows.append((name, f"{speed:,.0f}", ratio, f"{case['equal_rows'][name]:.1%}" if peer else ""))
    headings = ("system", "tokens/s", f"{OURS} is", "equal rows")
    table_console().print(make_table(headings, rows, title=f"{title}: {case['tokens']:,} tokens"))
