"""ASGI application: the routes, a check of the Host header, and request counts."""

import contextlib
import dataclasses
import importlib.resources
import ipaddress
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tformer_jax.config import ConfigError, DecodeConfig
from tformer_jax.inference.engine import Request
from tformer_jax.serving.bodies import Body, Completion, Translation
from tformer_jax.serving.engine_thread import EngineThread, stopping
from tformer_jax.serving.generation import CLIENT_CLOSED, Generation
from tformer_jax.serving.metrics import Metrics
from tformer_jax.serving.reading import read_object
from tformer_jax.serving.refusal import Refusal
from tformer_jax.serving.replies import CompletionReply, Reply, TranslationReply

BodyKind = TypeVar("BodyKind", bound=Body)
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
PAGE_HEADERS = {"Content-Security-Policy": f"{POLICY}; frame-ancestors 'none'", "Cache-Control": "no-cache"}
END_SECONDS = 1.0
"""Seconds to wait for the engine's last step at shutdown, since it may be compiling."""


@dataclasses.dataclass(frozen=True)
class Served:
    """The model that a server serves, and its settings."""

    name: str
    family: str
    decode: DecodeConfig
    count: Callable[[str], int]
    """Returns the number of tokens of a prompt."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits on the resources of requests."""

    queue: int
    """Maximum number of requests that wait while all slots are in use."""
    max_body: int
    """Maximum size of a body in bytes."""
    timeout: float
    """Seconds from a request to its last token."""
    body_timeout: float
    """Seconds from the headers of a request to the end of its body."""


class Handlers:
    """Request handlers, one method per route."""

    def __init__(self, thread: EngineThread, served: Served, limits: Limits) -> None:
        self.thread, self.served, self.limits = thread, served, limits
        self.metrics = Metrics()
        self._created = int(time.time())
        self._page = (importlib.resources.files(__package__) / "page.html").read_text(encoding="utf-8")

    def routes(self) -> list[Route]:
        """Returns all routes."""
        return [
            Route("/", self.page),
            Route("/health", self.health),
            Route("/metrics", self.show_metrics),
            Route("/v1/models", self.models),
            Route("/translate", self.translate, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
        ]

    async def page(self, _: HttpRequest) -> Response:
        """Returns the web page."""
        return HTMLResponse(self._page, headers=PAGE_HEADERS)

    async def health(self, _: HttpRequest) -> Response:
        """Returns 200 while requests are accepted; otherwise 503, with the reason."""
        found: dict[str, Any] = {"status": "ok", "model": self.served.name, "family": self.served.family}
        if self.thread.failure is not None:
            found |= {"status": "unhealthy", "reason": self.thread.failure}
        elif self.thread.stopping:
            found |= {"status": "stopping", "reason": str(stopping())}
        return JSONResponse(found, 200 if found["status"] == "ok" else 503)

    async def show_metrics(self, _: HttpRequest) -> Response:
        """Returns the metrics in Prometheus' text format."""
        return PlainTextResponse(self.metrics.text(self.thread.load), media_type="text/plain; version=0.0.4")

    async def models(self, _: HttpRequest) -> Response:
        """Returns OpenAI's list of models, with the one that is served."""
        mine = {"id": self.served.name, "object": "model", "created": self._created, "owned_by": "tformer_jax"}
        return JSONResponse({"object": "list", "data": [mine]})

    async def translate(self, request: HttpRequest) -> Response:
        """Translates one or several texts."""
        if self.served.family != "seq2seq":
            message = f"this server holds a {self.served.family} model, which does not translate: use /v1/completions"
            raise Refusal(message, 404, code="wrong_family")
        body = await self._read(request, Translation)
        return self._generate(body.requests(self.served.decode), TranslationReply(), "text", body.stream)

    async def complete(self, request: HttpRequest) -> Response:
        """Completes one or several prompts; a translation model translates them."""
        body = await self._read(request, Completion)
        name = self.served.name
        if body.model not in (None, name):
            message = f"model: this server holds only {name!r}"
            raise Refusal(message, 404, param="model", code="model_not_found")
        reply = CompletionReply(name, body, self.served.count)
        return self._generate(body.requests(self.served.decode), reply, "prompt", body.stream)

    async def _read(self, request: HttpRequest, kind: type[BodyKind]) -> BodyKind:
        limits = self.limits
        return kind.read(await read_object(request, max_body=limits.max_body, seconds=limits.body_timeout))

    def _generate(self, requests: Sequence[Request], reply: Reply, field: str, stream: bool) -> Response:
        if len(requests) > self.limits.queue:
            raise Refusal(f"{field}: at most {self.limits.queue} texts at once", param=field)
        seconds = self.limits.timeout
        return Generation(self.thread, self.metrics, requests, reply, seconds=seconds, stream=stream)


def build(thread: EngineThread, served: Served, limits: Limits, *, loopback: bool) -> ASGIApp:
    """Builds the application; its lifespan starts and ends the engine's thread.

    Args:
        loopback: accept only requests whose Host header names this machine, so that no web page can reach the server
            under its own host name (DNS rebinding).
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        thread.start()
        yield
        thread.end(END_SECONDS)

    handlers = Handlers(thread, served, limits)
    refusals: dict[Any, Any] = {
        ConfigError: _refuse,
        HTTPException: _refuse_route,
        ClientDisconnect: _client_disconnected,
        Exception: _internal_error,
    }
    app: ASGIApp = Starlette(routes=handlers.routes(), exception_handlers=refusals, lifespan=lifespan)
    if loopback:
        app = LoopbackOnly(app)
    return CountRequests(app, handlers.metrics, {route.path for route in handlers.routes()})


class LoopbackOnly:
    """Refuses requests whose Host header names another machine."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_loopback(named_host(scope)):
            message = "this server answers only to localhost, 127.0.0.1 and [::1]; --host opens it to others"
            await Refusal(message, 403, code="wrong_host").response()(scope, receive, send)
        else:
            await self.app(scope, receive, send)


class CountRequests:
    """Counts requests by route and by the status that was sent, or by `scope["state"]["outcome"]`."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: set[str]) -> None:
        self.app, self.metrics, self.paths = app, metrics, paths

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
            route = scope["path"] if scope["path"] in self.paths else "other"
            self.metrics.answered[route, state.get("outcome", status)] += 1


def named_host(scope: Scope) -> str:
    """Returns the host name or address in the Host header, without the port."""
    host = Headers(scope=scope).get("host", "")
    return host[1:-1] if host.endswith("]") else host.rpartition(":")[0].strip("[]") or host


def is_loopback(host: str) -> bool:
    """Whether a host name or address is a loopback address."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def _refuse(_: HttpRequest, error: ConfigError) -> Response:
    return (error if isinstance(error, Refusal) else Refusal(str(error))).response()


async def _refuse_route(request: HttpRequest, error: HTTPException) -> Response:
    path = request.scope["path"]
    reasons = {404: f"{path} is not a route of this server", 405: f"{path} does not accept {request.method}"}
    return Refusal(reasons.get(error.status_code, error.detail), error.status_code, headers=error.headers).response()


async def _client_disconnected(_: HttpRequest, __: ClientDisconnect) -> Response:
    return Response(status_code=CLIENT_CLOSED)


async def _internal_error(_: HttpRequest, __: Exception) -> Response:
    message = "internal server error; the server's log gives the cause"
    return Refusal(message, 500, headers={"Connection": "close"}).response()
