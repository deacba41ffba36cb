"""`scripts/benchmark.py attention`: time and memory of attention over long sequences."""

import argparse
import itertools
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tformer_jax.config import ConfigError, kinds
from tformer_jax.nn.attention_ops import attend
from tformer_jax.nn.masks import Mask

GIB = 2**30


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
