"""The body of a request as a JSON object: strict JSON, of limited size, within a limited time."""

import asyncio
import json
import math
import reprlib
from typing import Any, NoReturn

from starlette.requests import Request

from tformer_jax.serving.refusal import Refusal

DIGITS = 18
"""Longest whole number, so that it fits into 64 bits."""


async def read_object(request: Request, *, max_body: int, seconds: float) -> dict[str, Any]:
    """The object that a request carries.

    Args:
        max_body: most bytes of the body.
        seconds: longest time that the client may take to send it.

    Raises:
        Refusal: 415 for another content type, 413 for too many bytes, 408 for a slow sender, 400 for anything that is
            not a JSON object.
        ClientDisconnect: the client has gone.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal("the header Content-Type must be application/json", 415)
    try:
        async with asyncio.timeout(seconds):
            raw = await _read(request, max_body)
    except TimeoutError:
        message = f"the body did not arrive within {seconds:g} seconds"
        raise Refusal(message, 408, headers={"Connection": "close"}) from None
    found = parse(raw)
    if not isinstance(found, dict):
        raise Refusal("the body must be a JSON object, such as {...}")
    return found


def parse(raw: bytes) -> Any:
    """Strict JSON: UTF-8, no NaN or Infinity, no number that overflows, no name twice, whole characters.

    Raises:
        Refusal: 400 for anything else.
    """
    hooks: dict[str, Any] = {
        "parse_constant": _refuse_number,
        "parse_int": _whole,
        "parse_float": _finite,
        "object_pairs_hook": _unique,
    }
    try:
        found = json.loads(raw.decode(), **hooks)
        json.dumps(found, ensure_ascii=False).encode()
    except Refusal:
        raise
    except UnicodeDecodeError:
        raise Refusal("the body is not UTF-8") from None
    except UnicodeEncodeError:
        raise Refusal("the body holds half of a surrogate pair, which is no character") from None
    except RecursionError:
        raise Refusal("the body is nested too deeply") from None
    except ValueError as error:
        raise Refusal(f"the body is not JSON: {error}") from None
    return found


async def _read(request: Request, max_body: int) -> bytes:
    raw = bytearray()
    declared = int(request.headers.get("content-length", 0))
    if declared <= max_body:
        async for chunk in request.stream():
            raw += chunk
            if len(raw) > max_body:
                break
    if max(declared, len(raw)) > max_body:
        raise Refusal(f"the body has more than {max_body} bytes", 413)
    return bytes(raw)


def _refuse_number(text: str) -> NoReturn:
    raise Refusal(f"the body holds the number {reprlib.repr(text).strip(chr(39))}, which is out of range")


def _whole(text: str) -> int:
    return int(text) if len(text.lstrip("-")) <= DIGITS else _refuse_number(text)


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_number(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise Refusal("the body names a field twice")
    return found
