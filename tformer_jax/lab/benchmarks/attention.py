"""`scripts/benchmark.py attention`: time and memory of attention on long sequences."""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tformer_jax.base.cpu import peak_bytes
from tformer_jax.base.errors import UserError, first_line
from tformer_jax.base.numbers import GIB
from tformer_jax.config import kinds
from tformer_jax.nn.attention_ops import attend
from tformer_jax.nn.masks import Mask

Shape = tuple[int, int, int, int]


def attention_cases(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures each backend in a separate process, shortest sequences first, so that each length has its own peak."""
    cases = []
    for backend in options.backends:
        if backend not in kinds.BACKENDS:
            raise UserError(f"--backends {backend}: must be one or more of {', '.join(kinds.BACKENDS)}")
    shapes = [(options.batch, length, options.heads, options.head_dim) for length in sorted(set(options.length))]
    for backend in options.backends:
        arguments = backend, shapes, options.dtype, options.forward, options.repeat
        for shape, result in zip(shapes, _run_in_process(*arguments), strict=True):
            case = {"backend": backend, "shape": shape, "dtype": options.dtype, "forward_only": options.forward}
            cases.append(case | result)
            print(_line(cases[-1]), flush=True)
    return cases


def _line(case: dict[str, Any]) -> str:
    found = f"{case['shape'][1]} tokens, {case['backend']}: "
    if case["failure"]:
        return found + case["failure"]
    peak, planned = case["peak_bytes_beyond_inputs"] / GIB, case["planned_bytes"] / GIB
    return f"{found}{case['seconds']:.5f} s, peak {peak:.2f} GiB beyond the inputs, {planned:.2f} GiB planned by XLA"


def _run_in_process(
    backend: str, shapes: Sequence[Shape], dtype: str, forward: bool, repeat: int
) -> list[dict[str, Any]]:
    """Runs `measure_attention` in a process and merges what it sends for each shape, even if it is killed."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=measure_attention, args=(sender, backend, shapes, dtype, forward, repeat))
    process.start()
    sender.close()
    unknown = {"planned_bytes": None, "seconds": None, "peak_bytes_beyond_inputs": None, "finite": None}
    results: list[dict[str, Any]] = [unknown | {"failure": "killed, probably out of memory"} for _ in shapes]
    try:
        while True:
            number, part = receiver.recv()
            results[number] |= part
    except EOFError:
        process.join()
    return results


def measure_attention(pipe: Any, backend: str, shapes: Sequence[Shape], dtype: str, forward: bool, repeat: int) -> None:
    """Measures causal forward passes and, unless `forward`, backward passes for each shape [B, T, N, H].

    Sends (number of the shape, part of its result) through `pipe`: first the bytes that XLA plans for intermediate
    results, then the median seconds after one warm-up run, and the peak memory beyond the inputs: of the device, or on
    a CPU of the process. A shape that the backend rejects, or for which memory runs out, has a `failure` instead.
    """
    unrelated = None
    for number, shape in enumerate(shapes):
        try:
            q, k, v, weights = (jax.random.normal(jax.random.key(seed), shape, dtype) for seed in range(4))
            jax.block_until_ready((q, k, v, weights, jnp.zeros(())))
            if unrelated is None:
                unrelated = _peak_bytes() - 4 * q.nbytes
            for part in _measure((q, k, v), weights, backend, forward, repeat):
                pipe.send((number, part))
            peak = _peak_bytes() - unrelated - 4 * q.nbytes
            pipe.send((number, {"peak_bytes_beyond_inputs": peak, "failure": None}))
        except Exception as error:
            pipe.send((number, {"failure": first_line(error)}))


def _measure(
    inputs: tuple[jax.Array, ...], weights: jax.Array, backend: str, forward: bool, repeat: int
) -> Iterator[dict[str, Any]]:
    def total(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return (attend(q, k, v, Mask(causal=True, self_attention=True), backend=backend) * weights).sum()

    measured = total if forward else jax.grad(total, argnums=(0, 1, 2))
    compiled = jax.jit(measured).lower(*inputs).compile()
    analysis = compiled.memory_analysis()
    yield {"planned_bytes": 0 if analysis is None else analysis.temp_size_in_bytes}
    outputs = jax.block_until_ready(compiled(*inputs))
    yield {"finite": all(bool(jnp.isfinite(array).all()) for array in jax.tree.leaves(outputs))}
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*inputs))
        seconds.append(time.perf_counter() - start)
    yield {"seconds": statistics.median(seconds)}


def _peak_bytes() -> int:
    """Returns the peak memory of the device, or of this process if the device reports none, in bytes."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use") or peak_bytes()
