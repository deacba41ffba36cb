"""Engines that run at the same time, in threads of their own.

A step has phases that use one core of a CPU: XLA's batched products of attention, selection of the best tokens, and
Python's part. Engines side by side fill them with the steps of other engines.
"""

import concurrent.futures
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from tformer_jax.base.cpu import usable_cores
from tformer_jax.inference.engine.engine import Engine
from tformer_jax.inference.engine.events import Event
from tformer_jax.parallel.placement import mesh_of

ROWS_PER_ENGINE = 16
"""Minimum number of rows of each of several engines: every engine reads all parameters in each step.

On two Intel cores, two engines of 16 rows decode 32 texts 1.5 times (greedy) and 1.6 to 2 times (5 beams) as fast as
one of 32 rows, and two of 32 rows decode 1,000 texts 1.4 and 1.5 times as fast as one of 64.
"""
CONTEXTS = ("default_matmul_precision", "default_prng_impl", "default_device", "debug_nans", "disable_jit")
"""Settings of JAX whose context managers hold for the thread that enters them."""


def engine_count(max_rows: int, least: int, params: Any) -> int:
    """Returns the number of engines for `max_rows` rows in all, each with at least `least` rows.

    GPUs, TPUs and meshes run one step at a time, so that they have one engine.
    """
    if jax.default_backend() != "cpu" or mesh_of(params) is not None:
        return 1
    return max(min(usable_cores(), max_rows // max(ROWS_PER_ENGINE, least)), 1)


def run_engines(engines: Sequence[Engine]) -> Iterator[tuple[int, list[Event]]]:
    """Yields the index of an engine and the events of its step, until all are idle.

    One engine runs in the calling thread, one step at a time. Several run ahead of the caller by at most a step each;
    the order of their events depends on time, the events of each engine do not.
    """
    if len(engines) == 1:
        while not engines[0].idle:
            yield 0, engines[0].step()
        return
    settings = {name: getattr(jax.config, f"jax_{name}") for name in CONTEXTS}

    def step(engine: Engine) -> list[Event]:
        with contextlib.ExitStack() as stack:
            for name, value in settings.items():
                stack.enter_context(getattr(jax, name)(value))
            return engine.step()

    with concurrent.futures.ThreadPoolExecutor(len(engines), "engine") as pool:
        steps = {pool.submit(step, engine): index for index, engine in enumerate(engines) if not engine.idle}
        while steps:
            done, _ = concurrent.futures.wait(steps, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in done:
                index = steps.pop(future)
                events = future.result()
                if not engines[index].idle:
                    steps[pool.submit(step, engines[index])] = index
                yield index, events
