"""What changes the text of a complete output: copied words of the source, and detokenization."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from tformer_jax.config import DecodeConfig
from tformer_jax.data.placeholders import restore
from tformer_jax.data.tokenizers import UNKNOWN_MARK, Tokenizers
from tformer_jax.data.tokenizers.language_tags import languages_of
from tformer_jax.data.tokenizers.normalization import detokenizer
from tformer_jax.data.tokenizers.tokens import copied_words, unknown_per_word
from tformer_jax.inference.batching import compute_rows
from tformer_jax.inference.watch import check, watch
from tformer_jax.models import registry
from tformer_jax.nn.sharding import replicate


@dataclasses.dataclass
class Unfinished:
    """A translation whose text is reported at its end."""

    decode: DecodeConfig
    source: Sequence[int]
    """Token ids as the model reads them."""
    start: int
    """First input of the decoder."""
    source_text: str
    """The text of `source`, with symbols for placeholders; empty: only its ids are known."""
    originals: tuple[str, ...] | None = None
    """The placeholders of the source text; None: there are none."""
    text: str = ""
    """With `UNKNOWN_MARK` for each unknown token that a word is copied for."""
    tokens: list[int] = dataclasses.field(default_factory=list)


def is_withheld(decode: DecodeConfig) -> bool:
    """Returns whether outputs with these settings are reported only when they are complete."""
    return decode.unknown == "copy" or decode.detokenize


class Finisher:
    """Finishes the texts of a translation model.

    Args:
        batch_size: maximum number of outputs whose attention is computed at once.
    """

    def __init__(self, model: nn.Module, params: Any, tokenizers: Tokenizers, batch_size: int):
        self._model, self._params, self._tokenizers, self._batch_size = model, params, tokenizers, batch_size

    def check(self, decode: DecodeConfig) -> None:
        """Raises `UserError` if the model's outputs cannot be finished as the settings say."""
        if decode.detokenize:
            self._detokenize  # noqa: B018
        if decode.unknown == "copy":
            self._copies  # noqa: B018

    def __call__(self, outputs: Sequence[Unfinished]) -> list[str]:
        """Returns the text of each output."""
        texts = self._with_copied_words(outputs)
        return [
            restore(self._detokenize(text) if output.decode.detokenize else text, output.originals)
            for text, output in zip(texts, outputs, strict=True)
        ]

    @functools.cached_property
    def _detokenize(self) -> Callable[[str], str]:
        target = self._tokenizers.target
        return detokenizer(target.steps, target.language)

    @functools.cached_property
    def _copies(self) -> bool:
        """Whether words are copied, which needs attention weights."""
        check(self._model)
        return True

    @functools.cached_property
    def _whole_words(self) -> bool:
        """Whether an unknown token stands for a word, as opposed to a character."""
        return unknown_per_word(self._tokenizers.target) == 1

    def _with_copied_words(self, outputs: Sequence[Unfinished]) -> list[str]:
        """Returns the texts with the word of the source that each unknown token attends to most.

        Weights are means over the heads of the last layer's cross-attention, where the token is predicted. Without
        the text of the source, the name of the token stands for the word.
        """
        marked = [output for output in outputs if UNKNOWN_MARK in output.text]
        weights = cross_attention(self._model, self._params, *self._rows(marked), self._batch_size) if marked else []
        filled = iter([self._filled(*pair) for pair in zip(marked, weights, strict=True)])
        return [next(filled) if UNKNOWN_MARK in output.text else output.text for output in outputs]

    def _rows(self, outputs: Sequence[Unfinished]) -> tuple[list[Sequence[int]], list[Sequence[int]]]:
        return [output.source for output in outputs], [[output.start, *output.tokens[:-1]] for output in outputs]

    def _word_places(self, ids: Sequence[int]) -> range:
        """Returns the places of the tokens of a source between its language tags and special tokens."""
        source = self._tokenizers.source
        special, tags = source.special, {*languages_of(source).values()}
        places = range(len(special.before), len(ids))
        while places and ids[places[0]] in tags:
            places = places[1:]
        while places and ids[places[-1]] in tags:
            places = places[:-1]
        return places[: max(len(places) - len(special.after_source), 0)]

    def _filled(self, output: Unfinished, weights: np.ndarray) -> str:
        source, special = self._tokenizers.source, self._tokenizers.target.special
        words = copied_words(source, output.source_text, whole_words=self._whole_words) if output.source_text else []
        eligible = {place: word for place, word in zip(self._word_places(output.source), words, strict=False) if word}
        copied = [
            eligible[max(eligible, key=lambda place: row[place])] if eligible else special.unknown_name
            for token, row in zip(output.tokens, weights, strict=True)
            if token == special.shown_unknown
        ]
        before, *after = output.text.split(UNKNOWN_MARK)
        return before + "".join(word + part for word, part in zip(copied, after, strict=False))


def cross_attention(
    model: nn.Module, params: Any, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], batch_size: int
) -> list[np.ndarray]:
    """Returns the mean weights, over heads, of cross-attention in the last layer of a `Seq2Seq` model.

    Args:
        sources: token ids of each source.
        targets: inputs of the decoder.

    Returns:
        float32 [T, S] for each pair, without padding.
    """
    rows = [{"source": source, "target_in": target} for source, target in zip(sources, targets, strict=True)]
    weights = compute_rows(_mean_weights, model, params, rows, batch_size)
    return [x[: len(row["target_in"]), : len(row["source"])] for x, row in zip(weights, rows, strict=True)]


@functools.partial(jax.jit, static_argnames="model")
def _mean_weights(model: nn.Module, params: Any, batch: registry.Batch) -> jax.Array:
    """Returns the mean weights of the last layer, float32 [B, T, S]; XLA omits what `watch` computes besides."""
    return replicate(watch(model, params, batch).weights["cross"][:, -1].mean(axis=1))
