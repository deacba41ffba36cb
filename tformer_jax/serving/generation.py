"""HTTP response computed by the model: complete or as server-sent events, with a timeout, until the client leaves."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from tformer_jax.inference.engine import Event, Request
from tformer_jax.inference.risk import Utility
from tformer_jax.serving.errors import RequestError
from tformer_jax.serving.metrics import Metrics
from tformer_jax.serving.replies import AccumulatedOutput, Outputs, Reply, empty_outputs
from tformer_jax.serving.worker import Empty, Job, Worker

CLIENT_CLOSED = 499
"""Status recorded for a request whose client disconnected."""
ERROR_SECONDS = 5.0
"""Seconds that a client has to receive the error that ends its stream."""
STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
END = b"data: [DONE]\n\n"


class Generation(Response):
    """Runs requests in the engine and sends their outputs.

    Args:
        worker: runs the model.
        metrics: records the response times.
        requests: engine requests of this HTTP request.
        reply: builds the response of the route.
        utility: ranks the outputs of each text.
        returned: number of outputs of each text to return; of more outputs, returns the ones with the least risk.
        seconds: maximum time until the end of the response.
        stream: whether to respond with server-sent events.

    Raises:
        RequestError: when called, before anything is sent: 400, 429, 500, 503, or 504 for a timeout. Once a stream has
            started, the error is sent as its last event instead.
    """

    def __init__(
        self,
        worker: Worker,
        metrics: Metrics,
        requests: Sequence[Request | Empty],
        reply: Reply,
        *,
        utility: Utility,
        returned: int,
        seconds: float,
        stream: bool,
    ) -> None:
        self.worker, self.metrics, self.requests, self.reply = worker, metrics, requests, reply
        self.utility, self.returned, self.seconds, self.stream = utility, returned, seconds, stream
        self._begun, self._started = time.perf_counter(), False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_note(message: Message) -> None:
            self._started = True
            await send(message)

        if not await until_disconnected(receive, self._answer(scope, receive, send_and_note)):
            scope["state"]["outcome"] = CLIENT_CLOSED

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self.seconds):
                with self.worker.job(self.requests) as job:
                    if self.stream:
                        await self._stream(job, send)
                    else:
                        response = await self._complete(job)
                        await response(scope, receive, send)
            return
        except TimeoutError:
            failure = RequestError(f"the request took longer than {self.seconds:g} seconds", 504, code="timeout")
        except RequestError as error:
            failure = error
        if not self._started:
            raise failure
        scope["state"]["outcome"] = failure.status
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ERROR_SECONDS):
                await send(body_message(event_bytes(failure.body()), last=True))

    async def _complete(self, job: Job) -> Response:
        outputs: Outputs = empty_outputs(self.requests)
        async for event in self._events(job):
            outputs[event.request][event.sample].add(event)
        outputs = await self._chosen(outputs)
        return self.reply.response(outputs, await self._computed(job, outputs))

    @property
    def _chooses(self) -> bool:
        """Whether outputs are ranked by their risk, which is known when all are complete."""
        return any(isinstance(request, Request) and request.decode.candidates > 1 for request in self.requests)

    async def _chosen(self, outputs: Outputs) -> Outputs:
        """Returns the outputs of each text to return."""
        if not self._chooses:
            return outputs
        orders = await asyncio.to_thread(lambda: [*map(self._order, self.requests, outputs)])
        return [[row[place] for place in order[: self.returned]] for row, order in zip(outputs, orders, strict=True)]

    def _order(self, request: Request | Empty, row: Sequence[AccumulatedOutput]) -> Sequence[int]:
        """Returns the numbers of the outputs of a request, the one with the least risk first."""
        if not isinstance(request, Request):
            return range(len(row))
        present = [output.score is not None or request.decode.strategy != "beam" for output in row]
        return self.utility.rank_outputs(request, [output.text for output in row], present)

    async def _computed(self, job: Job, outputs: Outputs) -> Any:
        """Returns what the reply needs besides the outputs, or None, and records the time until then."""
        work = self.reply.work(outputs)
        result = None if work is None else await self.worker.compute(job, work)
        self.metrics.request.observe(time.perf_counter() - self._begun)
        return result

    async def _stream(self, job: Job, send: Send) -> None:
        async for part in self._parts(job):
            if not self._started:
                await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
            await send(body_message(event_bytes(part)))
        await send(body_message(END, last=True))

    async def _parts(self, job: Job) -> AsyncIterator[dict[str, Any]]:
        """Yields the chunks of a stream."""
        outputs: Outputs = empty_outputs(self.requests)
        async for event in self._events(job):
            outputs[event.request][event.sample].add(event)
            if not self._chooses and (chunk := self.reply.chunk(event)) is not None:
                yield chunk
        if self._chooses:
            outputs = await self._chosen(outputs)
            whole = (output.event(n, rank) for n, row in enumerate(outputs) for rank, output in enumerate(row))
            for chunk in filter(None, map(self.reply.chunk, whole)):
                yield chunk
        for last in self.reply.last(outputs, await self._computed(job, outputs)):
            yield last

    async def _events(self, job: Job) -> AsyncIterator[Event]:
        """Yields the events of a job, and records the time of the first one."""
        observed_first = False
        async for event in job.events():
            if not observed_first:
                observed_first = True
                self.metrics.first_token.observe(time.perf_counter() - self._begun)
            yield event


async def until_disconnected(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Runs `work` until it is done or the client disconnects; returns whether it was done.

    Args:
        receive: ASGI channel of a request whose body has been read.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        return working.done()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event_bytes(value: Any) -> bytes:
    """Encodes a server-sent event as ASCII, since many clients break lines at U+2028 and similar characters."""
    return f"data: {json.dumps(value, allow_nan=False)}\n\n".encode()


def body_message(body: bytes, *, last: bool = False) -> Message:
    """Returns the ASGI message that sends a part of a body."""
    return {"type": "http.response.body", "body": body, "more_body": not last}
