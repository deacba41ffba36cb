"""Translation, text generation and classification of strings; results do not depend on batching."""

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from tformer_jax.config import Config
from tformer_jax.data.characters import is_blank
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.inference.batching import WINDOW, TextProcessor, compute_rows, run_in_chunks
from tformer_jax.inference.encoding import LongTexts, TextError, no_tokens
from tformer_jax.inference.forced import first_tokens
from tformer_jax.inference.outputs import Output, RowDecoder, count_limits, describe_limits, describe_unknown
from tformer_jax.models import registry
from tformer_jax.nn.sharding import replicate
from tformer_jax.special_tokens import PAD


class _Generator:
    """Base of `Translator` and `TextGenerator`: decodes texts with a continuous-batching engine."""

    def __init__(self, cfg: Config, model: nn.Module, tokenizers: Tokenizers):
        self.cfg, self.model, self.tokenizers = cfg, model, tokenizers

    def __call__(
        self, params: Any, texts: Sequence[str], *, seed: int = 0, long_texts: LongTexts | None = None
    ) -> list[str]:
        """Returns the output of each text, in order.

        Logs the numbers of those that a limit ended, and of those with unknown tokens, as warnings.

        Raises:
            TextError: as in `stream`, but before anything is decoded.
        """
        outputs = self.outputs(params, texts, seed=seed, long_texts=long_texts)
        sentences = list(describe_limits(count_limits(outputs), self.cfg, len(outputs)))
        if unknown := sum(output.unknown > 0 for output in outputs):
            sentences.append(describe_unknown(unknown, len(outputs), self.cfg.decode))
        for sentence in sentences:
            logging.getLogger(__name__).warning("%s", sentence)
        return [output.text for output in outputs]

    def outputs(
        self,
        params: Any,
        texts: Sequence[str],
        *,
        seed: int = 0,
        scores: bool = False,
        long_texts: LongTexts | None = None,
    ) -> list[Output]:
        """Like `__call__`, with scores where beam search computes them, or `scores` asks for them as in `stream`."""
        encode = self._encoder(long_texts)
        rows = [encode(index, text) for index, text in enumerate(texts)]
        return [outputs[0] for outputs in self._decoder(params)(rows, seed=seed, scores=scores, texts=texts)]

    def stream(
        self,
        params: Any,
        texts: Iterable[str],
        *,
        seed: int = 0,
        outputs: int = 1,
        scores: bool = False,
        skip: int = 0,
        long_texts: LongTexts | None = None,
    ) -> Iterator[list[Output]]:
        """Yields `outputs` outputs of each text, in order, for any number of texts, as soon as they are known.

        Args:
            texts: read as needed.
            outputs: number of outputs per text: the best ones of beam search, at most `cfg.decode.beams`, or samples.
            scores: also score the outputs of greedy decoding and sampling, at the cost of a pass over the logits.
            skip: number of first texts to omit; the outputs of the others are bit-identical to those without `skip`.
            long_texts: what to do with texts that are too long; default: raise an error. The outputs of texts that
                are left out are empty.

        Raises:
            UserError: raised by `texts`; the outputs of all earlier texts are yielded first.
            TextError: a text does not fit the model; as above.
        """
        decode, encode = self._decoder(params), self._encoder(long_texts)
        window = WINDOW * self.cfg.eval.batch_size

        def read(index: int, text: str) -> tuple[int, list[int], str]:
            return index, encode(index, text), text

        def run(chunk: list[tuple[int, list[int], str]]) -> Iterator[list[Output]]:
            (first, *_), *_ = chunk
            rows, sources = [row for _, row, _ in chunk], [text for *_, text in chunk]
            return decode.stream(rows, first, texts=sources, seed=seed, outputs=outputs, scores=scores, window=window)

        return run_in_chunks(texts, read, run, skip=skip)

    def stream_pieces(
        self, params: Any, text: str, *, seed: int = 0, long_texts: LongTexts | None = None
    ) -> Iterator[Output]:
        """Yields the output of one text in pieces; the last one has the limit of the output, if any."""
        row = self._encoder(long_texts)(0, text)
        return self._decoder(params).pieces(row, text, seed=seed) if row else iter(())

    def _decoder(self, params: Any) -> RowDecoder:
        return RowDecoder(self.cfg, self.model, params, self.tokenizers)

    def _encoder(self, long_texts: LongTexts | None) -> Callable[[int, str], list[int]]:
        """Returns a function that maps the index of a text and the text to token ids; [] if it has no output."""
        return functools.partial(self._encode, long_texts or LongTexts())

    def _encode(self, long_texts: LongTexts, index: int, text: str) -> list[int]:
        raise NotImplementedError


class Translator(_Generator):
    """Translates texts with a `Seq2Seq` model; the translation of a text that is blank, or has no tokens, is empty."""

    def _encode(self, long_texts: LongTexts, index: int, text: str) -> list[int]:
        if is_blank(text):
            return []
        tokenizer = self.tokenizers.source
        limit = self.cfg.model.max_length - tokenizer.special.added_to_side
        ids = long_texts.fit(index, tokenizer.encode(text), limit, "source")
        return tokenizer.special.wrap_side(ids) if ids else []


class TextGenerator(_Generator):
    """Continues prompts with a `DecoderLM` model; outputs do not repeat the prompt, which must not be empty.

    A truncated prompt keeps its last tokens, few enough that `decode.max_new_tokens` new ones fit after them; without
    that setting, as many new ones as half of the model's maximum length.
    """

    def _encode(self, long_texts: LongTexts, index: int, text: str) -> list[int]:
        tokenizer = self.tokenizers.target
        max_length = self.cfg.model.max_length - tokenizer.special.added
        ids = tokenizer.encode(text)
        if not ids:
            raise TextError(index, no_tokens("the prompt", text))
        last = max(max_length - (self.cfg.decode.max_new_tokens or max_length // 2), 1)
        fitting = long_texts.fit(index, ids, max_length - 1, "prompt", last=last)
        if fitting is None:
            return []
        room, prefix = max_length - len(fitting), self.cfg.decode.prefix
        if prefix and room < self._forced:
            raise TextError(
                index,
                f"decode.prefix={prefix!r} has {self._forced} tokens, but only {room} fit after the prompt: shorten "
                "one of them",
            )
        return tokenizer.special.wrap_text(fitting)

    @functools.cached_property
    def _forced(self) -> int:
        """Number of tokens with which every output starts."""
        return len(first_tokens(self.cfg.decode, self.tokenizers.target, continues=self.model.continues).ids)


class LabelClassifier(TextProcessor[str, list[int], tuple[str, float]]):
    """Predicts the most probable label of texts with a `Classifier` model; results are a label and its probability."""

    def __init__(self, cfg: Config, model: nn.Module, tokenizers: Tokenizers, labels: Sequence[str]):
        super().__init__(cfg, model, tokenizers)
        self.labels = labels

    def __call__(
        self, params: Any, texts: Sequence[str], *, long_texts: LongTexts | None = None
    ) -> list[tuple[str, float]]:
        """Returns the label of each text, and its probability.

        Raises:
            TextError: as in `stream`, but before anything is computed.
        """
        long_texts = long_texts or LongTexts()
        rows = [self._encode(long_texts, index, text) for index, text in enumerate(texts)]
        return list(self._compute(params, rows))

    def _encode(self, long_texts: LongTexts, index: int, text: str) -> list[int]:
        """Returns the token ids of a text; a text that is left out is encoded as empty."""
        tokenizer = self.tokenizers.target
        limit = self.cfg.model.max_length - tokenizer.special.added
        return tokenizer.special.wrap_text(long_texts.fit(index, tokenizer.encode(text), limit, "text") or [])

    def _compute(self, params: Any, rows: list[list[int]]) -> Iterator[tuple[str, float]]:
        for probabilities in classify_rows(self.model, params, rows, self.cfg.eval.batch_size):
            yield self.labels[int(probabilities.argmax())], float(probabilities.max())


def classify_rows(
    model: nn.Module, params: Any, rows: Sequence[Sequence[int]], batch_size: int
) -> Iterator[np.ndarray]:
    """Yields the label probabilities of each row of token ids, float32 [classes], with a `Classifier` model."""
    return compute_rows(label_probabilities, model, params, [{"tokens": row} for row in rows], batch_size)


@functools.partial(jax.jit, static_argnames="model")
def label_probabilities(model: nn.Module, params: Any, batch: registry.Batch) -> jax.Array:
    """Returns label probabilities, float32 [B, classes], for tokens int [B, S] with PAD on the right."""
    tokens = batch["tokens"]
    logits: Any = model.apply({"params": params}, tokens, padding_mask=tokens != PAD, right_padded=True)
    return replicate(jax.nn.softmax(logits, axis=-1))
