"""Response bodies, complete or in chunks."""

import base64
import dataclasses
import functools
import math
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tformer_jax.inference.engine import Event, Request
from tformer_jax.inference.score import Row, pair_row, text_row
from tformer_jax.inference.stopping import output_decoder
from tformer_jax.serving.bodies import Completion, Embedding
from tformer_jax.serving.logprobs import logprobs
from tformer_jax.serving.served import Served
from tformer_jax.serving.worker import Empty


@dataclasses.dataclass
class Output:
    """One output, accumulated from its events."""

    text: str = ""
    finish: str | None = None
    score: float | None = None
    tokens: int = 0
    ids: list[int] = dataclasses.field(default_factory=list)

    def add(self, event: Event) -> None:
        """Adds an event of this output."""
        self.text += event.text
        self.ids += event.ids
        self.finish, self.score, self.tokens = event.finish, finite(event.score), event.tokens


Outputs = Sequence[Sequence[Output]]
"""Outputs by request, then by sample."""


class Reply:
    """Builds the JSON of one route."""

    @property
    def whole(self) -> bool:
        """Whether a stream begins only after the last token."""
        return False

    def work(self, outputs: Outputs) -> Callable[[], Any] | None:
        """Returns what the model computes after the last token; None for nothing."""
        return None

    def complete(self, outputs: Outputs, found: Any) -> dict[str, Any]:
        """Returns the complete response; `found` is the result of `work`."""
        raise NotImplementedError

    def chunk(self, event: Event) -> dict[str, Any] | None:
        """Returns the chunk for an event, whose `request` is an index into this reply; None if there is nothing new."""
        raise NotImplementedError

    def chunks(self, complete: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the chunks of a complete response, if `whole`."""
        raise NotImplementedError

    def last(self) -> dict[str, Any] | None:
        """Returns the chunk after those of all events; None for none."""
        return None


class TranslationReply(Reply):
    """Reply of `POST /translate`: the translations of each text, best first."""

    def complete(self, outputs: Outputs, found: Any) -> dict[str, Any]:
        """Returns `{"translations": [[{"text", "score"}, ...], ...]}`."""
        return {"translations": [[{"text": one.text, "score": one.score} for one in row] for row in outputs]}

    def chunk(self, event: Event) -> dict[str, Any] | None:
        """Returns `{"index", "rank", "text", "finish_reason", "score"}`, with the new text of one translation."""
        if not event.text and event.finish is None:
            return None
        found = {"index": event.request, "rank": event.sample, "text": event.text}
        return {**found, "finish_reason": event.finish, "score": finite(event.score)}


class CompletionReply(Reply):
    """Reply of `POST /v1/completions`: OpenAI's text completion object, or its chunks.

    Args:
        served: the model.
        body: the request body.
        rows: token ids of the prompts.
    """

    def __init__(self, served: Served, body: Completion, rows: Sequence[tuple[int, ...]]) -> None:
        self.served, self.body, self.rows = served, body, rows
        self._prompts = [
            text if isinstance(text, str) else served.tokenizer.decode(text) for text in body.texts("prompt")
        ]
        self._decoder = output_decoder(served.tokenizers.target, served.family)
        self._tokens: dict[int, int] = {}
        """Number of tokens of each choice of a stream so far."""
        self._frame = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": served.name,
        }

    @property
    def whole(self) -> bool:
        """Whether log-probabilities are requested, which are computed after the last token."""
        return self.body.logprobs is not None

    def work(self, outputs: Outputs) -> Callable[[], Any] | None:
        """Returns the scoring of all choices, if log-probabilities are requested."""
        if self.body.logprobs is None:
            return None
        rows = [self._scored_row(ids, output) for ids, row in zip(self.rows, outputs, strict=True) for output in row]
        return functools.partial(self.served.score, rows, self.body.logprobs)

    def complete(self, outputs: Outputs, found: Any) -> dict[str, Any]:
        """Returns the completion, with its usage."""
        n = self.body.n
        flat = [output for row in outputs for output in row]
        choices = [
            choice(index, self._echo(index // n) + output.text, output.finish) for index, output in enumerate(flat)
        ]
        for index, scored in enumerate(found or ()):
            prompt = [(self.served.tokenizer, self.rows[index // n])] if self.body.echo else []
            choices[index]["logprobs"] = logprobs([*prompt, (self._decoder, flat[index].ids)], scored)
        return {**self._frame, "choices": choices, "usage": self._usage(sum(output.tokens for output in flat))}

    def chunk(self, event: Event) -> dict[str, Any] | None:
        """Returns a chunk; with `echo`, the first chunk of each choice starts with the prompt."""
        index = event.request * self.body.n + event.sample
        text = event.text if index in self._tokens else self._echo(event.request) + event.text
        self._tokens[index] = event.tokens
        if not text and event.finish is None:
            return None
        return self._chunk([choice(index, text, event.finish)])

    def chunks(self, complete: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields one chunk per choice, and the usage if it is requested."""
        yield from (self._chunk([one]) for one in complete["choices"])
        if self.body.stream_options.include_usage:
            yield {**self._frame, "choices": [], "usage": complete["usage"]}

    def last(self) -> dict[str, Any] | None:
        """Returns the usage, if it is requested."""
        if not self.body.stream_options.include_usage:
            return None
        return {**self._frame, "choices": [], "usage": self._usage(sum(self._tokens.values()))}

    def _scored_row(self, ids: tuple[int, ...], output: Output) -> Row:
        if self.served.translates:
            source, start = [*ids] or self.served.framed([]), self.served.tokenizers.target.special.start
            return pair_row(source, output.ids, start)
        return text_row([*ids, *output.ids], given=1 if self.body.echo else len(ids))

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            **self._frame,
            "choices": choices,
            **({"usage": None} if self.body.stream_options.include_usage else {}),
        }

    def _echo(self, number: int) -> str:
        return self._prompts[number] if self.body.echo else ""

    def _usage(self, new: int) -> dict[str, int]:
        prompt = sum(map(len, self.rows))
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


class EmbeddingReply(Reply):
    """Reply of `POST /v1/embeddings`: OpenAI's list of embeddings.

    Args:
        served: the model.
        body: the request body.
        rows: token ids of the texts.
    """

    def __init__(self, served: Served, body: Embedding, rows: Sequence[tuple[int, ...]]) -> None:
        self.served, self.body, self.rows = served, body, rows

    def work(self, outputs: Outputs) -> Callable[[], Any] | None:
        """Returns the computation of the embeddings."""
        return functools.partial(self.served.embed, self.rows)

    def complete(self, outputs: Outputs, found: Any) -> dict[str, Any]:
        """Returns the embeddings, in the order of the texts, with the usage."""
        data = [
            {"object": "embedding", "index": index, "embedding": self._encoded(embedding)}
            for index, embedding in enumerate(found)
        ]
        count = sum(map(len, self.rows))
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "data": data, "model": self.served.name, "usage": usage}

    def _encoded(self, embedding: np.ndarray) -> list[float] | str:
        if self.body.encoding_format == "base64":
            return base64.b64encode(embedding.astype("<f4").tobytes()).decode()
        return embedding.tolist()


def choice(index: int, text: str, finish: str | None) -> dict[str, Any]:
    """Returns one of OpenAI's choices."""
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}


def empty_outputs(requests: Sequence[Request | Empty]) -> list[list[Output]]:
    """Returns an empty output for each sample of each request."""
    return [[Output() for _ in range(request.samples)] for request in requests]


def finite(score: float | None) -> float | None:
    """Returns the score, or None if JSON cannot represent it."""
    return score if score is not None and math.isfinite(score) else None
