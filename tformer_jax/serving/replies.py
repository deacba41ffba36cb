"""Responses, complete or in chunks."""

import base64
import dataclasses
import functools
import itertools
import math
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from starlette.responses import HTMLResponse, JSONResponse, Response

from tformer_jax.data.word_links import Links, format_links
from tformer_jax.inference.detokenization import has_text, output_decoder
from tformer_jax.inference.engine import Event, Request
from tformer_jax.inference.languages import TagIds
from tformer_jax.inference.outputs import Output, Parts
from tformer_jax.inference.phrases import are_met
from tformer_jax.inference.scores import Row, Scored, make_pair_row, make_text_row
from tformer_jax.serving.bodies import Completion, Generated
from tformer_jax.serving.logprobs import logprobs
from tformer_jax.serving.model import ServedModel
from tformer_jax.serving.text_bodies import Embedding
from tformer_jax.serving.worker import Empty
from tformer_jax.special_tokens import IGNORED

ATTENTION_HEADERS = {"Content-Security-Policy": "sandbox allow-scripts", "Cache-Control": "no-store"}


@dataclasses.dataclass
class AccumulatedOutput:
    """One output, accumulated from its events."""

    text: str = ""
    finish: str | None = None
    score: float | None = None
    tokens: int = 0
    ids: list[int] = dataclasses.field(default_factory=list)
    alignment: Links | None = None

    def add(self, event: Event) -> None:
        """Adds an event of this output."""
        self.text += event.text
        self.ids += event.ids
        self.finish, self.score, self.tokens = event.finish, score_or_none(event.score), event.tokens
        self.alignment = event.alignment

    def event(self, request: int, sample: int) -> Event:
        """Returns this output, which is complete, as one event."""
        return Event(request, sample, self.text, self.finish, self.score, self.tokens, tuple(self.ids), self.alignment)


Outputs = Sequence[Sequence[AccumulatedOutput]]
"""Outputs by request, then by sample."""


class Reply:
    """Builds the response of one route."""

    _scores: "TokenScores | None" = None
    """Computes the log-probabilities of tokens; None: they are not requested."""

    def work(self, outputs: Outputs) -> Callable[[], Any] | None:
        """Returns the computation after the last token, by default of log-probabilities; None if there is none."""
        return None if self._scores is None else self._scores.work(outputs)

    def response(self, outputs: Outputs, result: Any) -> Response:
        """Returns the HTTP response without a stream; `result` is the result of `work`."""
        return JSONResponse(self.complete(outputs, result))

    def complete(self, outputs: Outputs, result: Any) -> dict[str, Any]:
        """Returns the JSON of the response without a stream; arguments are as for `response`."""
        raise NotImplementedError

    def chunk(self, event: Event) -> dict[str, Any] | None:
        """Returns the chunk for an event, whose `request` is an index into this reply; None if there is nothing new."""
        raise NotImplementedError

    def last(self, outputs: Outputs, result: Any) -> Iterator[dict[str, Any]]:
        """Yields the chunks after the last event; arguments are as for `complete`."""
        yield from ()


Named = list[list[dict[str, Any]]]
"""Log-probabilities of the tokens of each output in OpenAI's format, by request, then by sample."""


class TokenScores:
    """Log-probabilities of the tokens of outputs, in one pass after the last token.

    Args:
        served: the model.
        rows: token ids of the sources or prompts.
        top: number of most probable tokens to show at each place.
        tags: language tags of each source and its outputs; tags of outputs have no log-probabilities.
        unknown: as `decode.unknown`; None: the run's.
        echo: whether the tokens of the prompts are scored, too.
    """

    def __init__(
        self,
        served: ServedModel,
        rows: Sequence[tuple[int, ...]],
        top: int,
        tags: Sequence[TagIds],
        unknown: str | None = None,
        *,
        echo: bool = False,
    ) -> None:
        self.served, self.rows, self.top, self.echo = served, rows, top, echo
        special = served.tokenizers.target.special
        starts = [special.start_target(of_output) for _, of_output in tags]
        first = len(special.forced)
        self._starts = [(start, range(first, first + len(rest))) for start, rest in starts]
        """The first input of the decoder of each row, and the places of tags in its outputs."""
        self._shown = "omit" if (unknown or served.decode.unknown) == "omit" else "show"

    def work(self, outputs: Outputs) -> Callable[[], Named]:
        """Returns the function that scores all outputs."""
        sources = zip(self.rows, self._starts, outputs, strict=True)
        rows = [self._row(ids, *start, output) for ids, start, row in sources for output in row]
        return lambda: self._named(outputs, self.served.score(rows, self.top))

    def _named(self, outputs: Outputs, scored: Sequence[Scored]) -> Named:
        scores = iter(scored)
        tokenizers, continues = self.served.tokenizers, self.served.model_class.continues
        decoder = output_decoder(self.served.tokenizer, "show", continues=False)
        named = []
        for ids, (_, tags), row in zip(self.rows, self._starts, outputs, strict=True):
            after = continues and has_text(tokenizers.target, ids)
            written = output_decoder(tokenizers.target, self._shown, continues=after)
            prompt = [(decoder, ids)] if self.echo else []
            shown = [[i for place, i in enumerate(output.ids) if place not in tags] for output in row]
            named.append([logprobs([*prompt, (written, own)], next(scores)) for own in shown])
        return named

    def _row(self, ids: tuple[int, ...], start: int, tags: range, output: AccumulatedOutput) -> Row:
        if self.served.translates:
            row = make_pair_row([*ids] or self.served.add_special_tokens([]), output.ids, start)
            labels = [IGNORED if place in tags else label for place, label in enumerate(row.labels)]
            return row._replace(labels=labels)
        return make_text_row([*ids, *output.ids], given=1 if self.echo else len(ids))


class TranslationReply(Reply):
    """Reply of `POST /translate`: the translations of each text, best first.

    Args:
        scores: computes the log-probabilities of tokens; None: they are not requested.
        requests: for outputs with constraints, which are then known to be met or not.
    """

    def __init__(self, scores: TokenScores | None, requests: Sequence[Request | Empty] = ()) -> None:
        self._scores = scores
        self._requests = requests

    def _met(self, index: int, text: str) -> dict[str, bool]:
        """Returns "constraints_met" of an output of a request with constraints."""
        request = self._requests[index] if self._requests else None
        if request is None or not request.constraints:
            return {}
        return {"constraints_met": are_met(request.constraints, text, request.decode)}

    def complete(self, outputs: Outputs, result: Any) -> dict[str, Any]:
        """Returns `{"translations": [[{"text", "score", "finish_reason"}, ...], ...]}`.

        With constraints, translations have "constraints_met"; if requested, they have "alignment" and "logprobs".
        """
        rows: list[list[dict[str, Any]]] = [
            [
                {"text": output.text, "score": output.score, "finish_reason": output.finish, **aligned(output)}
                | self._met(index, output.text)
                for output in row
            ]
            for index, row in enumerate(outputs)
        ]
        for row, named in zip(rows, result or (), strict=False):
            for translation, scores in zip(row, named, strict=True):
                translation["logprobs"] = scores
        return {"translations": rows}

    def chunk(self, event: Event) -> dict[str, Any] | None:
        """Returns `{"index", "rank", "text", "finish_reason", "score"}`, with the new text of one translation."""
        if self._scores is not None:  # the end comes with the log-probabilities
            event = event._replace(finish=None, score=None)
        if not event.text and event.finish is None:
            return None
        chunk = translation_chunk(event.request, event.sample, event.text, event.finish, score_or_none(event.score))
        if not event.finish:
            return chunk
        return chunk | aligned(event) | self._met(event.request, event.text)  # beam search writes whole outputs

    def last(self, outputs: Outputs, result: Any) -> Iterator[dict[str, Any]]:
        """Yields the end of each translation with its "logprobs", if they are requested."""
        for index, named in enumerate(result or ()):
            for rank, (output, scores) in enumerate(zip(outputs[index], named, strict=True)):
                end = translation_chunk(index, rank, "", output.finish, output.score)
                yield {**end, **aligned(output), **self._met(index, output.text), "logprobs": scores}


class SentencesReply(TranslationReply):
    """Reply of `POST /translate` for texts of several sentences; a stream has each translation as a whole.

    Args:
        gaps: white space around the sentences of each text.
    """

    def __init__(self, gaps: Sequence[tuple[str, ...]]) -> None:
        super().__init__(None)
        self._gaps = gaps

    def complete(self, outputs: Outputs, result: Any) -> dict[str, Any]:
        return super().complete(list(self._joined(outputs)), result)

    def chunk(self, event: Event) -> None:
        """Returns None: translations are complete only when all of their sentences are."""

    def last(self, outputs: Outputs, result: Any) -> Iterator[dict[str, Any]]:
        """Yields the translations."""
        for index, row in enumerate(self._joined(outputs)):
            for rank, output in enumerate(row):
                yield translation_chunk(index, rank, output.text, output.finish, output.score)

    def _joined(self, outputs: Outputs) -> Iterator[list[AccumulatedOutput]]:
        """Yields the outputs of each text."""
        rows = ([Output(o.text, o.score, None if o.finish == "stop" else o.finish) for o in row] for row in outputs)
        for gaps in self._gaps:
            joined = Parts((), gaps).join([next(rows) for _ in gaps[1:]])
            yield [AccumulatedOutput(output.text, output.finish_reason, output.score) for output in joined]


class CompletionReply(Reply):
    """Reply of `POST /v1/completions`: OpenAI's text completion object, or its chunks.

    Args:
        served: the model.
        body: the request body.
        rows: token ids of the prompts.
        tags: as for `TokenScores`.
    """

    kind, piece_kind, prefix = "text_completion", "text_completion", "cmpl"
    """`object` of the reply and of its chunks, and what their `id` begins with."""

    def __init__(
        self, served: ServedModel, body: Generated, rows: Sequence[tuple[int, ...]], tags: Sequence[TagIds]
    ) -> None:
        self.body, self.rows = body, rows
        echo, top = isinstance(body, Completion) and body.echo, body.shown_logprobs
        scored = echo and top is not None  # offsets of tokens are places in the decoded text
        self._prompts = [
            (text if isinstance(text, str) and not scored else served.decode_all(ids)) if echo else ""
            for text, ids in zip(body.inputs(), rows, strict=True)
        ]
        self._scores = None if top is None else TokenScores(served, rows, top, tags, echo=echo)
        self._started: set[int] = set()
        """Choices of a stream whose first chunk has been sent."""
        common = {"created": int(time.time()), "model": served.name}
        self._frame = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "object": self.kind, **common}

    def complete(self, outputs: Outputs, result: Any) -> dict[str, Any]:
        """Returns the completion, with its usage."""
        texts = [self._prompts[number] + output.text for number, row in enumerate(outputs) for output in row]
        choices = self._choices(self.whole_choice, texts, outputs, result)
        return {**self._frame, "choices": choices, "usage": self._usage(outputs)}

    def chunk(self, event: Event) -> dict[str, Any] | None:
        """Returns a chunk; with `echo`, the first chunk of each choice starts with the prompt."""
        index = event.request * self.body.n + event.sample
        text = event.text if index in self._started else self._prompts[event.request] + event.text
        finish = event.finish if self._scores is None else None
        return self._chunk([self.piece_of_choice(index, text, finish)]) if text or finish else None

    def last(self, outputs: Outputs, result: Any) -> Iterator[dict[str, Any]]:
        """Yields a chunk with the log-probabilities of each choice, and the usage, as far as they are requested."""
        if self._scores is not None:
            texts = [""] * sum(map(len, outputs))
            choices = self._choices(self.piece_of_choice, texts, outputs, result)
            yield from (self._chunk([choice]) for choice in choices)
        if self.body.stream_options.include_usage:
            yield {**self._chunk([]), "usage": self._usage(outputs)}

    def whole_choice(self, index: int, text: str, finish: str | None, scores: Any = None) -> dict[str, Any]:
        """Returns an output in OpenAI's format of a choice."""
        return {"index": index, "text": text, "logprobs": scores, "finish_reason": finish}

    def piece_of_choice(self, index: int, text: str, finish: str | None, scores: Any = None) -> dict[str, Any]:
        """Returns a piece of an output in OpenAI's format of a choice of a chunk."""
        self._started.add(index)
        return self.whole_choice(index, text, finish, scores)

    def _choices(
        self, choice: Callable[..., dict[str, Any]], texts: Sequence[str], outputs: Outputs, result: Any
    ) -> list[dict[str, Any]]:
        flat = [output for row in outputs for output in row]
        named: Iterable[Any] = itertools.repeat(None) if self._scores is None else itertools.chain(*result)
        return [
            choice(index, text, output.finish, scores)
            for index, (text, output, scores) in enumerate(zip(texts, flat, named, strict=False))
        ]

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"usage": None} if self.body.stream_options.include_usage else {}
        return {**self._frame, "object": self.piece_kind, "choices": choices, **usage}

    def _usage(self, outputs: Outputs) -> dict[str, int]:
        prompt, new = sum(map(len, self.rows)), sum(output.tokens for row in outputs for output in row)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


class ComputedReply(Reply):
    """Reply of a route that generates nothing.

    Args:
        compute: what the model computes.
        respond: the response, or its JSON, given the result of `compute`.
    """

    def __init__(self, compute: Callable[[], Any], respond: Callable[[Any], Response | dict[str, Any]]) -> None:
        self._compute, self._respond = compute, respond

    def work(self, outputs: Outputs) -> Callable[[], Any] | None:
        return self._compute

    def response(self, outputs: Outputs, result: Any) -> Response:
        response = self._respond(result)
        return response if isinstance(response, Response) else JSONResponse(response)


def classification(served: ServedModel, rows: Sequence[tuple[int, ...]]) -> ComputedReply:
    """Returns the reply of `POST /classify`: the probabilities of all labels of each text, as vLLM replies.

    Args:
        rows: token ids of the texts.
    """

    def respond(probabilities: Sequence[np.ndarray]) -> dict[str, Any]:
        labels = served.labels
        data = [
            {"index": index, "label": labels[row.argmax()], "probs": row.tolist(), "num_classes": len(labels)}
            for index, row in enumerate(probabilities)
        ]
        frame = {"id": f"classify-{uuid.uuid4().hex}", "object": "list", "created": int(time.time())}
        return {**frame, "model": served.name, "data": data, "usage": usage(rows)}

    return ComputedReply(functools.partial(served.classify, rows), respond)


def embedding_list(served: ServedModel, body: Embedding, rows: Sequence[tuple[int, ...]]) -> ComputedReply:
    """Returns the reply of `POST /v1/embeddings`: OpenAI's list of embeddings; `rows` are as for `classification`."""

    def encoded(embedding: np.ndarray) -> list[float] | str:
        if body.encoding_format == "base64":
            return base64.b64encode(embedding.astype("<f4").tobytes()).decode()
        return embedding.tolist()

    def respond(embeddings: Sequence[np.ndarray]) -> dict[str, Any]:
        data = [
            {"object": "embedding", "index": index, "embedding": encoded(embedding)}
            for index, embedding in enumerate(embeddings)
        ]
        return {"object": "list", "data": data, "model": served.name, "usage": usage(rows)}

    return ComputedReply(functools.partial(served.embed, rows), respond)


def attention_page(render: Callable[[], str]) -> ComputedReply:
    """Returns the reply of `POST /attention`, the page that `render` computes."""
    return ComputedReply(render, lambda page: HTMLResponse(page, headers=ATTENTION_HEADERS))


def translation_chunk(index: int, rank: int, text: str, finish: str | None, score: float | None) -> dict[str, Any]:
    """Returns a chunk of a translation."""
    return {"index": index, "rank": rank, "text": text, "finish_reason": finish, "score": score}


def aligned(output: AccumulatedOutput | Event) -> dict[str, str]:
    """Returns the field with the links between words in Pharaoh's format; {} if they are not requested."""
    return {} if output.alignment is None else {"alignment": format_links(output.alignment)}


def usage(rows: Sequence[Sequence[int]]) -> dict[str, int]:
    """Returns the usage of a request that generates nothing."""
    count = sum(map(len, rows))
    return {"prompt_tokens": count, "total_tokens": count}


def empty_outputs(requests: Sequence[Request | Empty]) -> list[list[AccumulatedOutput]]:
    """Returns the empty outputs of each request."""
    return [[AccumulatedOutput() for _ in range(request.num_outputs)] for request in requests]


def score_or_none(score: float | None) -> float | None:
    """Returns the score, or None if JSON cannot represent it."""
    return score if score is not None and math.isfinite(score) else None
