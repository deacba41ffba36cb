"""Engines that run at the same time, in threads of their own.

Parts of a step use one core of a CPU, such as XLA's choice of the best tokens and the work of Python between steps.
Other engines use the rest meanwhile, and the arrays of fewer rows fit better into a core's cache.
"""

import concurrent.futures
import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from tformer_jax.base.cpu import usable_cores
from tformer_jax.inference.engine.engine import Engine
from tformer_jax.inference.engine.events import Event
from tformer_jax.parallel.placement import mesh_of

MIN_ROWS = 8
"""Minimum number of rows of each of several engines."""
SERVED_BEAMS = 16
"""Minimum number of rows or beams of each of several engines of a server, which step only if they have requests.

Measured on two Intel cores with 8 million parameters, steps for 64 rows by 1, 4 and 8 engines: greedily 13, 14 and 20
ms, with 5 beams 52, 43 and 45 ms. A step for 8 rows with 5 beams takes 10 ms.
"""
PARAMETERS_PER_ROW = 3_000_000
"""Number of parameters for which each of several engines has a row or beam: all engines read all parameters.

Measured on two Intel cores, two engines over one: with 8 million parameters (3 + 3 layers of width 256) and 64 rows 1.2
to 1.8 times as fast, with 60 million (6 + 6, 512) and 64 rows 1.2 to 1.4 times, with 240 million (6 + 6, 1024) and 32
rows 0.7 to 1.1 times.
"""
SETTINGS = tuple(name for name in dir(jax) if hasattr(jax.config, f"jax_{name}"))
"""Settings of JAX with a context manager of the same name, which holds for the thread that enters it."""


def engine_count(max_rows: int, width: int, params: Any) -> int:
    """Returns the number of engines for `max_rows` rows of `width` beams in all, at most one for each core.

    GPUs, TPUs and meshes run one step at a time, so that they have one engine.
    """
    return min(_most_engines(max_rows, width, params), usable_cores())


def served_engine_count(max_rows: int, width: int, params: Any) -> int:
    """Returns the number of engines that divide `max_rows` rows of `width` beams of a server into equal parts."""
    most = max(min(_most_engines(max_rows, width, params), max_rows * width // SERVED_BEAMS), 1)
    return next(count for count in range(most, 0, -1) if max_rows % count == 0)


def _most_engines(max_rows: int, width: int, params: Any) -> int:
    if jax.default_backend() != "cpu" or mesh_of(params) is not None:
        return 1
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    return max(min(max_rows // MIN_ROWS, max_rows * width * PARAMETERS_PER_ROW // size), 1)


def run_engines(engines: Sequence[Engine]) -> Iterator[tuple[int, list[Event]]]:
    """Yields the index of an engine and the events of its step, until all are idle.

    One engine runs in the calling thread, one step at a time. Several run ahead of the caller by at most a step each;
    the order of their events depends on time, the events of each engine do not.
    """
    if len(engines) == 1:
        while not engines[0].idle:
            yield 0, engines[0].step()
        return
    settings = read_settings()

    def step(engine: Engine) -> list[Event]:
        with apply_settings(settings):
            return engine.step()

    pool, is_exiting = concurrent.futures.ThreadPoolExecutor(len(engines), "engine"), sys.is_finalizing
    try:
        steps = {pool.submit(step, engine): index for index, engine in enumerate(engines) if not engine.idle}
        while steps:
            done, _ = concurrent.futures.wait(steps, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in done:
                index = steps.pop(future)
                events = future.result()
                if not engines[index].idle:
                    steps[pool.submit(step, engines[index])] = index
                yield index, events
    finally:
        pool.shutdown(wait=not is_exiting())  # the exiting interpreter has joined the threads and cleared all modules


def read_settings() -> dict[str, Any]:
    """Returns the values of `SETTINGS` in this thread."""
    return {name: getattr(jax.config, f"jax_{name}") for name in SETTINGS}


@contextlib.contextmanager
def apply_settings(settings: Mapping[str, Any]) -> Iterator[None]:
    """Applies the `settings` of another thread to this one."""
    with contextlib.ExitStack() as stack:
        for name in [name for name, value in read_settings().items() if value != settings[name]]:
            stack.enter_context(getattr(jax, name)(settings[name]))
        yield
