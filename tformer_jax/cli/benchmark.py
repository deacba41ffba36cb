"""`scripts/benchmark.py`: measurements that anyone can repeat."""

import argparse
import itertools
import multiprocessing
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from tformer_jax.cli.benchmark_data import data_cases
from tformer_jax.cli.benchmark_decode import add_flags, measure_decoding
from tformer_jax.cli.train import DATA_VARIABLE, check_writable
from tformer_jax.config import ConfigError, kinds
from tformer_jax.nn.attention_ops import attend
from tformer_jax.nn.masks import Mask
from tformer_jax.train import provenance, run_folder

GIB = 2**30


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one benchmark, prints a line a case, and writes all of it to `--record`."""
    options, overrides = parser().parse_known_args(argv)
    if overrides and options.benchmark != "data":
        raise ConfigError(f"unexpected argument {overrides[0]!r}")
    if options.record:
        check_writable(options.record)
    found = measured(options, overrides)
    if options.record:
        run_folder.write_json(options.record, provenance.collect() | found)


def measured(options: argparse.Namespace, overrides: Sequence[str]) -> dict[str, Any]:
    """What the chosen benchmark finds."""
    if options.benchmark == "decode":
        return measure_decoding(options)
    return {"cases": data_cases(options, overrides) if options.benchmark == "data" else attention_cases(options)}


def parser() -> argparse.ArgumentParser:
    """One subcommand a benchmark."""
    result = argparse.ArgumentParser(prog="benchmark.py", description=__doc__, allow_abbrev=False)
    commands = result.add_subparsers(dest="benchmark", required=True)
    attention = commands.add_parser(
        "attention", help="time and memory of attention, forward and backward, over long sequences"
    )
    attention.add_argument("--backends", nargs="+", default=["blockwise", "reference"], metavar="NAME")
    attention.add_argument(
        "--length", type=int, nargs="+", default=[16_384], metavar="T", help="tokens of a row (default: 16384)"
    )
    attention.add_argument("--batch", type=int, default=1, metavar="B", help="rows (default: 1)")
    attention.add_argument("--repeat", type=int, default=1, metavar="R", help="runs, of which the median is shown")
    attention.add_argument("--forward", action="store_true", help="without the backward pass")
    attention.add_argument("--heads", type=int, default=4, metavar="N")
    attention.add_argument("--head-dim", type=int, default=64, metavar="H")
    data = commands.add_parser("data", help="tokens/s of the data pipeline alone, from text and prepared, and padding")
    data.add_argument("--config", required=True, metavar="FILE[:VARIANT]")
    data.add_argument("--workers", type=int, default=2, metavar="N", help="loader processes to compare with a thread")
    data.add_argument("--seconds", type=float, default=5, metavar="S", help="of each measurement (default: 5)")
    data.add_argument("--data", type=Path, metavar="DIR", default=os.environ.get(DATA_VARIABLE))
    decode = commands.add_parser("decode", help="speed of decoding, beside Hugging Face's and CTranslate2's")
    add_flags(decode)
    for command in (attention, data, decode):
        command.add_argument("--record", type=Path, metavar="FILE", help="write the result to this JSON file")
    return result


def attention_cases(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Each backend in a process of its own, whose peak is then its own."""
    cases = []
    for backend in options.backends:
        if backend not in kinds.BACKENDS:
            raise ConfigError(f"--backends {backend}: write some of {', '.join(kinds.BACKENDS)}")
    for length, backend in itertools.product(options.length, options.backends):
        shape = (options.batch, length, options.heads, options.head_dim)
        found = _in_own_process(measure_attention, backend, shape, options.forward, options.repeat)
        case = {"backend": backend, "shape": shape, "forward_only": options.forward, **found}
        peak, planned = case["peak_bytes_beyond_inputs"], case["planned_bytes"]
        measured = (
            "killed, out of memory"
            if peak is None
            else f"{case['seconds']:.4f} s, peak {peak / GIB:.2f} GiB beyond the inputs"
        )
        print(f"{length} tokens, {backend}: {measured}, {planned / GIB:.2f} GiB planned by XLA", flush=True)
        cases.append(case)
    return cases


def _in_own_process(measure: Callable[..., None], *arguments: Any) -> dict[str, Any]:
    """What `measure(pipe, *arguments)` sends through the pipe, all of it together, also if it is killed on the way."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=measure, args=(sender, *arguments))
    process.start()
    sender.close()
    found: dict[str, Any] = {}
    try:
        while True:
            found |= receiver.recv()
    except EOFError:
        process.join()
    return found


def measure_attention(pipe: Any, backend: str, shape: tuple[int, int, int, int], forward: bool, repeat: int) -> None:
    """Memory and median seconds of causal forward (and, unless `forward`, backward) passes, sent through `pipe`.

    First what XLA plans for intermediate results, then the peak of the process beyond its inputs (host memory: on
    another device it says nothing), or None where the process does not live to tell.
    """
    q, k, v, weights = (jax.random.normal(jax.random.key(seed), shape) for seed in range(4))

    def total(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return (attend(q, k, v, Mask(causal=True), backend=backend) * weights).sum()

    jax.block_until_ready((q, k, v, weights, jnp.zeros(())))
    before = _peak_bytes()
    measured = total if forward else jax.grad(total, argnums=(0, 1, 2))
    compiled = jax.jit(measured).lower(q, k, v).compile()
    analysis = compiled.memory_analysis()
    planned = 0 if analysis is None else analysis.temp_size_in_bytes
    pipe.send({"planned_bytes": planned, "peak_bytes_beyond_inputs": None, "seconds": None})
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        found = jax.block_until_ready(compiled(q, k, v))
        seconds.append(time.perf_counter() - start)
    pipe.send({"seconds": statistics.median(seconds), "peak_bytes_beyond_inputs": _peak_bytes() - before})
    pipe.send({"finite": all(bool(jnp.isfinite(array).all()) for array in jax.tree.leaves(found))})


def _peak_bytes() -> int:
    """The most memory that this process has held so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
