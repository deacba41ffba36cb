"""HTTP/1.1 connections with a time limit for request headers, which uvicorn does not have."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class TimedProtocol(H11Protocol):
    """Closes a connection whose first or next request headers do not arrive completely within `header_seconds`.

    The time starts with the connection, and later with the first byte of a request: uvicorn's `timeout_keep_alive` ends
    connections that send none. The rest of a body that was answered before it was read counts as headers.
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
