"""The thread that runs the continuous-batching engine."""

import contextlib
import logging
import queue
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tformer_jax.base.errors import UserError
from tformer_jax.inference.engine import Engine, Event
from tformer_jax.serving.request_error import RequestError
from tformer_jax.serving.worker import Empty, Job, Load, Worker, engine_failed, queue_full


class EngineThread(Worker):
    """Runs `engine.step()` in a loop, and sends the events to the event loop; other functions run between two steps.

    Args:
        engine: only this thread may call it from now on.
        limit: maximum number of requests that wait while all rows are in use.
    """

    def __init__(self, engine: Engine, limit: int) -> None:
        super().__init__(limit)
        self.load = Load(pages=engine.pages)
        self._engine = engine
        self._arrived: list[Job] = []
        self._accepted: dict[int, tuple[Job, int]] = {}
        self._tokens = 0

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
            self._send([(job, engine_failed(self.failure))])

    def _submit_waiting(self) -> None:
        for job in [*self._arrived]:
            if self._fits(job):
                self._arrived.remove(job)
                self._submit(job)

    def _submit(self, job: Job) -> None:
        try:
            for index, request in enumerate(job.requests):
                if isinstance(request, Empty):
                    events = [Event(index, n, "", request.finish, None, 0) for n in range(request.num_outputs)]
                    self._send([(job, event) for event in events])
                else:
                    self._accepted[self._engine.submit(request)] = job, index
        except UserError as error:
            which = f"text {index + 1}: " if len(job.requests) > 1 else ""
            self._reject(job, RequestError(f"{which}{error}"))
        except Exception:
            logging.exception("the engine could not accept a request")
            self._reject(
                job, RequestError("the engine could not accept this request; the server's log gives the cause", 500)
            )

    def _reject_waiting(self) -> None:
        """After a step, in which pending requests took all free rows, rejects jobs that do not fit into the queue."""
        for job in [*self._arrived]:
            if not self._fits(job):
                self._reject(job, queue_full(self._limit))

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
        self._send([(job, engine_failed(reason)) for job in {*owners, *self._arrived}])
        self._accepted.clear()
        self._arrived.clear()
