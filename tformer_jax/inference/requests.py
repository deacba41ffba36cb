"""Texts to translate or to continue, with languages and prefixes of their outputs, and their tokens."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from tformer_jax.config.directions import Direction
from tformer_jax.data.chat.messages import Chat

Constraint = tuple[str, ...]
"""Alternative phrases; an output must contain at least one."""


class PhraseTokens(NamedTuple):
    """The tokens of a phrase, as they are written at one kind of place."""

    ids: tuple[int, ...]
    glued: bool
    """Whether the tokens must not follow a letter, because they would extend its word."""
    open: bool
    """Whether no letter may follow the tokens."""


TokenConstraints = tuple[tuple[PhraseTokens, ...], ...]
"""The constraints of an output: for each, alternative phrases; the output must contain at least one."""


class Request(NamedTuple):
    """A text to translate or to continue; wherever one is expected, a text alone may be given."""

    text: str
    target_language: str | None = None
    """Code or English name of the language to translate into; None: the model's only target language."""
    source_language: str | None = None
    """Code or English name of the language of the text; None: the model has only one, or is not told the language."""
    prefix: str | None = None
    """Text that the output starts with; None: `decode.prefix`."""
    chat: Chat | None = None
    """Conversation to answer; None: continue or translate `text`."""
    constraints: Any = ()
    """Phrases that outputs of beam search must contain: a text, or a list of texts, or of lists of alternatives."""


class EncodedRequest(NamedTuple):
    """The tokens of a request."""

    ids: Sequence[int]
    """Token ids as the model reads them; (): the output is empty."""
    text: str = ""
    """The text, whose words `decode.unknown="copy"` copies; empty: only its ids are known."""
    tags: tuple[int, ...] = ()
    """Language tags with which the output starts."""
    prefix: str | None = None
    """As in `Request`."""
    constraints: tuple[Constraint, ...] = ()
    sample_index: int = 0
    """Index on which the row's random samples depend; 0: its index among all rows."""


def as_request(text: str | Request) -> Request:
    """Returns the request of a text."""
    return text if isinstance(text, Request) else Request(text)


def directed_request(text: str, direction: str | None) -> Request:
    """Returns the request to translate a text in a direction, such as `en-de`; None: the model's only direction."""
    if direction is None:
        return Request(text)
    source, target = Direction.parse(direction)
    return Request(text, target, source)
