"""`scripts/serve.py`: serves a trained model over HTTP."""

import argparse
import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tformer_jax as tj
from tformer_jax.base import checks
from tformer_jax.base.errors import UserError
from tformer_jax.base.numbers import MIB
from tformer_jax.cli.common import add_number, add_seconds, add_weights, format_size, integer, load_run, run_parser
from tformer_jax.cli.embed import add_pooling
from tformer_jax.config import Config, ModelConfig
from tformer_jax.config.fields import flag

if TYPE_CHECKING:
    from tformer_jax.inference.engine import Engine
    from tformer_jax.inference.engine.group import EngineGroup
    from tformer_jax.serving.model import ServedModel

KEY_VARIABLE = "TFORMER_API_KEY"
ROWS = 8
"""Default number of rows of an engine."""
ROWS_OF_ENGINES = 32
"""Default number of rows of several engines, of which only those with requests step."""
CACHE_SHARE = 0.5
"""Largest share of a device's memory that a KV cache takes without `--cache-tokens`."""


def main(argv: Sequence[str] | None = None) -> None:
    """Serves until Ctrl-C or SIGTERM."""
    options = parser().parse_args(argv)
    checks.require("serving", ("prometheus_client", "starlette", "uvicorn"), "serve")
    from tformer_jax.cli.run_description import describe_run
    from tformer_jax.serving import server
    from tformer_jax.serving.model import ServedModel

    with server.listen(options.host, options.port) as bound:
        run = load_run(options)
        encoder = not run.model.decodes
        check_flags(options, encoder=encoder)
        engine = None if encoder else make_engine(run, options)
        parts = run.config, run.model, run.params, run.tokenizers
        shown: dict[str, Any] = {
            "labels": run.labels or (),
            "attention": attention_renderer(run),
            "about": describe_run(run),
        }
        served = ServedModel.build(*parts, pooling=options.pooling, normalize=options.normalize, **shown)
        serve_model(engine, served, bound, options)


def attention_renderer(run: "tj.Run") -> Callable[[Any, str], str] | str:
    """Returns the function that renders the attention of a text and its output, or why the run has none."""
    from tformer_jax.cli import attention_page
    from tformer_jax.inference import watch

    try:
        checks.require_pages("the page of attention")
        watch.check(run.model)
    except UserError as error:
        return str(error)

    pairs = run.model.decodes
    return lambda text, output: attention_page.render_example(run, (text, output) if pairs else text + output)


def make_engine(run: "tj.Run", options: argparse.Namespace) -> "Engine | EngineGroup":
    """Returns the engine of a run, compiled for its decoding settings unless the flags leave that out."""
    from tformer_jax.inference.engine import SMOOTH_SECONDS, Engine
    from tformer_jax.inference.engine.group import EngineGroup
    from tformer_jax.inference.engine.parallel import served_engine_count
    from tformer_jax.models.ensemble import member_configs

    if run.config.decode.context:
        problem = "is not supported by the server, which translates sentences separately: write 0"
        raise run.config.decode.error("context", problem)
    options.max_rows = options.max_rows or default_rows(run)
    drawn = run.config.decode.candidates if run.config.decode.strategy == "sample" else 1
    if drawn > options.max_rows:
        raise UserError(f"--max-rows {options.max_rows}: must be at least decode.candidates={drawn}")
    parts = run.config, run.model, run.params, run.tokenizers
    pages = cache_pages(run.config, member_configs(run.model), options)
    count = 1 if pages else served_engine_count(options.max_rows, run.config.decode.width, run.params)
    limits: dict[str, Any] = {"max_rows": options.max_rows // count, "pages": pages, "seconds": SMOOTH_SECONDS}
    engines = [Engine(*parts, **limits, few_shapes=True) for _ in range(count)]
    engine = engines[0] if count == 1 else EngineGroup(engines)
    if limit := shared_output_limit(run.config, pages, options.max_rows):
        print(f"Outputs without a maximum number of tokens end at {limit:,} tokens, with their prompts", flush=True)
    if options.warm_up:
        print("Compiling; --no-warm-up defers this to the first requests", flush=True)
        names = (run.languages.targets, run.languages.sources)
        _, tags = run.languages.tags(*(codes[0] if codes else None for codes in names))
        engine.warm_up(run.config.decode, tags)
    return engine


def default_rows(run: "tj.Run") -> int:
    """Returns the number of rows of a server without `--max-rows`."""
    from tformer_jax.inference.engine.parallel import served_engine_count

    several = served_engine_count(ROWS_OF_ENGINES, run.config.decode.width, run.params) > 1
    return ROWS_OF_ENGINES if several else ROWS


def cache_pages(cfg: Config, models: Sequence[ModelConfig], options: argparse.Namespace) -> int | None:
    """Returns the number of pages of each KV cache of models; None: enough for all rows at full length.

    Raises:
        UserError: `--cache-tokens` is too small for one output.
    """
    from tformer_jax.inference.engine import PAGE_SIZE, row_pages
    from tformer_jax.models.cost import cache_bytes
    from tformer_jax.runs.hardware import device_memory

    least, rows, length = row_pages(cfg, 1), options.max_rows, cfg.model.max_length
    if options.cache_tokens is not None:
        if options.cache_tokens <= (least - 1) * PAGE_SIZE:
            problem = f"must be at least {least * PAGE_SIZE} for one output"
            raise UserError(f"--cache-tokens {options.cache_tokens}: {problem}")
        return -(-options.cache_tokens // PAGE_SIZE)
    full = sum(cache_bytes(model, rows, length, cfg.decode.cache_dtype) for model in models)
    memory = device_memory()
    if memory is None or full <= CACHE_SHARE * memory:
        return None
    pages = max(int(rows * length * CACHE_SHARE * memory / full) // PAGE_SIZE, least)
    print(
        f"Each KV cache has {pages * PAGE_SIZE:,} tokens, because one for {rows} rows of {length:,} tokens would take "
        f"{format_size(full)} of the {format_size(memory)} of memory; --cache-tokens sets another number",
        flush=True,
    )
    return pages


def shared_output_limit(cfg: Config, pages: int | None, rows: int) -> int | None:
    """Returns the tokens of a cache for each of `rows` rows if outputs without `decode.max_new_tokens` end there.

    None: the model's maximum length is smaller. See `Engine`.
    """
    from tformer_jax.inference.engine import PAGE_SIZE

    if pages is None or cfg.decode.max_new_tokens is not None:
        return None
    share = pages * PAGE_SIZE // rows
    return share if share < cfg.model.max_length else None


def check_flags(options: argparse.Namespace, *, encoder: bool) -> None:
    """Raises `UserError` for a flag that has no effect for this kind of model."""
    of_others = "models that generate text" if encoder else "encoders"
    this = "an encoder" if encoder else "a model that generates text"
    for name in ("max_rows", "cache_tokens", "warm_up") if encoder else ("pooling", "normalize"):
        if getattr(options, name) != parser().get_default(name):
            written = "--no-warm-up" if name == "warm_up" else flag(name)
            raise UserError(f"{written} is for {of_others}, but this run is {this}: leave it out")


def serve_model(
    engine: "Engine | EngineGroup | None", served: "ServedModel", bound: socket.socket, options: argparse.Namespace
) -> None:
    """Serves a model on a bound socket, with the limits given by the flags; an encoder has no engine."""
    from tformer_jax.serving import app, server
    from tformer_jax.serving.middleware import is_loopback
    from tformer_jax.serving.worker import EngineThread, Worker

    loopback, key = is_loopback(options.host), options.api_key
    if not loopback:
        who = "anyone who can reach this machine" + ("" if key is None else " and has the API key")
        logging.warning("--host %s: %s can use the model, and nothing is encrypted", options.host, who)
    limits = app.Limits(options.queue, options.max_body, options.timeout, options.body_timeout)
    thread = Worker(options.queue) if engine is None else EngineThread(engine, options.queue)
    server.accept(bound)
    print(f"Serving {served.name} ({served.family}) at {server.address(bound)}; Ctrl-C stops", flush=True)
    application = app.build(thread, served, limits, loopback=loopback, key=key)
    serving = server.Server(application, thread, grace=options.grace, header_seconds=options.body_timeout)
    serving.run(sockets=[bound])
    if thread.alive:  # in a long step or a compilation, for which the interpreter would wait
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def api_key(text: str) -> str:
    """Returns a key that can be sent in a header; an argparse type."""
    if not (text and text.isascii() and text.isprintable() and " " not in text):
        raise argparse.ArgumentTypeError(
            f"the key (here or in {KEY_VARIABLE}) must consist of printable ASCII characters without spaces"
        )
    return text


def parser() -> argparse.ArgumentParser:
    result = run_parser(
        "serve",
        "Serves a trained translator, language model or classifier over HTTP, with a web page at /, or the embeddings "
        "of an encoder. Requests of all clients are batched together.",
    )
    add_weights(result)
    result.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="default: 127.0.0.1, for this machine only"
    )
    add_number(result, "--port", "0: any free port, printed", 8000, lowest=0)
    result.add_argument(
        "--api-key",
        type=api_key,
        default=os.environ.get(KEY_VARIABLE),
        metavar="KEY",
        help=f"key that clients must send as the header Authorization: Bearer KEY (default: the environment "
        f"variable {KEY_VARIABLE}, which hides the key from other users of the machine; if neither is set, no key is "
        "required)",
    )
    add_pooling(result)
    _add_limits(result)
    return result


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the engine, of requests and of the shutdown."""
    add_number(
        parser,
        "--max-rows",
        f"number of rows, of which each output of a request takes one (default: {ROWS_OF_ENGINES} if several engines "
        f"serve them, which small models on CPUs have, otherwise {ROWS})",
    )
    add_number(
        parser,
        "--cache-tokens",
        "tokens in each KV cache, which all rows share: greedy decoding and sampling use one cache, each beam "
        "width another, at most four (default: enough for all rows at full length, within half of the memory)",
    )
    parser.add_argument(
        "--warm-up",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compile for the decoding settings of the run before the first request",
    )
    add_number(parser, "--queue", "queue size, in requests", 64)
    parser.add_argument(
        "--max-body", type=integer(1), default=MIB, metavar="BYTES", help="maximum request size (default: 1 MiB)"
    )
    add_seconds(parser, "--timeout", "maximum seconds per request", 120.0)
    body = "maximum seconds for a client to send the headers, and then the body"
    add_seconds(parser, "--body-timeout", body, 10.0)
    add_seconds(parser, "--grace", "seconds that running requests have to finish at shutdown", 10.0)
