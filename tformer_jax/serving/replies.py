"""What a client gets back: whole, or piece by piece."""

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
    """One output so far."""

    text: str = ""
    finish: str | None = None
    score: float | None = None
    tokens: int = 0

    def add(self, event: Event) -> None:
        """Takes in what an event says is new."""
        self.text += event.text
        self.finish, self.score, self.tokens = event.finish, finite(event.score), event.tokens


Outputs = Sequence[Sequence[Output]]
"""By request, then by sample."""


class Reply(Protocol):
    """The JSON of one route."""

    def whole(self, outputs: Outputs) -> dict[str, Any]:
        """Everything at once."""
        ...

    def part(self, event: Event) -> dict[str, Any] | None:
        """What an event adds (its `request` counts from 0 within this reply); None: nothing."""
        ...


class TranslationReply:
    """`POST /translate`: for each text its translations, best first."""

    def whole(self, outputs: Outputs) -> dict[str, Any]:
        """`{"translations": [[{"text", "score"}, ...], ...]}`."""
        return {"translations": [[{"text": one.text, "score": one.score} for one in row] for row in outputs]}

    def part(self, event: Event) -> dict[str, Any] | None:
        """`{"index", "rank", "text", "finish_reason", "score"}`: new text of a text's translation of that rank."""
        if not event.text and event.finish is None:
            return None
        found = {"index": event.request, "rank": event.sample, "text": event.text}
        return {**found, "finish_reason": event.finish, "score": finite(event.score)}


class CompletionReply:
    """`POST /v1/completions`: OpenAI's text completion object and its chunks.

    Args:
        model: its name.
        body: what was asked for.
        count: the number of tokens of a prompt.
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

    def whole(self, outputs: Outputs) -> dict[str, Any]:
        """The completion, with its usage."""
        choices = [
            choice(number * self.body.n + sample, self._echo(number) + output.text, output.finish)
            for number, row in enumerate(outputs)
            for sample, output in enumerate(row)
        ]
        prompt = sum(map(self.count, self.body.prompt))
        new = sum(output.tokens for row in outputs for output in row)
        usage = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        return {**self._frame, "choices": choices, "usage": usage}

    def part(self, event: Event) -> dict[str, Any] | None:
        """A chunk; the first one of each choice begins with the prompt where it is echoed."""
        index = event.request * self.body.n + event.sample
        text = event.text if index in self._echoed else self._echo(event.request) + event.text
        self._echoed.add(index)
        if not text and event.finish is None:
            return None
        return {**self._frame, "choices": [choice(index, text, event.finish)]}

    def _echo(self, number: int) -> str:
        return self.body.prompt[number] if self.body.echo else ""


def choice(index: int, text: str, finish: str | None) -> dict[str, Any]:
    """One of OpenAI's choices."""
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}


def empty_outputs(requests: Sequence[Request]) -> list[list[Output]]:
    """A place for each output."""
    return [[Output() for _ in range(request.samples)] for request in requests]


def finite(score: float | None) -> float | None:
    """The score, where JSON has a number for it."""
    return score if score is not None and math.isfinite(score) else None
