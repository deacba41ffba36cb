"""ASGI application: the routes of the server."""

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from tformer_jax.base.errors import UserError
from tformer_jax.config.task import tasks_of_family
from tformer_jax.inference.engine import Request
from tformer_jax.inference.languages import TagIds
from tformer_jax.serving import replies
from tformer_jax.serving.bodies import Body, Completion, DirectedBody
from tformer_jax.serving.chat import ChatCompletion, ChatReply
from tformer_jax.serving.errors import RequestError
from tformer_jax.serving.generation import CLIENT_CLOSED, Generation
from tformer_jax.serving.json_body import read_object
from tformer_jax.serving.metrics import Metrics
from tformer_jax.serving.middleware import CountRequests, LoopbackOnly, RequireKey
from tformer_jax.serving.model import ServedModel
from tformer_jax.serving.page import page
from tformer_jax.serving.text_bodies import Attention, Classification, Detokenization, Embedding, Tokenization
from tformer_jax.serving.translation import Translation
from tformer_jax.serving.worker import Empty, Worker, stopping_error

BodyKind = TypeVar("BodyKind", bound=Body)
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
PAGE_HEADERS = {"Content-Security-Policy": f"{POLICY}; frame-ancestors 'none'", "Cache-Control": "no-cache"}
END_SECONDS = 1.0
"""Seconds to wait for the engine's last step at shutdown, since it may be compiling."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits on the resources of requests."""

    queue: int
    """Maximum number of requests that wait while all rows are in use."""
    max_body: int
    """Maximum size of a body in bytes."""
    timeout: float
    """Seconds from a request to the end of its response."""
    body_timeout: float
    """Seconds from the headers of a request to the end of its body."""


class Handlers:
    """Request handlers, one method per route.

    Texts are encoded and decoded in other threads, so that long ones do not delay the streams of other requests.
    """

    def __init__(self, worker: Worker, served: ServedModel, limits: Limits) -> None:
        self.worker, self.served, self.limits = worker, served, limits
        self.metrics = Metrics(lambda: self.worker.load)
        self._created = int(time.time())
        self._page = page()

    def routes(self) -> list[Route]:
        """Returns all routes."""
        return [
            Route("/", self.page),
            Route("/health", self.health),
            Route("/info", self.info),
            Route("/metrics", self.show_metrics),
            Route("/translate", self.translate, methods=["POST"]),
            Route("/attention", self.attention, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/embeddings", self.embed, methods=["POST"]),
            Route("/classify", self.classify, methods=["POST"]),
            Route("/tokenizer_info", self.tokenizer_info),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    async def page(self, _: HttpRequest) -> Response:
        """Returns the web page."""
        self._require("have a page", self.served.model_class.decodes or self.served.model_class.classifies)
        return HTMLResponse(self._page, headers=PAGE_HEADERS)

    async def health(self, _: HttpRequest) -> Response:
        """Returns 200 while requests are accepted; otherwise 503, with the reason."""
        health: dict[str, Any] = {"status": "ok", "model": self.served.name, "family": self.served.family}
        if self.worker.failure is not None:
            health |= {"status": "unhealthy", "reason": self.worker.failure}
        elif self.worker.stopping:
            health |= {"status": "stopping", "reason": str(stopping_error())}
        return JSONResponse(health, 200 if health["status"] == "ok" else 503)

    async def info(self, _: HttpRequest) -> Response:
        """Returns what the page says about the model, and which parts of the page the server can fill."""
        served = self.served
        no_attention = served.attention if isinstance(served.attention, str) else None
        offered: dict[str, Any] = {
            "language_names": served.language_names,
            "chat": served.answers,
            "attention": no_attention is None,
            "no_attention": no_attention,
            "logprobs": served.gives_logprobs,
        }
        return JSONResponse({"model": served.name, "family": served.family, **offered, **served.about})

    async def show_metrics(self, _: HttpRequest) -> Response:
        """Returns the metrics in Prometheus' text format."""
        return PlainTextResponse(self.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def models(self, _: HttpRequest) -> Response:
        """Returns OpenAI's list of models, with the served model alone."""
        return JSONResponse({"object": "list", "data": [self._description()]})

    async def model(self, request: HttpRequest) -> Response:
        """Returns OpenAI's description of the model that is served."""
        self._check_model(request.path_params["name"])
        return JSONResponse(self._description())

    async def translate(self, request: HttpRequest) -> Response:
        """Translates one or several texts."""
        self._require("translate", self.served.model_class.reads_source)
        whole = await self._read(request, Translation)
        self._check_count(whole, "text")
        body, gaps = await asyncio.to_thread(whole.by_sentence, self.served)
        self._check_count(body, "text", "sentences")
        self._check_length("max_new_tokens", body.max_new_tokens, body)
        tags = body.tags(self.served, len(body.texts("text")))
        rows = await self._encode("text", body, self.served.longest_prompt, tags)
        top = body.logprobs
        scores = None if top is None else replies.TokenScores(self.served, rows, top, tags, body.unknown)
        requests = body.requests(rows, tags, self.served.decode)
        reply = replies.SentencesReply(gaps) if gaps else replies.TranslationReply(scores, requests)
        return self._generate(requests, reply, body.stream, body.n_best)

    async def attention(self, request: HttpRequest) -> Response:
        """Returns a page with what the model attends to in a text and its output."""
        if isinstance(render := self.served.attention, str):
            raise RequestError(f"attention is not available: {render}", 404)
        body = await self._read(request, Attention)
        self.served.tags([body.target_language], [body.source_language])  # raises
        if body.output and not self.served.model_class.decodes:
            raise body.error("output", f"a {self.served.family} model makes none of a text: leave it out")
        return self._generate([], replies.attention_page(functools.partial(render, body.source, body.output)))

    async def complete(self, request: HttpRequest) -> Response:
        """Completes one or several prompts; a translation model translates them."""
        self._require("complete prompts", self.served.model_class.decodes)
        body = await self._read(request, Completion)
        self._check_count(body, "prompt")
        self._check_length("max_tokens", body.max_tokens, body)
        tags = body.tags(self.served, len(body.texts("prompt")))
        rows = await asyncio.to_thread(body.rows, self.served, tags)
        reply = await asyncio.to_thread(replies.CompletionReply, self.served, body, rows, tags)
        return self._generate(body.requests(rows, tags, self.served.decode), reply, body.stream, body.n)

    async def chat(self, request: HttpRequest) -> Response:
        """Answers a conversation."""
        if not self.served.answers:
            message = "this model has no chat template, by which conversations are written: use /v1/completions"
            raise RequestError(message, 404, code="no_chat_template")
        body = await self._read(request, ChatCompletion)
        self._check_length("max_tokens", body.limit, body)
        tags = body.tags(self.served, 1)
        rows = [await asyncio.to_thread(self.served.encode_chat, body.chat)]
        reply = await asyncio.to_thread(ChatReply, self.served, body, rows, tags)
        return self._generate(body.requests(rows, tags, self.served.decode), reply, body.stream, body.n)

    async def embed(self, request: HttpRequest) -> Response:
        """Computes embeddings of one or several texts."""
        self._require("compute embeddings", not self.served.model_class.decodes)
        body = await self._read(request, Embedding)
        rows = await asyncio.to_thread(self.served.encode_to_embed, "input", body.texts("input"))
        return self._generate([], replies.embedding_list(self.served, body, rows))

    async def classify(self, request: HttpRequest) -> Response:
        """Computes the probabilities of all labels of one or several texts."""
        self._require("classify", self.served.model_class.classifies)
        if not self.served.labels:
            raise RequestError("the classification head of this model is not trained: use /v1/embeddings", 404)
        body = await self._read(request, Classification)
        rows = await self._encode("input", body, self.served.max_length)
        return self._generate([], replies.classification(self.served, rows))

    async def tokenizer_info(self, _: HttpRequest) -> Response:
        """Returns the special tokens of texts, as vLLM does."""
        special = self.served.tokenizer.special
        ids = {"bos": next(iter(special.before), None), "eos": special.eos[0], "pad": special.pad}
        return JSONResponse({f"{role}_token": None if i is None else special.name(i) for role, i in ids.items()})

    async def tokenize(self, request: HttpRequest) -> Response:
        """Returns the token ids of a text, as vLLM does; the name of a special token is that token."""
        body = await self._read(request, Tokenization)
        named = [i for i, name in self.served.tokenizer.special.names if name == body.prompt]
        encoded = named or await asyncio.to_thread(self.served.tokenizer.encode, body.prompt or "")
        if body.add_special_tokens:
            encoded = self.served.add_special_tokens(encoded)
        return JSONResponse({"tokens": encoded, "count": len(encoded), "max_model_len": self.served.max_length})

    async def detokenize(self, request: HttpRequest) -> Response:
        """Returns the text of token ids, as vLLM does."""
        body = await self._read(request, Detokenization)
        tokens = body.tokens or ()
        self.served.check_ids("tokens", tokens)
        return JSONResponse({"prompt": await asyncio.to_thread(self.served.decode_all, tokens, named=True)})

    async def _read(self, request: HttpRequest, kind: type[BodyKind]) -> BodyKind:
        limits = self.limits
        body = kind.read(await read_object(request, max_body=limits.max_body, seconds=limits.body_timeout))
        self._check_model(getattr(body, "model", None))
        return body

    async def _encode(
        self, field: str, body: Body, limit: int, tags: Sequence[TagIds] | None = None
    ) -> list[tuple[int, ...]]:
        """Returns the token ids of the texts in a field, as `ServedModel.encode` does."""
        before = None if tags is None else [source for source, _ in tags]
        return await asyncio.to_thread(self.served.encode, field, body.texts(field), limit, before)

    def _check_count(self, body: Body, field: str, parts: str = "texts") -> None:
        """Raises `RequestError` if a request has more texts than the queue holds; before they are tokenized."""
        if len(body.texts(field)) > self.limits.queue:
            raise RequestError(f"{field}: at most {self.limits.queue} {parts} at once", param=field)

    def _check_length(self, field: str, count: int | None, body: DirectedBody) -> None:
        """Raises `RequestError` if outputs of `count` tokens have no room for the prefix of the run."""
        prefix, needed = self.served.decode.prefix, self.served.prefix_tokens
        if count and count < needed and not body.prefix:
            problem = f"must be at least {needed}, the tokens of {prefix!r}, with which every output starts"
            raise RequestError(f"{field}: {problem}", param=field)

    def _generate(
        self, requests: Sequence[Request | Empty], reply: replies.Reply, stream: bool = False, returned: int = 1
    ) -> Response:
        how: dict[str, Any] = {"utility": self.served.utility, "seconds": self.limits.timeout, "stream": stream}
        return Generation(self.worker, self.metrics, requests, reply, returned=returned, **how)

    def _description(self) -> dict[str, Any]:
        description = {"id": self.served.name, "object": "model", "created": self._created, "owned_by": "tformer_jax"}
        names = self.served.language_names
        return description | ({"language_names": names} if names else {})

    def _check_model(self, name: str | None) -> None:
        """Raises `RequestError` if a request names another model."""
        if name not in (None, self.served.name):
            message = f"model: this server serves only {self.served.name!r}"
            raise RequestError(message, 404, param="model", code="model_not_found")

    def _require(self, use: str, possible: bool) -> None:
        """Raises `RequestError` for a route that is not `possible` with this model, because it does not `use`."""
        if not possible:
            family, route = self.served.family, tasks_of_family(self.served.family)[0].route
            message = f"this server serves a {family} model, which does not {use}: use {route}"
            raise RequestError(message, 404, code="wrong_family")


def build(worker: Worker, served: ServedModel, limits: Limits, *, loopback: bool, key: str | None = None) -> ASGIApp:
    """Builds the application; its lifespan starts and ends the model's thread.

    Args:
        loopback: accept only requests whose Host header names this machine, so that no web page can reach the server
            under its own host name (DNS rebinding).
        key: API key that requests must send; None: none is needed.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        worker.start()
        yield
        worker.end(END_SECONDS)

    handlers = Handlers(worker, served, limits)
    exception_handlers: dict[Any, Any] = {
        UserError: _reject,
        HTTPException: _reject_route,
        ClientDisconnect: _client_disconnected,
        Exception: _internal_error,
    }
    app: ASGIApp = Starlette(routes=handlers.routes(), exception_handlers=exception_handlers, lifespan=lifespan)
    if key is not None:
        app = RequireKey(app, key)
    if loopback:
        app = LoopbackOnly(app)
    return CountRequests(app, handlers.metrics, handlers.routes())


async def _reject(_: HttpRequest, error: UserError) -> Response:
    return (error if isinstance(error, RequestError) else RequestError(str(error))).response()


async def _reject_route(request: HttpRequest, error: HTTPException) -> Response:
    path = request.scope["path"]
    reasons = {404: f"{path} is not a route of this server", 405: f"{path} does not accept {request.method}"}
    reason = reasons.get(error.status_code, error.detail)
    return RequestError(reason, error.status_code, headers=error.headers).response()


async def _client_disconnected(_: HttpRequest, __: ClientDisconnect) -> Response:
    return Response(status_code=CLIENT_CLOSED)


async def _internal_error(_: HttpRequest, __: Exception) -> Response:
    message = "internal server error; the server's log gives the cause"
    return RequestError(message, 500, headers={"Connection": "close"}).response()
