"""What is known of a complete output alone: copied words of the source, detokenization, and alignments of words."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from flax import linen as nn

from tformer_jax.config import DecodeConfig
from tformer_jax.config.transforms import Transform
from tformer_jax.data.markup import Segment, leave_out, put_back, unit_spans
from tformer_jax.data.placeholders import mask, restore
from tformer_jax.data.tokenizers import UNKNOWN_MARK, Tokenizers
from tformer_jax.data.tokenizers.normalization import detokenizer
from tformer_jax.data.tokenizers.tokens import copied_words, unknown_per_word
from tformer_jax.data.word_links import Links, word_spans
from tformer_jax.inference.alignment import (
    cross_attention,
    formatted,
    source_ranges,
    text_places,
    word_links,
    written_ranges,
)
from tformer_jax.inference.casing import copy_casing
from tformer_jax.inference.detokenization import output_decoder
from tformer_jax.inference.watch import check

NO_WEIGHTS = np.zeros((0, 0), np.float32)


@dataclasses.dataclass
class Unfinished:
    """A translation that its end changes."""

    decode: DecodeConfig
    source: Sequence[int]
    """Token ids as the model reads them."""
    start: int
    """First input of the decoder."""
    source_text: str
    """The text of `source`, without its markup if `decode.markup` is "align"; empty: only its ids are known."""
    originals: tuple[str, ...] | None = None
    """The placeholders of the source text; None: there are none."""
    segment: Segment | None = None
    """What is put back into the output; None: `decode.markup` is "keep"."""
    language: str = ""
    """Code of the language of the output, as for `copy_casing`."""
    text: str = ""
    """With `UNKNOWN_MARK` for each unknown token that a word is copied for."""
    tokens: list[int] = dataclasses.field(default_factory=list)


def is_withheld(decode: DecodeConfig) -> bool:
    """Returns whether outputs with these settings are reported only when they are complete."""
    return decode.unknown == "copy" or decode.detokenize or decode.markup == "align" or decode.casing != "keep"


def needs_finishing(decode: DecodeConfig) -> bool:
    """Returns whether `Finisher` changes or completes the outputs with these settings."""
    return is_withheld(decode) or decode.alignments


def _is_aligned(output: Unfinished) -> bool:
    """Returns whether the end of an output needs the alignment of its words."""
    return output.decode.alignments or output.segment is not None or output.decode.casing != "keep"


class Finished(NamedTuple):
    """The whole text of an output."""

    text: str
    alignment: Links | None
    """As in `outputs.Output`."""
    recased: int = 0
    """As in `outputs.Output`."""


class Finisher:
    """Finishes the texts of a translation model.

    Args:
        batch_size: maximum number of outputs whose attention is computed at once.
        transforms: as for `source_ranges`.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Any,
        tokenizers: Tokenizers,
        batch_size: int,
        transforms: Sequence[Transform] = (),
    ):
        self._model, self._params, self._tokenizers, self._batch_size = model, params, tokenizers, batch_size
        self._transforms = transforms

    def check(self, decode: DecodeConfig) -> None:
        """Raises `UserError` if the model's outputs cannot be computed or finished as the settings say."""
        cfg = self._model.cfg
        decode.check_lookup(cfg.attentions, continues=cfg.model_class.continues)
        if decode.detokenize:
            self._detokenize  # noqa: B018
        if decode.aligns:
            self._attends  # noqa: B018
            decode.check_alignment(cfg.decoder_layers, cfg.num_heads)

    def __call__(self, outputs: Sequence[Unfinished]) -> list[Finished]:
        """Returns the text of each output, and its alignment."""
        attended = [o for o in outputs if _is_aligned(o) or UNKNOWN_MARK in o.text]
        weights = {id(output): rows for output, rows in zip(attended, self._weights(attended), strict=True)}
        return [self._finished(output, weights.get(id(output), NO_WEIGHTS)) for output in outputs]

    def _weights(self, outputs: Sequence[Unfinished]) -> list[np.ndarray]:
        """Returns the weights of the cross-attention that aligns each output: float32 [T, S] each."""
        rows = [(output.source, [output.start, *output.tokens[:-1]]) for output in outputs]
        return cross_attention(self._model, self._params, rows, [o.decode for o in outputs], self._batch_size)

    def _finished(self, output: Unfinished, weights: np.ndarray) -> Finished:
        def finish(text: str) -> str:
            text = self._filled(output, text, weights) if UNKNOWN_MARK in text else text
            text = self._detokenize(text) if output.decode.detokenize else text
            if output.segment is not None:
                name, known = self._tokenizers.target.special.unknown_name, self._tokenizers.placeholders
                text = name.join(leave_out(part, known)[0] for part in text.split(name))  # <unk> is no tag
            return restore(text, output.originals)

        text, decode = finish(output.text), output.decode
        if not _is_aligned(output):
            return Finished(text, None)
        decoder = output_decoder(self._tokenizers.target, decode.unknown, continues=False)
        ends = [finish(decoder.decode(output.tokens[:count])) for count in range(1, len(output.tokens))]

        def links(spans: Callable[[str], list[tuple[int, int]]]) -> Links:
            source = source_ranges(self._tokenizers, output.source, output.source_text, self._transforms, spans)
            return word_links(weights, source, written_ranges(text, ends, spans(text)))

        written, recased = text, 0
        if decode.casing != "keep":
            titles = decode.casing == "titles"
            written, recased = copy_casing(output.source_text, text, links(unit_spans), titles, output.language)
        if output.segment is not None:
            written = put_back(output.segment, written, links(unit_spans))
        return Finished(written, links(word_spans) if decode.alignments else None, recased)

    @functools.cached_property
    def _detokenize(self) -> Callable[[str], str]:
        target = self._tokenizers.target
        return detokenizer(target.steps, target.language)

    @functools.cached_property
    def _attends(self) -> bool:
        """Whether words are copied or aligned, which needs attention weights."""
        check(self._model)
        return True

    @functools.cached_property
    def _whole_words(self) -> bool:
        """Whether an unknown token stands for a word, as opposed to a character."""
        return unknown_per_word(self._tokenizers.target) == 1

    def _filled(self, output: Unfinished, text: str, weights: np.ndarray) -> str:
        """Returns the text with the word of the source that each unknown token is aligned with.

        Without the text of the source, the name of the token stands for the word.
        """
        source, special = self._tokenizers.source, self._tokenizers.target.special
        whole = formatted(self._transforms, output.source_text)[0] if output.source_text else ""
        masked = mask(self._tokenizers.placeholders, whole).text
        words = copied_words(source, masked, whole_words=self._whole_words) if masked else []
        places = zip(text_places(source, output.source), words, strict=False)
        whole_text = output.source, output.source_text, self._transforms, lambda text: [(0, len(text))]
        (own,) = source_ranges(self._tokenizers, *whole_text)
        eligible = {place: word for place, word in places if word and place in own}
        copied = [
            eligible[max(eligible, key=lambda place: row[place])] if eligible else special.unknown_name
            for token, row in zip(output.tokens, weights, strict=True)
            if token == special.shown_unknown
        ]
        before, *after = text.split(UNKNOWN_MARK)
        return before + "".join(word + part for word, part in zip(copied, after, strict=False))
