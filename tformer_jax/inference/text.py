"""Models that take and give strings. Results come in the order of the inputs, however those were batched."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from tformer_jax.config import Config, ConfigError
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.inference import generate
from tformer_jax.inference.batching import in_batches, in_chunks
from tformer_jax.inference.encoding import encode, reader
from tformer_jax.inference.outputs import Output, RowDecoder, row_keys
from tformer_jax.special_tokens import EOS, PAD

WRITE = "write at least one character"


class Translator:
    """Translates texts with a `Seq2Seq` model; `cut` shortens texts that are too long instead of refusing them."""

    def __init__(self, cfg: Config, model: nn.Module, tokenizers: Tokenizers, *, cut: bool = False):
        self.cfg, self.model, self.tokenizers, self.cut = cfg, model, tokenizers, cut

    def __call__(self, params: Any, texts: Sequence[str], *, seed: int = 0) -> list[str]:
        """One translation a text; that of a blank text is empty.

        Raises:
            ConfigError: a text is longer than the model reads.
        """

        def run(source: np.ndarray, places: np.ndarray) -> list[str]:
            keys = row_keys(seed, places)
            output = generate.translate(self.model, params, source, keys, length=self._length, cfg=self.cfg.decode)
            return [self.tokenizers.target.decode(ids) for ids in np.asarray(output)]

        return self._in_batches(texts, run)

    def n_best(self, params: Any, texts: Sequence[str]) -> list[list[tuple[str, float]]]:
        """The `cfg.decode.beams` best translations of each text that beam search finds, with their scores.

        Raises:
            ConfigError: a text is longer than the model reads.
        """

        def run(source: np.ndarray, _: np.ndarray) -> list[list[tuple[str, float]]]:
            found = generate.best_translations(self.model, params, source, length=self._length, cfg=self.cfg.decode)
            decoded = [[self.tokenizers.target.decode(ids) for ids in row] for row in np.asarray(found.tokens)]
            pairs = zip(decoded, np.asarray(found.scores).tolist(), strict=True)
            return [list(zip(row, scores, strict=True)) for row, scores in pairs]

        return self._in_batches(texts, run)

    def stream(
        self,
        params: Any,
        texts: Iterable[str],
        *,
        seed: int = 0,
        outputs: int = 1,
        scored: bool = False,
        skip: int = 0,
    ) -> Iterator[list[Output]]:
        """So many translations of each of any number of texts, in order; those of a blank text are empty.

        Args:
            texts: read as they are needed.
            outputs: the best ones of beam search, at most `cfg.decode.beams`; or samples.
            scored: give scores without beam search, too.
            skip: leave out the outputs of so many first texts; the others are the same, bit for bit, as without it.

        Raises:
            ConfigError: a text is longer than the model reads, after the outputs of all texts before it; or what
                `texts` raises.
        """
        texts = iter(texts)
        encode_text = reader(self.tokenizers.source, texts, self.cfg.model.max_length - 1, "source", cut=self.cut)
        decode = RowDecoder(self.cfg, self.model, self.tokenizers)

        def read(place: int, text: str) -> list[int]:
            return [*encode_text(place, text), EOS] if text.strip() else []

        def run(rows: list[list[int]], place: int) -> list[list[Output]]:
            return decode(params, rows, place, seed=seed, outputs=outputs, scored=scored)

        return in_chunks(texts, read, run, skip=skip)

    def stream_pieces(self, params: Any, text: str, *, seed: int = 0) -> Iterator[str]:
        """The translation of one text, piece by piece."""
        for outputs in self.stream(params, [text], seed=seed):
            yield outputs[0].text

    @property
    def _length(self) -> int:
        return min(self.cfg.decode.max_new_tokens, self.cfg.model.max_length)

    def _in_batches(self, texts: Sequence[str], run: Callable[[np.ndarray, np.ndarray], list[Any]]) -> list[Any]:
        max_length = self.cfg.model.max_length
        encoded = encode(self.tokenizers.source, texts, max_length - 1, "source", cut=self.cut)
        rows = [[*ids, EOS] if text.strip() else [] for ids, text in zip(encoded, texts, strict=True)]
        return in_batches(rows, run, size=self.cfg.eval.batch_size, max_length=max_length)


class TextGenerator:
    """Continues prompts with a `DecoderLM` model."""

    def __init__(self, cfg: Config, model: nn.Module, tokenizers: Tokenizers):
        self.cfg, self.model, self.tokenizers = cfg, model, tokenizers

    def __call__(self, params: Any, prompts: Sequence[str], *, seed: int = 0) -> list[str]:
        """What follows each prompt, without the prompt; at most as many tokens as the model has room for.

        Raises:
            ConfigError: a prompt is empty, or leaves no room.
        """
        max_length = self.cfg.model.max_length
        rows = encode(self.tokenizers.target, prompts, max_length - 1, "prompt")
        if not all(rows):
            raise ConfigError(f"the prompt is empty: {WRITE}")
        length = min(self.cfg.decode.max_new_tokens, max_length)

        def run(tokens: np.ndarray, places: np.ndarray) -> list[str]:
            keys = row_keys(seed, places)
            output = generate.continue_text(self.model, params, tokens, keys, length=length, cfg=self.cfg.decode)
            return [self.tokenizers.target.decode(ids) for ids in np.asarray(output)]

        return in_batches(rows, run, size=self.cfg.eval.batch_size, max_length=max_length, pad_left=True)

    def stream(
        self,
        params: Any,
        prompts: Iterable[str],
        *,
        seed: int = 0,
        outputs: int = 1,
        scored: bool = False,
        skip: int = 0,
    ) -> Iterator[list[Output]]:
        """So many continuations of each of any number of prompts, in order; arguments as of `Translator.stream`.

        Raises:
            ConfigError: a prompt is empty or leaves no room, after the outputs of all before it; or what `prompts`
                raises.
        """
        prompts = iter(prompts)
        encode_prompt = reader(self.tokenizers.target, prompts, self.cfg.model.max_length - 1, "prompt")
        decode = RowDecoder(self.cfg, self.model, self.tokenizers)

        def read(place: int, prompt: str) -> list[int]:
            row = encode_prompt(place, prompt)
            if not row:
                alone = place == 0 and next(prompts, None) is None
                raise ConfigError(f"{'the prompt' if alone else f'prompt {place + 1}'} is empty: {WRITE}")
            return row

        def run(rows: list[list[int]], place: int) -> list[list[Output]]:
            return decode(params, rows, place, seed=seed, outputs=outputs, scored=scored)

        return in_chunks(prompts, read, run, skip=skip)

    def stream_pieces(self, params: Any, prompt: str, *, seed: int = 0) -> Iterator[str]:
        """What follows one prompt, piece by piece."""
        for outputs in self.stream(params, [prompt], seed=seed):
            yield outputs[0].text


class LabelClassifier:
    """Names the most probable label of texts with a `Classifier` model; `cut` shortens texts that are too long."""

    def __init__(
        self, cfg: Config, model: nn.Module, tokenizers: Tokenizers, labels: Sequence[str], *, cut: bool = False
    ):
        self.cfg, self.model, self.tokenizers, self.labels, self.cut = cfg, model, tokenizers, labels, cut

    def __call__(self, params: Any, texts: Sequence[str]) -> list[tuple[str, float]]:
        """The label of each text, and its probability.

        Raises:
            ConfigError: a text is longer than the model reads.
        """
        rows = encode(self.tokenizers.target, texts, self.cfg.model.max_length, "text", cut=self.cut)
        return self._classify(params, rows)

    def stream(self, params: Any, texts: Iterable[str], *, skip: int = 0) -> Iterator[tuple[str, float]]:
        """The same for any number of texts, in order; `texts` and `skip` as of `Translator.stream`.

        Raises:
            ConfigError: a text is longer than the model reads, after the labels of all before it; or what `texts`
                raises.
        """
        texts = iter(texts)
        read = reader(self.tokenizers.target, texts, self.cfg.model.max_length, "text", cut=self.cut)
        return in_chunks(texts, read, lambda rows, _: self._classify(params, rows), skip=skip)

    def _classify(self, params: Any, rows: Sequence[list[int]]) -> list[tuple[str, float]]:
        def run(tokens: np.ndarray, places: np.ndarray) -> list[tuple[str, float]]:
            found = np.asarray(label_probabilities(self.model, params, tokens))
            return [(self.labels[int(row.argmax())], float(row.max())) for row in found]

        return in_batches(rows, run, size=self.cfg.eval.batch_size, max_length=self.cfg.model.max_length)


@functools.partial(jax.jit, static_argnames="model")
def label_probabilities(model: nn.Module, params: Any, tokens: jax.Array) -> jax.Array:
    """tokens int [B, S], padded with PAD on the right -> float32 [B, classes]."""
    logits: Any = model.apply({"params": params}, tokens, mask=tokens != PAD)
    return jax.nn.softmax(logits, axis=-1)
