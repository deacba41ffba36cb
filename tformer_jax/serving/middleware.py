"""ASGI middleware: checks of the Host header and of the API key, and request counts."""

import hmac
import ipaddress
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tformer_jax.serving.errors import RequestError
from tformer_jax.serving.generation import CLIENT_CLOSED
from tformer_jax.serving.metrics import Metrics

OPEN_PATHS = ("/", "/health")
"""Paths that need no API key: the page, which asks for it, and the health check."""


class LoopbackOnly:
    """Rejects requests whose Host header names another machine."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_loopback(named_host(scope)):
            message = "this server answers only to localhost, 127.0.0.1 and [::1]; --host opens it to others"
            await RequestError(message, 403, code="wrong_host").response()(scope, receive, send)
        else:
            await self.app(scope, receive, send)


class RequireKey:
    """Rejects requests without the header `Authorization: Bearer KEY`, except those for `OPEN_PATHS`."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app, self._key = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._accepts(scope):
            await self.app(scope, receive, send)
        else:
            message = "this server requires its API key: send it as the header Authorization: Bearer KEY"
            headers = {"WWW-Authenticate": "Bearer"}
            await RequestError(message, 401, code="invalid_api_key", headers=headers).response()(scope, receive, send)

    def _accepts(self, scope: Scope) -> bool:
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(given.encode("latin-1"), self._key)


class CountRequests:
    """Counts requests by route and by the status that was sent, or by `scope["state"]["outcome"]`."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: Sequence[Route]) -> None:
        self.app, self.metrics, self.routes = app, metrics, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        status = CLIENT_CLOSED

        async def send_and_note(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        finally:
            paths = (route.path for route in self.routes if route.path_regex.match(scope["path"]))
            self.metrics.answered.labels(next(paths, "other"), str(state.get("outcome", status))).inc()


def named_host(scope: Scope) -> str:
    """Returns the host name or address in the Host header, without the port."""
    host = Headers(scope=scope).get("host", "")
    return host[1:-1] if host.endswith("]") else host.rpartition(":")[0].strip("[]") or host


def is_loopback(host: str) -> bool:
    """Returns whether a host name or address is a loopback address."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
