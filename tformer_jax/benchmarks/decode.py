"""`scripts/benchmark.py decode`: how fast this library, Hugging Face and CTranslate2 decode with the same weights."""

import argparse
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn
from rich.console import Console
from rich.table import Table

from tformer_jax import presets
from tformer_jax.benchmarks import decode_systems
from tformer_jax.benchmarks.decode_systems import PEERS, Rows, System
from tformer_jax.config import ConfigError, ModelConfig
from tformer_jax.interop import hf
from tformer_jax.models import registry
from tformer_jax.special_tokens import BOS, EOS, PAD, SPECIAL_TOKENS, UNK
from tformer_jax.train import provenance
from tformer_jax.train.errors import RunError

OURS = "tformer_jax"
LOOP = "its jitted loop"
"""Outputs by one compiled loop for each batch, without the engine: the engine should hardly be slower."""
GAINS = {"embedding": 4.0, "['ffn']": 4.0, "query": 2.0, "key": 2.0}
"""By how much these are larger than at the start of training: then outputs neither repeat themselves, nor do rounding
errors grow until they change them."""
NEVER = -1e4
"""The output bias of tokens that must not come."""
LEAST_EQUAL = 0.95
"""The share of a peer's rows that must equal ours."""
PAUSE = 0.3
"""Seconds before each measurement: threads of the system before it may spin so long."""


class Flag(NamedTuple):
    """A whole number that the command line may change."""

    default: int
    lowest: int
    highest: int
    meaning: str


FLAGS = {
    "layers": Flag(3, 1, 48, "encoder layers, and as many decoder layers"),
    "dim": Flag(256, 2, 8192, "model width"),
    "heads": Flag(8, 1, 128, "attention heads"),
    "ffn_dim": Flag(1024, 1, 65_536, "FFN width"),
    "vocab": Flag(8000, 64, 1_000_000, "tokens of the vocabulary"),
    "batch": Flag(32, 1, 4096, "rows of a batch"),
    "source": Flag(24, 2, 256, "source tokens of each row of the batch; those of the file have 4 to twice as many"),
    "length": Flag(32, 1, 512, "tokens that are made for each row"),
    "beams": Flag(4, 2, 16, "beams, where decoding is not greedy"),
    "lines": Flag(1000, 0, 10_000_000, "lines of the file; 0: none"),
    "rounds": Flag(7, 1, 1000, "measurements of each system, of which the median counts"),
    "seed": Flag(0, 0, 2**31 - 1, "of weights and sources"),
}


@dataclasses.dataclass(frozen=True)
class Work:
    """What is decoded, and how."""

    name: str
    rows: Rows
    beams: int

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.name}, beam {self.beams}" if self.beams > 1 else f"{self.name}, greedy"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The sizes of the model and of the work."""
    for name, flag in FLAGS.items():
        text = f"{flag.meaning} (default: {flag.default})"
        parser.add_argument(spelled(name), type=int, default=flag.default, metavar="N", help=text)


def spelled(name: str) -> str:
    """A flag as the command line has it."""
    return f"--{name.replace('_', '-')}"


def measure_decoding(options: argparse.Namespace) -> dict[str, Any]:
    """Measures every installed system, prints a table for each work, and gives what `--record` writes.

    Raises:
        ConfigError: a flag is out of its bounds, or JAX uses another device than the CPU.
        RunError: a system gives other outputs than this library.
    """
    check(options)
    threads = provenance.hardware()["cores"]
    systems = installed_systems(*network(options), options, threads)
    cases = []
    for work in works(options):
        cases.append(measure(work, systems, options.rounds))
        show(work.title, cases[-1])
    return {
        "sizes": {name: vars(options)[name] for name in FLAGS},
        "threads": threads,
        "versions": {name: decode_systems.versions(system) for name, system in systems.items()},
        "cases": cases,
    }


def check(options: argparse.Namespace) -> None:
    """Raises `ConfigError` for a number out of its bounds, and where JAX would use what the others do not."""
    for name, flag in FLAGS.items():
        value = vars(options)[name]
        if not flag.lowest <= value <= flag.highest:
            raise ConfigError(f"{spelled(name)} {value}: write a whole number from {flag.lowest} to {flag.highest}")
    if options.dim % (2 * options.heads):
        raise ConfigError(f"--dim {options.dim}: write a multiple of {2 * options.heads}, which is twice --heads")
    if jax.default_backend() != "cpu":
        raise ConfigError(f"all systems decode on the CPU, but JAX uses the {jax.default_backend()}: JAX_PLATFORMS=cpu")


def network(options: argparse.Namespace) -> tuple[ModelConfig, Any]:
    """A model of Marian's architecture with random weights, which never ends an output.

    CTranslate2 has no place for Marian's last token, and starts from a vector of zeros: so the last token never comes
    here, and BOS is zeros. Kernels that end an FFN have no mean over what they read, whose own mean is not zero: else
    all vectors would have that in common.
    """
    sizes = {"dim": options.dim, "num_heads": options.heads, "ffn_dim": options.ffn_dim}
    sizes |= dict.fromkeys(("encoder_layers", "decoder_layers"), options.layers)
    sizes |= dict.fromkeys(("vocab_size", "source_vocab_size"), options.vocab)
    cfg = presets.build("opus_mt", initializer="xavier", **sizes)

    def changed(path: Any, leaf: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        leaf = leaf * next((gain for part, gain in GAINS.items() if part in name), 1.0)
        if "embedding" in name:
            return leaf.at[np.array([PAD, BOS])].set(0)
        if "head" in name:
            return leaf.at[np.array([PAD, BOS, EOS, UNK, -1])].set(NEVER)
        return leaf - leaf.mean(axis=0) if "contract" in name else leaf

    @jax.jit
    def start(key: jax.Array) -> Any:
        return jax.tree_util.tree_map_with_path(changed, nn.unbox(registry.init(registry.build(cfg), key)))

    return cfg, start(jax.random.key(options.seed))


def installed_systems(cfg: ModelConfig, params: Any, options: argparse.Namespace, threads: int) -> dict[str, System]:
    """This library and the peers that are installed, by name; says which are not."""
    model: Any = registry.build(cfg)
    parts = model, params, options.batch, options.length
    systems: dict[str, System] = {OURS: decode_systems.Ours(*parts), LOOP: decode_systems.JittedLoop(*parts)}
    absent = {name: decode_systems.missing(modules) for name, (_, modules) in PEERS.items()}
    for name in filter(absent.get, absent):
        print(f'{name} is left out, for want of {", ".join(absent[name])}: pip install -e ".[benchmark]"', flush=True)
    present = [name for name in absent if not absent[name]]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if present:
            hf.save(folder, "marian", cfg, params)
        return systems | {name: PEERS[name][0](folder, options.batch, options.length, threads) for name in present}


def works(options: argparse.Namespace) -> list[Work]:
    """Greedy and beam search of one batch, and of a file."""
    rng = np.random.default_rng(options.seed)

    def rows(lengths: np.ndarray) -> Rows:
        return [[*rng.integers(len(SPECIAL_TOKENS), options.vocab - 1, size - 1).tolist(), EOS] for size in lengths]

    batch = rows(np.full(options.batch, options.source))
    file = rows(rng.integers(4, 2 * options.source + 1, options.lines))
    sources = {f"a batch of {options.batch}": batch} | ({f"{options.lines:,} lines": file} if file else {})
    return [Work(name, rows, beams) for name, rows in sources.items() for beams in (1, options.beams)]


def measure(work: Work, systems: Mapping[str, System], rounds: int) -> dict[str, Any]:
    """Outputs are compared first, which also compiles; after one more call each, the systems take turns.

    An engine of ours begins its second work with arrays as long as its first one needed, which compiles once more.
    """
    runs = {name: system.prepare(work.rows, work.beams) for name, system in systems.items()}
    outputs = {name: system.tokens(runs[name]()) for name, system in systems.items()}
    equal = {name: agreement(work, name, outputs[OURS], outputs[name]) for name in systems if name != OURS}
    for run in runs.values():
        run()
    seconds = alternate(runs, rounds)
    produced = outputs[OURS].size
    speeds = {name: produced / statistics.median(times) for name, times in seconds.items()}
    return {
        "work": work.name,
        "beams": work.beams,
        "tokens": produced,
        "distinct_tokens_per_row": float(np.mean([len(set(row)) for row in outputs[OURS].tolist()])),
        "equal_rows": equal,
        "tokens_per_second": speeds,
        "times_as_fast": {name: speeds[OURS] / speeds[name] for name in equal},
        "seconds": seconds,
    }


def agreement(work: Work, name: str, ours: np.ndarray, theirs: np.ndarray) -> float:
    """The share of rows in which both outputs, int [rows, length], have the same tokens, and all of them.

    Raises:
        RunError: it is too small for a comparison of speed.
    """
    equal = (ours == theirs).all(axis=1) & (ours != PAD).all(axis=1)
    if equal.mean() < LEAST_EQUAL:
        raise RunError(
            f"{work.title}: {name} gives other outputs than {OURS} in {(~equal).sum():,} of "
            f"{len(equal):,} rows, so that their speeds are not compared"
        )
    return float(equal.mean())


def alternate(runs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each run in each round; every round begins with another one."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            time.sleep(PAUSE)
            start = time.perf_counter()
            runs[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def show(title: str, case: dict[str, Any]) -> None:
    """A table with a row for each system."""
    table = Table("system", "tokens/s", f"{OURS} is", "equal rows", title=f"{title}: {case['tokens']:,} tokens")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, speed in case["tokens_per_second"].items():
        peer = name in case["equal_rows"]
        ratio = f"{case['times_as_fast'][name]:.2f} x as fast" if peer else ""
        table.add_row(name, f"{speed:,.0f}", ratio, f"{case['equal_rows'][name]:.1%}" if peer else "")
    Console().print(table)
