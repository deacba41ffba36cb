"""The one thread that touches the engine, and the jobs through which the event loop speaks with it."""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from tformer_jax.config import ConfigError
from tformer_jax.inference.engine import Engine, Event, Request
from tformer_jax.serving.refusal import Refusal


@dataclasses.dataclass(frozen=True)
class Load:
    """What the engine holds, as of its last step."""

    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages: int = 0
    tokens: int = 0
    """Generated since the start."""


class Job:
    """The requests of one HTTP request. Its events arrive in the order in which the engine made them."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.items: asyncio.Queue[Event | Refusal] = asyncio.Queue()
        self.tokens: dict[tuple[int, int], int] = {}
        """Tokens so far, by request and sample; the engine's thread keeps it."""

    async def events(self) -> AsyncIterator[Event]:
        """Events until every output is finished; their `request` counts from 0 within this job.

        Raises:
            Refusal: the engine does not go on with it.
        """
        unfinished = sum(request.samples for request in self.requests)
        while unfinished:
            item = await self.items.get()
            if isinstance(item, Refusal):
                raise item
            unfinished -= item.finish is not None
            yield item


class EngineThread:
    """Loops `engine.step()`, and hands each event to the event loop.

    Args:
        engine: nobody else may call it from now on.
        queue_limit: most requests that wait while all slots are taken.
    """

    def __init__(self, engine: Engine, queue_limit: int) -> None:
        self.failure: str | None = None
        self.stopping = False
        self.load = Load(pages=engine.pages)
        self.jobs: set[Job] = set()
        self._engine, self._limit = engine, queue_limit
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._arrived: list[Job] = []
        self._accepted: dict[int, tuple[Job, int]] = {}
        self._tokens = 0
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Begins; called on the event loop that the jobs will live on."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def end(self, seconds: float) -> None:
        """Ends the thread after its present step, and waits for that at most so long."""
        self._inbox.put(self._end)
        self._thread.join(seconds)

    @property
    def alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    @contextlib.contextmanager
    def job(self, requests: Sequence[Request]) -> Iterator[Job]:
        """Requests that are in the engine while the block lasts, and are cancelled at its end.

        Raises:
            Refusal: the server is stopping.
        """
        if self.stopping:
            raise stopping()
        job = Job(requests)
        self.jobs.add(job)
        self._inbox.put(functools.partial(self._arrive, job))
        try:
            yield job
        finally:
            self.jobs.discard(job)
            self._inbox.put(functools.partial(self._drop, job))

    def stop_jobs(self) -> None:
        """Refuses what is still open."""
        for job in self.jobs:
            job.items.put_nowait(stopping())

    def _run(self) -> None:
        while not self._ended:
            try:
                self._turn()
            except Exception as error:
                logging.exception("the engine failed")
                self._fail(f"{type(error).__name__}: {error}".partition("\n")[0][:300])

    def _turn(self) -> None:
        for command in self._commands():
            command()
        self._submit_what_fits()
        if self.failure is None and not self._engine.idle:
            self._deliver(self._engine.step())
            self._refuse_what_waits()
        waiting = self._engine.waiting + sum(len(job.requests) for job in self._arrived)
        used = self._engine.pages_used
        self.load = Load(self._engine.running, waiting, used, self._engine.pages, self._tokens)

    def _commands(self) -> Iterator[Callable[[], None]]:
        """What arrived since the last step; while there is nothing to do, waits for the first one."""
        if not self._arrived and (self.failure is not None or self._engine.idle):
            yield self._inbox.get()
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._inbox.get_nowait()

    def _end(self) -> None:
        self._ended = True

    def _arrive(self, job: Job) -> None:
        if self.failure is None:
            self._arrived.append(job)
        else:
            self._send([(job, broken(self.failure))])

    def _submit_what_fits(self) -> None:
        for job in [*self._arrived]:
            if self._fits(job):
                self._arrived.remove(job)
                self._submit(job)

    def _submit(self, job: Job) -> None:
        try:
            for place, request in enumerate(job.requests):
                self._accepted[self._engine.submit(request)] = job, place
        except ConfigError as error:
            which = f"text {place + 1}: " if len(job.requests) > 1 else ""
            self._refuse(job, Refusal(f"{which}{error}"))
        except Exception:
            logging.exception("the engine could not take a request")
            self._refuse(job, Refusal("the engine could not take this request; the server's log says why", 500))

    def _refuse_what_waits(self) -> None:
        """After a step whoever still waits found no free slot: what does not fit behind that is refused."""
        for job in [*self._arrived]:
            if not self._fits(job):
                message = f"the queue of {self._limit} requests is full: try again later"
                self._refuse(job, Refusal(message, 429, code="queue_full", headers={"Retry-After": "1"}))

    def _fits(self, job: Job) -> bool:
        return self._engine.waiting + len(job.requests) <= self._limit

    def _refuse(self, job: Job, refusal: Refusal) -> None:
        self._drop(job)
        self._send([(job, refusal)])

    def _drop(self, job: Job) -> None:
        if job in self._arrived:
            self._arrived.remove(job)
        for number in [number for number, (owner, _) in self._accepted.items() if owner is job]:
            del self._accepted[number]
            if self.failure is None:
                self._engine.cancel(number)

    def _deliver(self, events: Sequence[Event]) -> None:
        items: list[tuple[Job, Event | Refusal]] = []
        for event in events:
            job, place = self._accepted[event.request]
            key = (place, event.sample)
            self._tokens += event.tokens - job.tokens.get(key, 0)
            job.tokens[key] = event.tokens
            items.append((job, event._replace(request=place)))
        self._send(items)

    def _fail(self, reason: str) -> None:
        self.failure = reason
        owners = {job for job, _ in self._accepted.values()}
        self._send([(job, broken(reason)) for job in {*owners, *self._arrived}])
        self._accepted.clear()
        self._arrived.clear()

    def _send(self, items: list[tuple[Job, Event | Refusal]]) -> None:
        if items and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_put, items)


def broken(reason: str) -> Refusal:
    """The refusal after a failure of the engine."""
    return Refusal(f"the engine has failed ({reason}): restart the server", 500, code="engine_failed")


def stopping() -> Refusal:
    """The refusal while the server shuts down."""
    return Refusal("the server is stopping", 503, code="stopping", headers={"Connection": "close"})


def _put(items: list[tuple[Job, Event | Refusal]]) -> None:
    for job, item in items:
        job.items.put_nowait(item)
