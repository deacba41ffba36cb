"""`scripts/benchmark.py attention`: time and memory of attention on long sequences."""

import argparse
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from tformer_jax.base.errors import RunError, UserError, first_line
from tformer_jax.base.numbers import GIB
from tformer_jax.config import kinds
from tformer_jax.lab.benchmarks.processes import Remote
from tformer_jax.nn.attention_ops import attend
from tformer_jax.nn.masks import Mask
from tformer_jax.runs.hardware import memory_bytes

Shape = tuple[int, int, int, int]


def attention_cases(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures each backend in a separate process, shortest sequences first, so that each length has its own peak."""
    cases = []
    for backend in options.backends:
        if backend not in kinds.BACKENDS:
            raise UserError(f"--backends {backend}: must be one or more of {', '.join(kinds.BACKENDS)}")
    for backend in options.backends:
        settings = backend, options.dtype, options.forward, options.repeat
        with Remote("tformer_jax.lab.benchmarks.attention:Passes", *settings) as passes:
            for length in sorted(set(options.length)):
                shape = options.batch, length, options.heads, options.head_dim
                case = {"backend": backend, "shape": shape, "dtype": options.dtype, "forward_only": options.forward}
                cases.append(case | measure_shape(passes, shape))
                print(_format_case(cases[-1]), flush=True)
    return cases


def measure_shape(passes: Remote, shape: Shape) -> dict[str, Any]:
    """Returns what `Passes` measures for inputs [B, T, N, H]; values that a failure leaves unknown are None."""
    result: dict[str, Any] = {"planned_bytes": None, "seconds": None, "peak_bytes_beyond_inputs": None, "finite": None}
    try:
        result |= {"failure": None} | passes.call("compile", shape)
        return result if result["failure"] else result | passes.call("run")
    except RunError as error:
        return result | {"failure": str(error)}


def _format_case(case: dict[str, Any]) -> str:
    name = f"{case['shape'][1]} tokens, {case['backend']}: "
    if case["failure"]:
        return name + case["failure"]
    peak, planned = case["peak_bytes_beyond_inputs"] / GIB, case["planned_bytes"] / GIB
    return f"{name}{case['seconds']:.5f} s, peak {peak:.2f} GiB beyond the inputs, {planned:.2f} GiB planned by XLA"


class Passes:
    """Causal forward passes and, unless `forward`, backward passes of one backend.

    A shape that the backend rejects, or for which memory runs out, has a `failure`.
    """

    def __init__(self, backend: str, dtype: str, forward: bool, repeat: int):
        self._backend, self._dtype, self._forward, self._repeat = backend, dtype, forward, repeat
        self._unrelated: int | None = None
        """Peak memory before the first pass, without its inputs."""
        self._inputs: list[jax.Array] = []
        self._compiled: Any = None

    def compile(self, shape: Shape) -> dict[str, Any]:
        """Compiles a pass over inputs [B, T, N, H]; returns the bytes that XLA plans for intermediate results."""
        self._inputs, self._compiled = [], None  # frees the arrays of the last shape
        try:
            *inputs, weights = (jax.random.normal(jax.random.key(seed), shape, self._dtype) for seed in range(4))
            jax.block_until_ready((inputs, weights, jnp.zeros(())))
            self._inputs, bytes_of_inputs = inputs, 4 * weights.nbytes
            if self._unrelated is None:
                self._unrelated = memory_bytes(jax.local_devices()) - bytes_of_inputs
            self._baseline = self._unrelated + bytes_of_inputs

            def total(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                mask = Mask(causal=True, self_attention=True)
                return (attend(q, k, v, mask, backend=self._backend) * weights).sum()

            measured = total if self._forward else jax.grad(total, argnums=(0, 1, 2))
            self._compiled = jax.jit(measured).lower(*inputs).compile()
            analysis = self._compiled.memory_analysis()
            return {"planned_bytes": 0 if analysis is None else analysis.temp_size_in_bytes}
        except Exception as error:
            return {"failure": first_line(error)}

    def run(self) -> dict[str, Any]:
        """Returns the median seconds after one warm-up run, and the peak memory beyond the inputs.

        The device reports the peak; on a CPU, it is the peak of the process.
        """
        try:
            outputs = jax.block_until_ready(self._compiled(*self._inputs))
            finite = all(bool(jnp.isfinite(array).all()) for array in jax.tree.leaves(outputs))
            seconds = []
            for _ in range(self._repeat):
                start = time.perf_counter()
                jax.block_until_ready(self._compiled(*self._inputs))
                seconds.append(time.perf_counter() - start)
            peak = memory_bytes(jax.local_devices()) - self._baseline
            return {"finite": finite, "seconds": statistics.median(seconds), "peak_bytes_beyond_inputs": peak}
        except Exception as error:
            return {"failure": first_line(error)}
