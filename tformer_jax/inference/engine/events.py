"""Requests of an engine, and the events of their outputs."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tformer_jax.base.errors import UserError
from tformer_jax.config import DecodeConfig
from tformer_jax.data.placeholders import symbols_of
from tformer_jax.data.tokenizers import Decoder
from tformer_jax.data.word_links import Links
from tformer_jax.inference.beam import WORST
from tformer_jax.inference.detokenization import TextStream, cut
from tformer_jax.inference.engine.rows import NewTokens, RequestRow
from tformer_jax.inference.requests import Constraint
from tformer_jax.special_tokens import PAD


@dataclasses.dataclass(frozen=True)
class Request:
    """A text to translate or to continue."""

    ids: tuple[int, ...]
    """Token ids of the text as the model reads them: with the special tokens around a text."""
    decode: DecodeConfig
    seed: int = 0
    """Random seed."""
    index: int = 0
    """Index of the first sample, folded into the seed, so that equal texts of a file get different samples."""
    num_outputs: int = 1
    """Number of outputs: samples, or the best hypotheses of beam search."""
    streamed: bool = True
    """Report text as it is generated; otherwise, the last event has the complete text, at lower cost."""
    scored: bool = False
    """Report scores; beam search always reports them."""
    tags: tuple[int, ...] = ()
    """Language tags with which its outputs start, before `decode.prefix`."""
    text: str = ""
    """The text, whose words `decode.unknown="copy"` copies, and whose placeholders replace symbols; empty: the names of
    unknown tokens are shown, and symbols stay."""
    constraints: tuple[Constraint, ...] = ()
    """Phrases that outputs of beam search must contain."""


def check_outputs(request: Request, max_rows: int) -> None:
    """Raises `UserError` if an engine with `max_rows` rows cannot give this number of outputs."""
    beams = request.decode.strategy == "beam"
    if request.num_outputs > (request.decode.beams if beams else max_rows):
        limit = f"decode.beams={request.decode.beams}" if beams else f"--max-rows {max_rows}"
        raise UserError(f"{request.num_outputs} outputs are more than {limit}")


class Event(NamedTuple):
    """New text of one output of a request, or its end."""

    request: int
    """Request number that `submit` returned."""
    sample: int
    """Index of the output: 0, ..., num_outputs - 1."""
    text: str
    """Text that follows the texts of earlier events of this output."""
    finish: str | None
    """None while the output continues; `length`: maximum length reached; `stop`: an EOS token, a stop sequence, or an
    output that beam search did not find."""
    score: float | None
    """In the last event: beam score, or the sum of token log-probabilities if `Request.scored`.

    None for the empty outputs that are added if beam search found too few.
    """
    tokens: int
    """Number of tokens generated for this output so far."""
    ids: tuple[int, ...] = ()
    """New tokens, with EOS and the tokens of a stop sequence."""
    alignment: Links | None = None
    """In the last event: the links between words of the source and of the output; None: not requested."""
    recased: int = 0
    """In the last event: as in `outputs.Output`."""


def token_event(running: RequestRow, new: NewTokens) -> Event:
    """Returns the event of the new tokens of a row; text after a stop sequence is dropped."""
    text, stream, before = "", running.stream, running.generated
    for token in new.tokens:
        text += stream.feed(token)
        running.generated += 1
        if stream.done:
            break
    finish = None
    if stream.done or new.done:
        text += stream.close()
        finish = "stop" if stream.done else "length"
    count = running.generated - before
    score = new.scores[count - 1] if finish and running.scored else None
    return Event(running.request, running.sample, text, finish, score, running.generated, tuple(new.tokens[:count]))


def beam_events(running: RequestRow, decoder: Decoder, tokens: np.ndarray, scores: np.ndarray) -> Iterator[Event]:
    """Yields the events of a finished beam search, given tokens, int [k, length], and scores, float [k].

    If outputs get the placeholders of their source, hypotheses with exactly these placeholders come first.
    """
    hypotheses = [(row[row != PAD].tolist(), score) for row, score in zip(tokens, scores, strict=True)]
    source, originals = running.masked
    if originals is not None:
        symbols = symbols_of(source)
        hypotheses.sort(key=lambda pair: (pair[1] <= WORST, symbols_of(decoder.decode(pair[0])) != symbols))
    for sample, (ids, score) in enumerate(hypotheses[: running.num_outputs]):
        decoded = decoder.decode(ids)
        text = cut(decoded, running.decode.stop)
        beam_score = float(score) if score > WORST else None
        ended = set(ids) & set(decoder.special.eos) or text != decoded
        finish = "stop" if ended or beam_score is None else "length"
        if text != decoded:
            ids = _cut_after_stop(TextStream(decoder, running.decode.stop), ids)
        yield Event(running.request, sample, text, finish, beam_score, len(ids), tuple(ids))


def _cut_after_stop(stream: TextStream, ids: list[int]) -> list[int]:
    """Returns the tokens until a stop sequence is complete."""
    for count, token in enumerate(ids, start=1):
        stream.feed(token)
        if stream.done:
            return ids[:count]
    return ids
