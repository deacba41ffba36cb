"""`scripts/benchmark.py attention`: time and memory of attention on long sequences."""

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
    """Measures each backend in a separate process, for its own peak memory."""
    cases = []
    for backend in options.backends:
        if backend not in kinds.BACKENDS:
            raise ConfigError(f"--backends {backend}: must be one or more of {', '.join(kinds.BACKENDS)}")
    for length, backend in itertools.product(options.length, options.backends):
        shape = (options.batch, length, options.heads, options.head_dim)
        result = _run_in_process(measure_attention, backend, shape, options.forward, options.repeat)
        case = {"backend": backend, "shape": shape, "forward_only": options.forward, **result}
        peak, planned = case["peak_bytes_beyond_inputs"], case["planned_bytes"]
        measured = (
            "killed, out of memory"
            if peak is None
            else f"{case['seconds']:.4f} s, peak {peak / GIB:.2f} GiB beyond the inputs"
        )
        print(f"{length} tokens, {backend}: {measured}, {planned / GIB:.2f} GiB planned by XLA", flush=True)
        cases.append(case)
    return cases


def _run_in_process(measure: Callable[..., None], *arguments: Any) -> dict[str, Any]:
    """Runs `measure(pipe, *arguments)` in a process and merges what it sends, even if it is killed before its end."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=measure, args=(sender, *arguments))
    process.start()
    sender.close()
    result: dict[str, Any] = {}
    try:
        while True:
            result |= receiver.recv()
    except EOFError:
        process.join()
    return result


def measure_attention(pipe: Any, backend: str, shape: tuple[int, int, int, int], forward: bool, repeat: int) -> None:
    """Measures causal forward passes and, unless `forward`, backward passes; sends the results through `pipe`.

    Sends the bytes that XLA plans for intermediate results, then the median seconds and the peak memory of the process
    beyond its inputs. That is host memory, meaningful on a CPU only. Both are None if the process is killed.
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
        outputs = jax.block_until_ready(compiled(q, k, v))
        seconds.append(time.perf_counter() - start)
    pipe.send({"seconds": statistics.median(seconds), "peak_bytes_beyond_inputs": _peak_bytes() - before})
    pipe.send({"finite": all(bool(jnp.isfinite(array).all()) for array in jax.tree.leaves(outputs))})


def _peak_bytes() -> int:
    """Returns the peak memory of this process, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
