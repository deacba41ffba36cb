"""A response that the engine writes: whole or by server-sent events, in limited time, while the client is there."""

import asyncio
import contextlib
import json
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from tformer_jax.inference.engine import Event, Request
from tformer_jax.serving.engine_thread import EngineThread, Job
from tformer_jax.serving.metrics import Metrics
from tformer_jax.serving.refusal import Refusal
from tformer_jax.serving.replies import Reply, empty_outputs

GONE = 499
"""The status that logs give to a request whose client went away."""
LAST_WORD = 5.0
"""Seconds that a client has to take the event that ends its stream."""
STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
END = b"data: [DONE]\n\n"


class Generation(Response):
    """Runs requests in the engine and sends what comes.

    Args:
        thread: the engine's.
        metrics: where the times go.
        requests: what to generate.
        reply: the JSON of the route.
        seconds: longest time until the last token.
        stream: whether to answer by server-sent events.

    Raises:
        Refusal: when called, before anything is sent: 400, 429, 500, 503, or 504 for a request that takes too long.
            Once a stream has begun, the same refusal is its last event.
    """

    def __init__(
        self,
        thread: EngineThread,
        metrics: Metrics,
        requests: Sequence[Request],
        reply: Reply,
        *,
        seconds: float,
        stream: bool,
    ) -> None:
        self.thread, self.metrics, self.requests, self.reply = thread, metrics, requests, reply
        self.seconds, self.stream = seconds, stream
        self._started = self._seen_first = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def noted(message: Message) -> None:
            self._started = True
            await send(message)

        if not await while_there(receive, self._answer(scope, receive, noted)):
            scope["state"]["outcome"] = GONE

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self.seconds):
                with self.thread.job(self.requests) as job:
                    if self.stream:
                        await self._pieces(job, send)
                    else:
                        await JSONResponse(await self._whole(job))(scope, receive, send)
            return
        except TimeoutError:
            refusal = Refusal(f"the request took longer than {self.seconds:g} seconds", 504, code="timeout")
        except Refusal as error:
            refusal = error
        if not self._started:
            raise refusal
        scope["state"]["outcome"] = refusal.status
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORD):
                await send(piece(data(refusal.body()), last=True))

    async def _whole(self, job: Job) -> dict[str, Any]:
        outputs = empty_outputs(self.requests)
        begun = time.perf_counter()
        async for event in job.events():
            self._observe_first(event, begun)
            outputs[event.request][event.sample].add(event)
        self.metrics.whole.observe(time.perf_counter() - begun)
        return self.reply.whole(outputs)

    async def _pieces(self, job: Job, send: Send) -> None:
        begun = time.perf_counter()
        async for event in job.events():
            self._observe_first(event, begun)
            if not self._started:
                await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
            part = self.reply.part(event)
            if part is not None:
                await send(piece(data(part)))
        self.metrics.whole.observe(time.perf_counter() - begun)
        await send(piece(END, last=True))

    def _observe_first(self, event: Event, begun: float) -> None:
        if not self._seen_first:
            self._seen_first = True
            self.metrics.first.observe(time.perf_counter() - begun)


async def while_there(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Does the work unless the client disconnects first; whether it was done.

    Args:
        receive: of a request whose body has been read.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        return working.done()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def data(value: Any) -> bytes:
    """One server-sent event, in ASCII: many clients break lines at U+2028 and its like, too."""
    return f"data: {json.dumps(value, allow_nan=False)}\n\n".encode()


def piece(body: bytes, *, last: bool = False) -> Message:
    """The message that sends a part of a body."""
    return {"type": "http.response.body", "body": body, "more_body": not last}
