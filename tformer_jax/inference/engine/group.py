"""Several engines with the methods of one, which serve requests at the same time on the cores of a CPU."""

import concurrent.futures
import dataclasses
from collections.abc import Sequence

from tformer_jax.base.cpu import usable_cores
from tformer_jax.config import DecodeConfig
from tformer_jax.inference.engine.engine import Engine
from tformer_jax.inference.engine.events import Event, Request, check_outputs
from tformer_jax.inference.engine.parallel import apply_settings, read_settings


@dataclasses.dataclass
class _Part:
    """Outputs of a request that an engine generates."""

    request: int
    """Number of the whole request."""
    first: int
    """Index of the first output in the whole request."""
    rows: int
    """Number of rows that the outputs take."""
    unfinished: int
    """Number of outputs without their last event."""


class EngineGroup:
    """Engines that share requests, and step at the same time in threads, at most one for each core.

    A request is served by the first engine with free rows, so that few requests take steps of few rows. A request with
    more samples than an engine has rows is divided. As `Engine`, it is not thread-safe.

    Args:
        engines: engines of equal size, which share compiled programs.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines
        self._threads = min(len(engines), usable_cores())
        self._pool = concurrent.futures.ThreadPoolExecutor(self._threads, "engine step")
        self._parts: dict[tuple[int, int], _Part] = {}
        """Unfinished parts, by the index of their engine and their number in it."""
        self._next = 0

    @property
    def max_rows(self) -> int:
        """Number of rows of all engines."""
        return sum(engine.max_rows for engine in self._engines)

    @property
    def idle(self) -> bool:
        """Whether no request is pending or running."""
        return all(engine.idle for engine in self._engines)

    @property
    def pending(self) -> int:
        """Number of pending requests; the parts of a divided request count separately here and in `running`."""
        return sum(engine.pending for engine in self._engines)

    @property
    def running(self) -> int:
        """Number of running requests."""
        return sum(engine.running for engine in self._engines)

    @property
    def pages_used(self) -> int:
        """Number of pages in use."""
        return sum(engine.pages_used for engine in self._engines)

    @property
    def pages(self) -> int:
        """Total number of pages of all current lanes."""
        return sum(engine.pages for engine in self._engines)

    def submit(self, request: Request) -> int:
        """Queues a request and returns its number.

        Raises:
            UserError: the request can never be served.
        """
        check_outputs(request, self.max_rows)
        number, beams = self._next, request.decode.strategy == "beam"
        most = request.num_outputs if beams else self._engines[0].max_rows
        for first in range(0, request.num_outputs, most):
            outputs = min(most, request.num_outputs - first)
            rows = 1 if beams else outputs
            index = self._engine_for(rows)
            part = dataclasses.replace(request, num_outputs=outputs, index=request.index + first)
            self._parts[index, self._engines[index].submit(part)] = _Part(number, first, rows, outputs)
        self._next += 1
        return number

    def warm_up(self, decode: DecodeConfig, tags: tuple[int, ...] = ()) -> None:
        """Compiles the functions for requests with these settings and tags, as `Engine.warm_up`."""
        for engine in self._engines:
            engine.warm_up(decode, tags)

    def cancel(self, request: int) -> None:
        """Ends a pending or running request; it has no further events."""
        for index, number in [key for key, part in self._parts.items() if part.request == request]:
            del self._parts[index, number]
            self._engines[index].cancel(number)

    def step(self) -> list[Event]:
        """Steps all engines with requests, and returns their events.

        Raises:
            Exception: an engine raised it; the others have stepped.
        """
        busy = [index for index, engine in enumerate(self._engines) if not engine.idle]
        share = 1 / max(-(-len(busy) // self._threads), 1)
        settings = read_settings()

        def step(index: int) -> list[Event]:
            with apply_settings(settings):
                return self._engines[index].step(share)

        steps = {index: self._pool.submit(step, index) for index in busy}
        concurrent.futures.wait(steps.values())
        return [self._event(index, event) for index, future in steps.items() for event in future.result()]

    def _engine_for(self, rows: int) -> int:
        """Returns the index of the first engine with this many free rows, or of the one with the fewest taken rows."""
        taken = [0] * len(self._engines)
        for (index, _), part in self._parts.items():
            taken[index] += part.rows
        free = (index for index, engine in enumerate(self._engines) if taken[index] + rows <= engine.max_rows)
        return next(free, taken.index(min(taken)))

    def _event(self, index: int, event: Event) -> Event:
        """Returns the event of an engine with the numbers of the whole request."""
        part = self._parts[index, event.request]
        if event.finish:
            part.unfinished -= 1
        if not part.unfinished:
            del self._parts[index, event.request]
        return event._replace(request=part.request, sample=part.first + event.sample)
