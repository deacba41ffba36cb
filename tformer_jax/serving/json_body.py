"""The JSON object in the body of a request: strict JSON, with limits on size and time."""

import asyncio
import json
import math
import reprlib
from typing import Any, NoReturn

from starlette.requests import Request

from tformer_jax.serving.errors import RequestError

DIGITS = 18
"""Maximum number of digits of an integer, so that it fits into 64 bits."""


async def read_object(request: Request, *, max_body: int, seconds: float) -> dict[str, Any]:
    """Reads the JSON object in the body of a request.

    Args:
        max_body: maximum size of the body in bytes.
        seconds: maximum time for the client to send it.

    Raises:
        RequestError: 415 for another content type, 413 for a body that is too large, 408 for a timeout, 400 for
            anything that is not a JSON object.
        ClientDisconnect: the client disconnected.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError("the header Content-Type must be application/json", 415)
    try:
        async with asyncio.timeout(seconds):
            raw = await _read(request, max_body)
    except TimeoutError:
        message = f"the body did not arrive within {seconds:g} seconds"
        raise RequestError(message, 408, headers={"Connection": "close"}) from None
    value = parse(raw)
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object, such as {...}")
    return value


def parse(raw: bytes) -> Any:
    """Parses strict JSON: UTF-8 without NaN, Infinity, overflowing numbers, duplicate names or lone surrogates.

    Raises:
        RequestError: 400 for anything else.
    """
    hooks: dict[str, Any] = {
        "parse_constant": _reject_number,
        "parse_int": _parse_integer,
        "parse_float": _parse_finite,
        "object_pairs_hook": _unique_fields,
    }
    try:
        value = json.loads(raw.decode(), **hooks)
        json.dumps(value, ensure_ascii=False).encode()
    except RequestError:
        raise
    except UnicodeDecodeError:
        raise RequestError("the body is not UTF-8") from None
    except UnicodeEncodeError:
        raise RequestError("the body has a lone surrogate, which is not a character") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    return value


async def _read(request: Request, max_body: int) -> bytes:
    raw = bytearray()
    declared = int(request.headers.get("content-length", 0))
    if declared <= max_body:
        async for chunk in request.stream():
            raw += chunk
            if len(raw) > max_body:
                break
    if max(declared, len(raw)) > max_body:
        raise RequestError(f"the body has more than {max_body} bytes", 413)
    return bytes(raw)


def _reject_number(text: str) -> NoReturn:
    raise RequestError(f"the body has the number {reprlib.repr(text).strip(chr(39))}, which is out of range")


def _parse_integer(text: str) -> int:
    return int(text) if len(text.lstrip("-")) <= DIGITS else _reject_number(text)


def _parse_finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _reject_number(text)


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise RequestError("the body has a duplicate field")
    return fields
