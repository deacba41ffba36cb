"""Response bodies, complete or in chunks."""

import dataclasses
import math
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tformer_jax.inference.engine import Event, Request
from tformer_jax.serving.bodies import Completion


@dataclasses.dataclass
class Output:
    """One output, accumulated from its events."""

    text: str = ""
    finish: str | None = None
    score: float | None = None
    tokens: int = 0

    def add(self, event: Event) -> None:
        """Adds an event of this output."""
        self.text += event.text
        self.finish, self.score, self.tokens = event.finish, finite(event.score), event.tokens


Outputs = Sequence[Sequence[Output]]
"""Outputs by request, then by sample."""


class Reply(Protocol):
    """Builds the JSON of one route."""

    def complete(self, outputs: Outputs) -> dict[str, Any]:
        """Returns the complete response."""
        ...

    def chunk(self, event: Event) -> dict[str, Any] | None:
        """Returns the chunk for an event, whose `request` is an index into this reply; None if there is nothing new."""
        ...


class TranslationReply:
    """Reply of `POST /translate`: the translations of each text, best first."""

    def complete(self, outputs: Outputs) -> dict[str, Any]:
        """Returns `{"translations": [[{"text", "score"}, ...], ...]}`."""
        return {"translations": [[{"text": one.text, "score": one.score} for one in row] for row in outputs]}

    def chunk(self, event: Event) -> dict[str, Any] | None:
        """Returns `{"index", "rank", "text", "finish_reason", "score"}`, with the new text of one translation."""
        if not event.text and event.finish is None:
            return None
        found = {"index": event.request, "rank": event.sample, "text": event.text}
        return {**found, "finish_reason": event.finish, "score": finite(event.score)}


class CompletionReply:
    """Reply of `POST /v1/completions`: OpenAI's text completion object, or its chunks.

    Args:
        model: name of the model.
        body: the request body.
        count: returns the number of tokens of a prompt.
    """

    def __init__(self, model: str, body: Completion, count: Callable[[str], int]) -> None:
        self.body, self.count = body, count
        self._echoed: set[int] = set()
        self._frame = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def complete(self, outputs: Outputs) -> dict[str, Any]:
        """Returns the completion, with its usage."""
        choices = [
            choice(number * self.body.n + sample, self._echo(number) + output.text, output.finish)
            for number, row in enumerate(outputs)
            for sample, output in enumerate(row)
        ]
        prompt = sum(map(self.count, self.body.prompt))
        new = sum(output.tokens for row in outputs for output in row)
        usage = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        return {**self._frame, "choices": choices, "usage": usage}

    def chunk(self, event: Event) -> dict[str, Any] | None:
        """Returns a chunk; with `echo`, the first chunk of each choice starts with the prompt."""
        index = event.request * self.body.n + event.sample
        text = event.text if index in self._echoed else self._echo(event.request) + event.text
        self._echoed.add(index)
        if not text and event.finish is None:
            return None
        return {**self._frame, "choices": [choice(index, text, event.finish)]}

    def _echo(self, number: int) -> str:
        return self.body.prompt[number] if self.body.echo else ""


def choice(index: int, text: str, finish: str | None) -> dict[str, Any]:
    """Returns one of OpenAI's choices."""
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}


def empty_outputs(requests: Sequence[Request]) -> list[list[Output]]:
    """Returns an empty output for each sample of each request."""
    return [[Output() for _ in range(request.samples)] for request in requests]


def finite(score: float | None) -> float | None:
    """Returns the score, or None if JSON cannot represent it."""
    return score if score is not None and math.isfinite(score) else None
