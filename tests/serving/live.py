"""Runs a server in a thread of this process."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from tests.serving.fake_engine import FakeEngine, served
from tformer_jax.serving import app, server
from tformer_jax.serving.model import ServedModel
from tformer_jax.serving.worker import EngineThread, Worker

LIMITS = {"queue": 8, "max_body": 10_000, "timeout": 20.0, "body_timeout": 20.0}


class Live:
    """A running server, with helpers to use it."""

    def __init__(
        self, engine: Any, model: ServedModel, *, grace: float, loopback: bool, key: str | None, **limits: Any
    ) -> None:
        self.engine, self.model = engine, model
        self.socket = server.listen("127.0.0.1", 0)
        queue = {**LIMITS, **limits}["queue"]
        self.worker = Worker(queue) if model.family in ("classifier", "masked_lm") else EngineThread(engine, queue)
        application = app.build(self.worker, model, app.Limits(**{**LIMITS, **limits}), loopback=loopback, key=key)
        self.server = server.Server(
            application, self.worker, grace=grace, header_seconds={**LIMITS, **limits}["body_timeout"]
        )
        self.url = server.address(self.socket)
        self.client = httpx.Client(base_url=self.url, timeout=30)
        self.running = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]})

    def post(self, route: str, **body: Any) -> httpx.Response:
        return self.client.post(route, json=body)

    def stream(self, route: str, **body: Any) -> list[Any]:
        """Returns the events of a stream, up to its [DONE]."""
        with self.client.stream("POST", route, json={**body, "stream": True}) as response:
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            return list(events(response))

    def metric(self, name: str) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name} ")), 0.0)

    def background(self, route: str, **body: Any) -> tuple[threading.Thread, list[httpx.Response]]:
        """Sends a request in a thread; returns the thread, and a list that receives the response."""
        actual: list[httpx.Response] = []

        def ask() -> None:
            actual.append(httpx.post(self.url + route, json=body, timeout=30))

        thread = threading.Thread(target=ask)
        thread.start()
        return thread, actual

    def raw(self) -> socket.socket:
        """Opens a raw connection, without a client library."""
        return socket.create_connection(self.socket.getsockname(), timeout=20)


@contextlib.contextmanager
def live(
    family: str = "decoder_lm", *, max_rows: int = 4, delay: float = 0.0, decode: Any = None, **options: Any
) -> Iterator[Live]:
    """Runs a server around a fake engine, and stops it at the end."""
    engine = FakeEngine(max_rows=max_rows, delay=delay, decode=decode)
    with around(engine, served(engine, family), **options) as service:
        try:
            yield service
        finally:
            engine.gate.set()


@contextlib.contextmanager
def around(
    engine: Any,
    model: ServedModel,
    *,
    grace: float = 10.0,
    loopback: bool = True,
    key: str | None = None,
    **limits: Any,
) -> Iterator[Live]:
    """Runs a server around any engine, and stops it at the end."""
    single = Live(engine, model, grace=grace, loopback=loopback, key=key, **limits)
    single.running.start()
    until(lambda: single.server.started)
    try:
        yield single
    finally:
        single.client.close()
        if single.running.is_alive():
            single.server.stop()
        single.running.join(20)
        assert not single.running.is_alive()


def events(response: httpx.Response) -> Iterator[Any]:
    """Yields the events of a stream as they arrive; a stream that ends without [DONE] must end with an error."""
    last = None
    for line in response.iter_lines():
        if line == "data: [DONE]":
            return
        if line:
            last = json.loads(line.removeprefix("data: "))
            yield last
    assert last is not None and "error" in last


def until(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    """Waits until a condition is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)
