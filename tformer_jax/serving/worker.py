"""The only thread that uses the model, and the jobs that connect it to the event loop."""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tformer_jax.base.errors import UserError, first_line
from tformer_jax.config import DecodeConfig
from tformer_jax.data.word_links import Links
from tformer_jax.inference.engine import MAX_LANES, Engine, Event, Request
from tformer_jax.inference.engine.group import EngineGroup
from tformer_jax.inference.requests import Constraint
from tformer_jax.serving.errors import RequestError

OF_ROWS = {"strategy", "temperature", "top_k", "top_p", "min_p", "max_new_tokens", "prefix", "stop"}
"""Settings of decoding in which requests that share the rows of an engine may differ, but for beam search."""


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
    """A request for outputs without words, which the engine does not see."""

    num_outputs: int
    finish: str
    """Finish reason of the outputs."""
    text: str = ""
    """The text of the outputs, of markup alone."""
    alignment: Links | None = None
    """As in `Event`."""
    constraints: tuple[Constraint, ...] = ()

    @property
    def decode(self) -> DecodeConfig:
        """The settings that say whether the outputs meet the constraints."""
        return DecodeConfig()


class Job:
    """The generation requests of one HTTP request, and a queue of results in the order of the thread."""

    def __init__(self, requests: Sequence[Request | Empty]) -> None:
        self.requests = requests
        self.items: asyncio.Queue[Any] = asyncio.Queue()
        self.tokens: dict[tuple[int, int], int] = {}
        """Number of tokens so far, by request and sample; used only by the engine thread."""
        self.dropped = False
        """Whether nobody waits for results."""
        self._left = [request.num_outputs for request in requests]
        """Number of outputs of each request that are not finished."""

    @property
    def unfinished(self) -> int:
        """Number of requests with outputs that are not finished."""
        return sum(left > 0 for left in self._left)

    def put(self, item: Any) -> None:
        """Adds a result; used only on the event loop."""
        if isinstance(item, RequestError):
            self._left = []
        elif isinstance(item, Event) and item.finish and self._left:
            self._left[item.request] -= 1
        self.items.put_nowait(item)

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
        limit: maximum number of functions that wait; outputs of the engine have their own limit.
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
            RequestError: the server is stopping, or the queue is full even if all rows of the engine are in use.
        """
        if self.stopping:
            raise stopping_error()
        unfinished = sum(job.unfinished for job in self.jobs) + len(requests)
        if requests and unfinished > self._limit + self._most_running(requests):
            raise queue_full_error(self._limit)
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
            RequestError: `limit` functions of jobs without outputs of the engine wait already, the function fails,
                or the server is stopping.
        """
        counts = not any(isinstance(request, Request) for request in job.requests)  # the engine's rows limit the others
        if counts and self._computing >= self._limit:
            raise queue_full_error(self._limit)
        self._computing += counts
        try:
            self._inbox.put(functools.partial(self._compute, job, function))
            return await job.next()
        finally:
            self._computing -= counts

    def stop_jobs(self) -> None:
        """Rejects all open jobs."""
        for job in self.jobs:
            job.put(stopping_error())

    def _most_running(self, requests: Sequence[Request | Empty]) -> int:
        """Returns the maximum number of requests, of all jobs and these, that an engine serves without waiting."""
        return 0

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
            self._send([(job, engine_failed_error(self.failure))])
        elif not job.dropped:
            self._send([(job, call_safely(function))])

    def _arrive(self, job: Job) -> None:
        """Accepts the requests of a job, for an engine; other workers only compute functions."""

    def _drop(self, job: Job) -> None:
        """Cancels the requests of a job, for an engine."""

    def _fail(self, reason: str) -> None:
        self.failure = reason

    def _end(self) -> None:
        self._ended = True

    def _send(self, items: list[tuple[Job, Any]]) -> None:
        if items and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_put, items)


class EngineThread(Worker):
    """Runs `engine.step()` in a loop, and sends the events to the event loop; other functions run between two steps.

    Args:
        engine: only this thread may call it from now on.
        limit: maximum number of requests that wait while all rows are in use.
    """

    def __init__(self, engine: Engine | EngineGroup, limit: int) -> None:
        super().__init__(limit)
        self.load = Load(pages=engine.pages)
        self._engine = engine
        self._arrived: list[Job] = []
        self._accepted: dict[int, tuple[Job, int]] = {}
        self._tokens = 0

    def _most_running(self, requests: Sequence[Request | Empty]) -> int:
        every = itertools.chain(requests, *(job.requests for job in self.jobs))
        lanes = {_lane_of(request) for request in every if isinstance(request, Request)}
        return max(min(max(len(lanes), 1), MAX_LANES) * self._engine.max_rows, self.load.running)

    def _run_once(self) -> None:
        for command in self._commands():
            command()
        self._submit_waiting()
        if self.failure is None and not self._engine.idle:
            self._deliver(self._engine.step())
            self._reject_waiting()
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

    def _arrive(self, job: Job) -> None:
        if self.failure is None:
            self._arrived.append(job)
        else:
            self._send([(job, engine_failed_error(self.failure))])

    def _submit_waiting(self) -> None:
        for job in [*self._arrived]:
            if self._fits(job):
                self._arrived.remove(job)
                self._submit(job)

    def _submit(self, job: Job) -> None:
        try:
            for index, request in enumerate(job.requests):
                if isinstance(request, Empty):
                    for n in range(request.num_outputs):
                        ids_and_links = (), request.alignment
                        self._send([(job, Event(index, n, request.text, request.finish, None, 0, *ids_and_links))])
                else:
                    self._accepted[self._engine.submit(request)] = job, index
        except UserError as error:
            which = f"text {index + 1}: " if len(job.requests) > 1 else ""
            self._reject(job, RequestError(f"{which}{error}"))
        except Exception:
            logging.exception("the engine could not accept a request")
            problem = "the engine could not accept this request; the server's log gives the cause"
            self._reject(job, RequestError(problem, 500))

    def _reject_waiting(self) -> None:
        """After a step, in which pending requests took all free rows, rejects jobs that do not fit into the queue."""
        for job in [*self._arrived]:
            if not self._fits(job):
                self._reject(job, queue_full_error(self._limit))

    def _fits(self, job: Job) -> bool:
        return self._engine.pending + len(job.requests) <= self._limit

    def _reject(self, job: Job, error: RequestError) -> None:
        self._drop(job)
        self._send([(job, error)])

    def _drop(self, job: Job) -> None:
        if job in self._arrived:
            self._arrived.remove(job)
        for number in [number for number, (owner, _) in self._accepted.items() if owner is job]:
            del self._accepted[number]
            if self.failure is None:
                self._engine.cancel(number)

    def _deliver(self, events: Sequence[Event]) -> None:
        items: list[tuple[Job, Any]] = []
        for event in events:
            job, index = self._accepted[event.request]
            key = (index, event.sample)
            self._tokens += event.tokens - job.tokens.get(key, 0)
            job.tokens[key] = event.tokens
            items.append((job, event._replace(request=index)))
        self._send(items)

    def _fail(self, reason: str) -> None:
        super()._fail(reason)
        owners = {job for job, _ in self._accepted.values()}
        self._send([(job, engine_failed_error(reason)) for job in {*owners, *self._arrived}])
        self._accepted.clear()
        self._arrived.clear()


def _lane_of(request: Request) -> tuple[Any, ...]:
    """Returns what may decide in whose rows a request runs, such as its beam width."""
    values = (value for name, value in vars(request.decode).items() if name not in OF_ROWS)
    return request.decode.strategy == "beam", request.constraints, *values


def call_safely(function: Callable[[], Any]) -> Any:
    """Returns the result of a function, or the error response if it fails."""
    try:
        return function()
    except UserError as error:
        return error if isinstance(error, RequestError) else RequestError(str(error))
    except Exception:
        logging.exception("a request failed")
        return RequestError("the model could not process this request; the server's log gives the cause", 500)


def engine_failed_error(reason: str) -> RequestError:
    """Returns the error for requests after a failure of the engine."""
    return RequestError(f"the engine has failed ({reason}): restart the server", 500, code="engine_failed")


def queue_full_error(limit: int) -> RequestError:
    """Returns the error for requests that do not fit into the queue."""
    message = f"the queue of {limit} requests is full: try again later"
    return RequestError(message, 429, code="queue_full", headers={"Retry-After": "1"})


def stopping_error() -> RequestError:
    """Returns the error for requests while the server shuts down."""
    return RequestError("the server is stopping", 503, code="stopping", headers={"Connection": "close"})


def _put(items: list[tuple[Job, Any]]) -> None:
    for job, item in items:
        job.put(item)
