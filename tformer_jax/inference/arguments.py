"""Texts, requests and examples that a caller of the Python interface gives, checked."""

import itertools
import os
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tformer_jax.base.checks import check_type
from tformer_jax.base.errors import UserError
from tformer_jax.config.layers import MEANS
from tformer_jax.data.chat.messages import Chat
from tformer_jax.data.corpora.lines import NOT_A_CHARACTER, is_unicode
from tformer_jax.inference.requests import Request

LanguageNames = str | Sequence[str | None] | None
"""A language for all texts, or one for each; None: it is not given."""


def check_loaded(mesh: Any, step: Any, ensemble: Any, mean: Any) -> None:
    """Raises `UserError` if an argument of `api.load` has another type, or `mean` has no effect."""
    check_type("mesh", mesh, str | None, "a text such as 'data=2,tensor=4', or None")
    if isinstance(step, bool) or not isinstance(step, int | np.integer | None):
        raise UserError(f"step={step!r}: must be the number of a step, such as 100, or None")
    if isinstance(ensemble, str | os.PathLike):
        raise UserError(f"ensemble={str(ensemble)!r}: must be a list of run folders: write [{str(ensemble)!r}]")
    check_type("ensemble", ensemble, Sequence, "a list of run folders")
    if mean is not None and mean not in MEANS:
        raise UserError(f"mean={mean!r}: must be {' or '.join(map(repr, MEANS))}")
    if mean is not None and not ensemble:
        raise UserError(f"mean={mean!r}: is for an ensemble: pass ensemble=[...], or leave it out")


def check_texts(texts: Iterable[Any]) -> list[str]:
    """Returns texts as a list.

    Raises:
        UserError: `texts` is a single text, or one of them is not a text or has a lone surrogate.
    """
    checked = list(several_texts(texts))
    for number, text in enumerate(checked, start=1):
        if not isinstance(text, str):
            raise UserError(f"text {number} is {reprlib.repr(text)}: it must be a text (str)")
        if not is_unicode(text):
            raise UserError(f"text {number} {NOT_A_CHARACTER}")
    return checked


def make_requests(
    texts: Iterable[Any], to: LanguageNames = None, source_language: LanguageNames = None
) -> list[str | Request]:
    """Returns the requests of texts or requests; requests that name no language get the given ones.

    Raises:
        UserError: as `check_texts`, or there are more or fewer languages than texts.
    """
    given = list(several_texts(texts))
    requests = [text if isinstance(text, Request) else Request(text) for text in given]
    check_texts(request.text for request in requests)
    targets, sources = (
        _repeat(name, value, len(requests)) for name, value in (("to", to), ("source_language", source_language))
    )
    return [
        request._replace(
            target_language=request.target_language or target, source_language=request.source_language or source
        )
        for request, target, source in zip(requests, targets, sources, strict=True)
    ]


def _repeat(name: str, value: LanguageNames, count: int) -> Sequence[str | None]:
    """Returns a language for each of `count` texts."""
    check_type(name, value, Iterable | None, "a language for all texts, or a list with one for each")
    languages = [value] * count if value is None or isinstance(value, str) else list(value)
    for language in languages:
        check_type(f"a language of {name}", language, str | None, "a code or an English name")
    if len(languages) != count:
        raise UserError(f"{name} has {len(languages)} languages for {count} texts: name one for each, or one for all")
    return languages


def with_languages(examples: Iterable[Any], to: LanguageNames, source_language: LanguageNames) -> list[Sequence[Any]]:
    """Returns (source, target) pairs whose sources are requests with these languages.

    Raises:
        UserError: as `make_requests`, or an example is no pair.
    """
    pairs = list(examples)
    for number, pair in enumerate(pairs, start=1):
        if isinstance(pair, Chat) or len(pair) != 2:
            raise UserError(f"example {number} is not a (source, target) pair, and only pairs have languages")
    sources = make_requests([source for source, _ in pairs], to, source_language)
    return [(source, target) for source, (_, target) in zip(sources, pairs, strict=True)]


def chat_requests(conversations: Iterable[Any]) -> list[Request]:
    """Returns the requests for the answers to conversations, which are lists of messages.

    Raises:
        UserError: `conversations` is a single conversation, or one of them is no conversation.
    """
    requests = []
    check_type("conversations", conversations, Iterable, "a list of conversations, which are lists of messages")
    for number, messages in enumerate(conversations, start=1):
        if isinstance(messages, Mapping):
            raise UserError("is a single conversation: write a list of conversations, which are lists of messages")
        try:
            requests.append(Request("", chat=Chat.read(messages)))
        except UserError as error:
            raise UserError(f"conversation {number} {error}") from None
    return requests


def check_examples(examples: Iterable[Any]) -> Iterator[Sequence[Any]]:
    """Yields the texts of each example, a text or a pair; raises `UserError` for anything else."""
    return map(example_parts, itertools.count(), several_texts(examples))


def example_parts(number: int, example: Any) -> Sequence[Any]:
    """Returns the texts of example `number`, from 0, which is a text or several; the first may be a `Request`.

    Raises:
        UserError: it is something else.
    """
    parts = (example,) if isinstance(example, str) else example
    if isinstance(parts, Request) or not isinstance(parts, Sequence | np.ndarray):
        parts = (None,)
    texts: list[Any] = [part.text if isinstance(part, Request) else part for part in parts]
    if not all(isinstance(text, str) for text in texts) or any(isinstance(part, Request) for part in parts[1:]):
        raise UserError(f"example {number + 1} is {reprlib.repr(example)}: it must be a text (str) or several")
    if not all(map(is_unicode, texts)):
        raise UserError(f"example {number + 1} {NOT_A_CHARACTER}")
    return tuple(parts)


def several_texts(texts: Iterable[Any]) -> Iterable[Any]:
    """Returns the texts; raises `UserError` if they are a single text."""
    if isinstance(texts, str) or getattr(texts, "ndim", None) == 0:
        raise UserError(f"{str(texts)!r} is a single text: write a list of texts")
    check_type("texts", texts, Iterable, "a list of texts")
    return texts
