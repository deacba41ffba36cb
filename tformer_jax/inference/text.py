"""Inference from strings to strings; results are in the order of the inputs, independent of batching."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from tformer_jax.config import Config
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.inference.batching import in_batches, in_chunks
from tformer_jax.inference.encoding import encode, prompt_reader, reader, source_reader
from tformer_jax.inference.outputs import Output, RowDecoder
from tformer_jax.nn.sharding import whole
from tformer_jax.parallel.placement import everywhere, mesh_of, shard_batch
from tformer_jax.special_tokens import PAD


class _Generator:
    """Base of `Translator` and `TextGenerator`: decodes texts with a continuous-batching engine."""

    def __init__(self, cfg: Config, model: nn.Module, tokenizers: Tokenizers, *, cut: bool = False):
        self.cfg, self.model, self.tokenizers, self.cut = cfg, model, tokenizers, cut

    def __call__(self, params: Any, texts: Sequence[str], *, seed: int = 0) -> list[str]:
        """Returns the output of each text, in order.

        Raises:
            ConfigError: as in `stream`, but before anything is decoded.
        """
        return [output.text for output in self.outputs(params, texts, seed=seed)]

    def outputs(self, params: Any, texts: Sequence[str], *, seed: int = 0) -> list[Output]:
        """Like `__call__`, with scores where beam search computes them."""
        rest = iter(texts)
        rows = list(map(self._reader(rest), range(len(texts)), rest))
        return [outputs[0] for outputs in self._decoder(params)(rows, 0, seed=seed)]

    def stream(
        self,
        params: Any,
        texts: Iterable[str],
        *,
        seed: int = 0,
        outputs: int = 1,
        scores: bool = False,
        skip: int = 0,
    ) -> Iterator[list[Output]]:
        """Yields `outputs` outputs of each text, in order, for any number of texts.

        Args:
            texts: read as needed.
            outputs: number of outputs per text: the best ones of beam search, at most `cfg.decode.beams`, or samples.
            scores: also score the outputs of greedy decoding and sampling, at the cost of a pass over the logits.
            skip: number of first texts to omit; the outputs of the others are bit-identical to those without `skip`.

        Raises:
            ConfigError: raised by `texts`, or because a text does not fit the model; the outputs of all earlier texts
                are yielded first.
        """
        texts, decode = iter(texts), self._decoder(params)
        run = functools.partial(decode, seed=seed, outputs=outputs, scores=scores)
        return in_chunks(texts, self._reader(texts), run, skip=skip)

    def stream_pieces(self, params: Any, text: str, *, seed: int = 0) -> Iterator[str]:
        """Yields the output of one text in pieces."""
        row = self._reader(iter(()))(0, text)
        return self._decoder(params).pieces(row, seed=seed) if row else iter(())

    def _decoder(self, params: Any) -> RowDecoder:
        return RowDecoder(self.cfg, self.model, params, self.tokenizers)

    def _reader(self, texts: Iterator[str]) -> Callable[[int, str], list[int]]:
        """Returns a function that maps the index of a text, from 0, and the text to token ids, or [] for no output."""
        raise NotImplementedError


class Translator(_Generator):
    """Translates texts with a `Seq2Seq` model; `cut` truncates texts that are too long instead of raising an error.

    The translation of a blank text is empty.
    """

    def _reader(self, texts: Iterator[str]) -> Callable[[int, str], list[int]]:
        return source_reader(self.tokenizers.source, texts, self.cfg.model.max_length, cut=self.cut)


class TextGenerator(_Generator):
    """Continues prompts with a `DecoderLM` model; outputs do not repeat the prompt, which must not be empty."""

    def _reader(self, texts: Iterator[str]) -> Callable[[int, str], list[int]]:
        return prompt_reader(self.tokenizers.target, texts, self.cfg.model.max_length)


class LabelClassifier:
    """Predicts the most probable label of texts with a `Classifier` model; `cut` truncates texts that are too long."""

    def __init__(
        self, cfg: Config, model: nn.Module, tokenizers: Tokenizers, labels: Sequence[str], *, cut: bool = False
    ):
        self.cfg, self.model, self.tokenizers, self.labels, self.cut = cfg, model, tokenizers, labels, cut

    def __call__(self, params: Any, texts: Sequence[str]) -> list[tuple[str, float]]:
        """Returns the label of each text, and its probability.

        Raises:
            ConfigError: a text is too long for the model, and `cut` is False.
        """
        rows = encode(self.tokenizers.target, texts, self.cfg.model.max_length, "text", cut=self.cut)
        return self._classify(params, rows)

    def stream(self, params: Any, texts: Iterable[str], *, skip: int = 0) -> Iterator[tuple[str, float]]:
        """Like `__call__`, for any number of texts, in order; `texts` and `skip` are as in `Translator.stream`.

        Raises:
            ConfigError: raised by `texts`, or because a text is too long for the model; the labels of all earlier
                texts are yielded first.
        """
        texts = iter(texts)
        read = reader(self.tokenizers.target, texts, self.cfg.model.max_length, "text", cut=self.cut)
        return in_chunks(texts, read, lambda rows, _: self._classify(params, rows), skip=skip)

    def _classify(self, params: Any, rows: Sequence[list[int]]) -> list[tuple[str, float]]:
        mesh = mesh_of(params)

        def run(tokens: np.ndarray, places: np.ndarray) -> list[tuple[str, float]]:
            with everywhere(mesh):
                found = np.asarray(label_probabilities(self.model, params, **shard_batch(mesh, {"tokens": tokens})))
            return [(self.labels[int(row.argmax())], float(row.max())) for row in found]

        return in_batches(rows, run, size=self.cfg.eval.batch_size, max_length=self.cfg.model.max_length)


@functools.partial(jax.jit, static_argnames="model")
def label_probabilities(model: nn.Module, params: Any, tokens: jax.Array) -> jax.Array:
    """Returns label probabilities, float32 [B, classes], for tokens int [B, S] with PAD on the right."""
    logits: Any = model.apply({"params": params}, tokens, mask=tokens != PAD)
    return whole(jax.nn.softmax(logits, axis=-1))
