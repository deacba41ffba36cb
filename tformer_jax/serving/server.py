"""HTTP server with graceful shutdown: on Ctrl-C or SIGTERM, running requests may finish within a grace period."""

import asyncio
import contextlib
import functools
import resource
import socket
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from tformer_jax.base.errors import UserError
from tformer_jax.serving.worker import Worker

CLOSING = 5
"""Seconds, as an integer, for connections to close after their requests are done."""
TICK = 0.05
LAST_PORT = 65535


class TimedProtocol(H11Protocol):
    """Closes a connection whose first or next request headers do not arrive completely within `header_seconds`.

    uvicorn has no such limit. The time starts with the connection, and later with the first byte of a request:
    uvicorn's `timeout_keep_alive` ends connections that send none. The rest of a body that was answered before it was
    read counts as headers.
    """

    def __init__(self, *args: Any, header_seconds: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._header_seconds = header_seconds
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._time_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _time_headers(self) -> None:
        """Starts the timer if headers, or a body that nothing waits for, are incomplete; otherwise stops it."""
        unread = (self.conn.our_state, self.conn.their_state) == (h11.DONE, h11.SEND_BODY)
        if self.conn.their_state is not h11.IDLE and not unread:
            self._stop_timer()
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(self._header_seconds, self.transport.close)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


class Server(uvicorn.Server):
    """A uvicorn server that drains the engine before it closes; a second signal cancels running requests.

    Args:
        app: result of `app.build`.
        worker: runs the model.
        grace: seconds for running requests to finish.
        header_seconds: seconds for the headers of a request to arrive.
    """

    def __init__(self, app: ASGIApp, worker: Worker, *, grace: float, header_seconds: float) -> None:
        protocol: Any = functools.partial(TimedProtocol, header_seconds=header_seconds)
        config = uvicorn.Config(
            app, http=protocol, ws="none", log_config=None, access_log=False, timeout_graceful_shutdown=CLOSING
        )
        super().__init__(config)
        self._worker, self._grace = worker, grace
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves until `stop` is called or a signal arrives."""
        allow_many_connections()
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stops the server on a signal."""
        self.stop()

    def stop(self) -> None:
        """Starts the shutdown; a second call cancels running requests. Safe in any thread and signal handler."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if self._draining is None:
            self._worker.stopping = True
            self._draining = asyncio.ensure_future(self._drain())
        else:
            self._grace = 0

    async def _drain(self) -> None:
        started = time.monotonic()
        while self._worker.jobs and time.monotonic() < started + self._grace:
            await asyncio.sleep(TICK)
        self._worker.stop_jobs()
        self.should_exit = True


def allow_many_connections() -> None:
    """Raises the limit of open files to the maximum that the system allows: each connection takes one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS refuses an unlimited number
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket bound to an address; port 0 selects a free port.

    Raises:
        UserError: the address does not exist or is in use.
    """
    if port > LAST_PORT:
        raise UserError(f"--port {port}: must be at most {LAST_PORT}")
    with _address_errors(host, port):
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    return bound


def accept(bound: socket.socket) -> None:
    """Makes a bound socket accept connections.

    Raises:
        UserError: another process, which has bound the same address meanwhile, accepts connections there.
    """
    with _address_errors(*bound.getsockname()[:2]):
        bound.listen()


@contextlib.contextmanager
def _address_errors(host: str, port: int) -> Iterator[None]:
    """Turns the errors of an address into a `UserError`."""
    try:
        yield
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise UserError(f"--host {host} --port {port}: {reason}; write another one") from None


def address(bound: socket.socket) -> str:
    """Returns the URL of a socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
