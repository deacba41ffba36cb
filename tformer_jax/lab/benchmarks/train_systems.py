"""This library in `scripts/benchmark.py train`: the compiled train step, in a separate process."""

import os
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tformer_jax import axes
from tformer_jax.base.cpu import COMPILATION, keep_memory, peak_bytes, run_in_calling_thread
from tformer_jax.lab.benchmarks.train_cases import Case
from tformer_jax.models import conversions, cost, registry
from tformer_jax.nn.linear import product
from tformer_jax.nn.module import named_leaves
from tformer_jax.parallel import placement
from tformer_jax.parallel.mesh import make_mesh
from tformer_jax.runs import provenance
from tformer_jax.train import optimizers, state
from tformer_jax.train.meter import Meter
from tformer_jax.train.step import jitted, make_train_step

BATCHES = 4
"""Number of distinct batches; steps cycle through them."""


class Ours:
    """The train step of `train/loop.py`."""

    def __init__(self, case: Case):
        self._compilations = 0
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the peers use the same GPU
        keep_memory()  # both as in every command
        run_in_calling_thread()
        jax.config.update("jax_enable_compilation_cache", False)
        jax.monitoring.register_event_duration_secs_listener(self._count)
        self._case, cfg = case, case.cfg
        self._batches = case.batches(BATCHES)
        self.mesh = make_mesh(cfg.parallel)
        model = registry.build(cfg.model)
        optimizer = optimizers.build(cfg, registry.shapes(model))
        self.state = state.create(model, optimizer, cfg, self.mesh)
        self.step = jitted(make_train_step(model, optimizer, cfg), self.state, self.mesh)
        self._done = 0

    def batch(self) -> Any:
        """Returns the next batch, sharded over the devices."""
        return placement.shard_batch(self.mesh, self._batches[self._done % BATCHES])

    def save(self, path: Path) -> None:
        """Saves the parameters, with separate projections, and the batches to an `.npz` file."""
        params = conversions.convert_projections(self.state.params, self._case.cfg.model, "separate")
        arrays = {f"params/{name}": np.asarray(leaf) for name, leaf in named_leaves(params)}
        for number, batch in enumerate(self._batches):
            arrays |= {f"batches/{number}/{key}": array for key, array in batch.items()}
        np.savez(path, **arrays)  # type: ignore[arg-type]

    def steps(self, count: int) -> tuple[float, list[float]]:
        """Runs `count` steps as `train.loop` does; returns the mean seconds and the loss of each."""
        meter, metrics = Meter(), []
        start = time.perf_counter()
        for _ in range(count):
            self.state, computing = self.step(self.state, self.batch())
            metrics += meter.add(computing, waited=0.0)
            self._done += 1
        metrics += meter.fetch_all()
        jax.block_until_ready(self.state)
        return (time.perf_counter() - start) / count, [step["loss"] for step in metrics]

    def hardware(self) -> dict[str, Any]:
        """Returns the hardware of this process, JAX's backend, the number of its devices, and the matmul precision."""
        return provenance.describe_hardware() | {
            "backend": jax.default_backend(),
            "device_count": jax.device_count(),
            "matmul_precision": jax.config.jax_default_matmul_precision,  # type: ignore[attr-defined]
        }

    def facts(self) -> dict[str, Any]:
        """Returns the peak memory, of the device or on a CPU of the process, compilations, attention and versions."""
        of_device = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        return {
            "peak_bytes": of_device or peak_bytes(),
            "peak_of": "device" if of_device else "process",
            "attention_backends": registry.attention_backends(self._case.cfg.model, self._case.length),
            "compilations": self._compilations,
            "versions": {name: metadata.version(name) for name in ("jax", "jaxlib")},
        }

    def work(self) -> dict[str, int]:
        """Returns the number of tokens of a step, and the FLOPs of its matrix products."""
        model, batch = self._case.cfg.model, self._batches[0]
        flops = cost.TRAINING_FLOPS * cost.forward_flops(model, batch)
        return {"tokens": registry.count_tokens(model, batch), "flops": flops}

    def product_rates(self, shapes: list[tuple[int, int, int]], groups: int, size: int) -> list[float]:
        """Returns the FLOP/s of the layers' products [rows, inner] @ [inner, columns], roundings of operands included.

        Products run in groups of `size`, with one synchronization each; the fastest of `groups` groups counts.
        """
        multiply = jax.jit(lambda left, right: product(left, right, (axes.EMBED, axes.MLP)))
        dtype = self._case.cfg.model.dtype
        rates = []
        for rows, inner, columns in shapes:
            left = jax.random.normal(jax.random.key(0), (rows, inner), dtype)
            right = jax.random.normal(jax.random.key(1), (inner, columns), dtype)
            multiply(left, right).block_until_ready()
            seconds = []
            for _ in range(groups):
                start = time.perf_counter()
                jax.block_until_ready([multiply(left, right) for _ in range(size)])
                seconds.append((time.perf_counter() - start) / size)
            rates.append(2 * rows * inner * columns / min(seconds))
        return rates

    def _count(self, event: str, *_: Any, **__: Any) -> None:
        self._compilations += event == COMPILATION
