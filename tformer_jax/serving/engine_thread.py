"""The only thread that calls the engine, and the jobs that connect it to the event loop."""

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
    """Load of the engine after its last step."""

    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages: int = 0
    tokens: int = 0
    """Number of tokens generated since the start."""


class Job:
    """The engine requests of one HTTP request, and a queue of their events in the order of the engine."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.items: asyncio.Queue[Event | Refusal] = asyncio.Queue()
        self.tokens: dict[tuple[int, int], int] = {}
        """Number of tokens so far, by request and sample; used only by the engine thread."""

    async def events(self) -> AsyncIterator[Event]:
        """Yields events until every output is finished; their `request` is an index into the requests of this job.

        Raises:
            Refusal: the engine does not accept or does not finish the requests.
        """
        unfinished = sum(request.samples for request in self.requests)
        while unfinished:
            item = await self.items.get()
            if isinstance(item, Refusal):
                raise item
            unfinished -= item.finish is not None
            yield item


class EngineThread:
    """Runs `engine.step()` in a loop in its own thread, and sends the events to the event loop.

    Args:
        engine: only this thread may call it from now on.
        queue_limit: maximum number of requests that wait while all slots are in use.
        translates: whether the model translates, so that outputs of blank texts are empty, as those of the commands.
    """

    def __init__(self, engine: Engine, queue_limit: int, *, translates: bool) -> None:
        self.failure: str | None = None
        self.stopping = False
        self.load = Load(pages=engine.pages)
        self.jobs: set[Job] = set()
        self._engine, self._limit, self._translates = engine, queue_limit, translates
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._arrived: list[Job] = []
        self._accepted: dict[int, tuple[Job, int]] = {}
        self._tokens = 0
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Starts the thread; must be called on the event loop that runs the jobs."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def end(self, seconds: float) -> None:
        """Ends the thread after its current step, and waits for it for at most `seconds`."""
        self._inbox.put(self._end)
        self._thread.join(seconds)

    @property
    def alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    @contextlib.contextmanager
    def job(self, requests: Sequence[Request]) -> Iterator[Job]:
        """Submits requests on entry, and cancels them on exit.

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
        """Refuses all open jobs."""
        for job in self.jobs:
            job.items.put_nowait(stopping())

    def _run(self) -> None:
        while not self._ended:
            try:
                self._run_once()
            except Exception as error:
                logging.exception("the engine failed")
                self._fail(f"{type(error).__name__}: {error}".partition("\n")[0][:300])

    def _run_once(self) -> None:
        for command in self._commands():
            command()
        self._submit_waiting()
        if self.failure is None and not self._engine.idle:
            self._deliver(self._engine.step())
            self._refuse_waiting()
        waiting = self._engine.pending + sum(len(job.requests) for job in self._arrived)
        used = self._engine.pages_used
        self.load = Load(self._engine.running, waiting, used, self._engine.pages, self._tokens)

    def _commands(self) -> Iterator[Callable[[], None]]:
        """Yields the commands that arrived since the last step; if there is nothing to do, waits for the first one."""
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
            self._send([(job, engine_failed(self.failure))])

    def _submit_waiting(self) -> None:
        for job in [*self._arrived]:
            if self._fits(job):
                self._arrived.remove(job)
                self._submit(job)

    def _submit(self, job: Job) -> None:
        try:
            for index, request in enumerate(job.requests):
                if self._translates and isinstance(request.text, str) and not request.text.strip():
                    events = [Event(index, sample, "", "stop", None, 0) for sample in range(request.samples)]
                    self._send([(job, event) for event in events])
                else:
                    self._accepted[self._engine.submit(request)] = job, index
        except ConfigError as error:
            which = f"text {index + 1}: " if len(job.requests) > 1 else ""
            self._refuse(job, Refusal(f"{which}{error}"))
        except Exception:
            logging.exception("the engine could not accept a request")
            self._refuse(
                job, Refusal("the engine could not accept this request; the server's log gives the cause", 500)
            )

    def _refuse_waiting(self) -> None:
        """After a step, in which pending requests took all free slots, refuses jobs that do not fit into the queue."""
        for job in [*self._arrived]:
            if not self._fits(job):
                message = f"the queue of {self._limit} requests is full: try again later"
                self._refuse(job, Refusal(message, 429, code="queue_full", headers={"Retry-After": "1"}))

    def _fits(self, job: Job) -> bool:
        return self._engine.pending + len(job.requests) <= self._limit

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
            job, index = self._accepted[event.request]
            key = (index, event.sample)
            self._tokens += event.tokens - job.tokens.get(key, 0)
            job.tokens[key] = event.tokens
            items.append((job, event._replace(request=index)))
        self._send(items)

    def _fail(self, reason: str) -> None:
        self.failure = reason
        owners = {job for job, _ in self._accepted.values()}
        self._send([(job, engine_failed(reason)) for job in {*owners, *self._arrived}])
        self._accepted.clear()
        self._arrived.clear()

    def _send(self, items: list[tuple[Job, Event | Refusal]]) -> None:
        if items and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_put, items)


def engine_failed(reason: str) -> Refusal:
    """Returns the error for requests after a failure of the engine."""
    return Refusal(f"the engine has failed ({reason}): restart the server", 500, code="engine_failed")


def stopping() -> Refusal:
    """Returns the error for requests while the server shuts down."""
    return Refusal("the server is stopping", 503, code="stopping", headers={"Connection": "close"})


def _put(items: list[tuple[Job, Event | Refusal]]) -> None:
    for job, item in items:
        job.items.put_nowait(item)
