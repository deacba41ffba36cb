"""The only thread that uses the model, and the jobs that connect it to the event loop."""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tformer_jax.base.errors import UserError, first_line
from tformer_jax.inference.engine import Event, Request
from tformer_jax.serving.request_error import RequestError


@dataclasses.dataclass(frozen=True)
class Load:
    """Load of the engine after its last step."""

    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages: int = 0
    tokens: int = 0
    """Number of tokens generated since the start."""


class Empty(NamedTuple):
    """A request for empty outputs, which the engine does not see."""

    num_outputs: int
    finish: str
    """Finish reason of the outputs."""


class Job:
    """The generation requests of one HTTP request, and a queue of results in the order of the thread."""

    def __init__(self, requests: Sequence[Request | Empty]) -> None:
        self.requests = requests
        self.items: asyncio.Queue[Any] = asyncio.Queue()
        self.tokens: dict[tuple[int, int], int] = {}
        """Number of tokens so far, by request and sample; used only by the engine thread."""
        self.dropped = False
        """Whether nobody waits for results."""

    async def events(self) -> AsyncIterator[Event]:
        """Yields events until every output is finished; their `request` is an index into the requests of this job.

        Raises:
            RequestError: the engine does not accept or does not finish the requests.
        """
        unfinished = sum(request.num_outputs for request in self.requests)
        while unfinished:
            event = await self.next()
            unfinished -= event.finish is not None
            yield event

    async def next(self) -> Any:
        """Returns the next result.

        Raises:
            RequestError: sent instead of a result.
        """
        item = await self.items.get()
        if isinstance(item, RequestError):
            raise item
        return item


class Worker:
    """Runs functions for the event loop in its own thread, in the order of their arrival.

    Args:
        limit: maximum number of functions that wait.
    """

    def __init__(self, limit: int) -> None:
        self.failure: str | None = None
        self.stopping = False
        self.load = Load()
        self.jobs: set[Job] = set()
        self._limit = limit
        self._computing = 0
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
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
    def job(self, requests: Sequence[Request | Empty] = ()) -> Iterator[Job]:
        """Submits requests on entry, and cancels them on exit.

        Raises:
            RequestError: the server is stopping.
        """
        if self.stopping:
            raise stopping()
        job = Job(requests)
        self.jobs.add(job)
        self._inbox.put(functools.partial(self._arrive, job))
        try:
            yield job
        finally:
            job.dropped = True
            self.jobs.discard(job)
            self._inbox.put(functools.partial(self._drop, job))

    async def compute(self, job: Job, function: Callable[[], Any]) -> Any:
        """Runs a function in the thread, after all events of the job, and returns its result.

        Raises:
            RequestError: `limit` functions wait already, the function fails, or the server is stopping.
        """
        if self._computing >= self._limit:
            raise queue_full(self._limit)
        self._computing += 1
        try:
            self._inbox.put(functools.partial(self._compute, job, function))
            return await job.next()
        finally:
            self._computing -= 1

    def stop_jobs(self) -> None:
        """Rejects all open jobs."""
        for job in self.jobs:
            job.items.put_nowait(stopping())

    def _run(self) -> None:
        while not self._ended:
            try:
                self._run_once()
            except Exception as error:
                logging.exception("the engine failed")
                self._fail(f"{type(error).__name__}: {first_line(error)}")

    def _run_once(self) -> None:
        self._inbox.get()()

    def _compute(self, job: Job, function: Callable[[], Any]) -> None:
        if self.failure is not None:
            self._send([(job, engine_failed(self.failure))])
        elif not job.dropped:
            self._send([(job, result_of(function))])

    def _arrive(self, job: Job) -> None:
        """Accepts the requests of a job."""

    def _drop(self, job: Job) -> None:
        """Cancels the requests of a job."""

    def _fail(self, reason: str) -> None:
        self.failure = reason

    def _end(self) -> None:
        self._ended = True

    def _send(self, items: list[tuple[Job, Any]]) -> None:
        if items and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_put, items)


def result_of(function: Callable[[], Any]) -> Any:
    """Returns the result of a function, or the error response if it fails."""
    try:
        return function()
    except UserError as error:
        return error if isinstance(error, RequestError) else RequestError(str(error))
    except Exception:
        logging.exception("a request failed")
        return RequestError("the model could not process this request; the server's log gives the cause", 500)


def engine_failed(reason: str) -> RequestError:
    """Returns the error for requests after a failure of the engine."""
    return RequestError(f"the engine has failed ({reason}): restart the server", 500, code="engine_failed")


def queue_full(limit: int) -> RequestError:
    """Returns the error for requests that do not fit into the queue."""
    message = f"the queue of {limit} requests is full: try again later"
    return RequestError(message, 429, code="queue_full", headers={"Retry-After": "1"})


def stopping() -> RequestError:
    """Returns the error for requests while the server shuts down."""
    return RequestError("the server is stopping", 503, code="stopping", headers={"Connection": "close"})


def _put(items: list[tuple[Job, Any]]) -> None:
    for job, item in items:
        job.items.put_nowait(item)
