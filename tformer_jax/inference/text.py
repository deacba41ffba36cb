"""Models that take and give strings. Results come in the order of the inputs, however those were batched."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from tformer_jax.config import Config, ConfigError
from tformer_jax.data.tokenizers import Tokenizer, Tokenizers
from tformer_jax.inference import generate
from tformer_jax.inference.batching import in_batches
from tformer_jax.special_tokens import EOS, PAD


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
            raise ConfigError("the prompt is empty: write at least one character")
        length = min(self.cfg.decode.max_new_tokens, max_length)

        def run(tokens: np.ndarray, places: np.ndarray) -> list[str]:
            keys = row_keys(seed, places)
            output = generate.continue_text(self.model, params, tokens, keys, length=length, cfg=self.cfg.decode)
            return [self.tokenizers.target.decode(ids) for ids in np.asarray(output)]

        return in_batches(rows, run, size=self.cfg.eval.batch_size, max_length=max_length, pad_left=True)


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
        max_length = self.cfg.model.max_length
        rows = encode(self.tokenizers.target, texts, max_length, "text", cut=self.cut)

        def run(tokens: np.ndarray, places: np.ndarray) -> list[tuple[str, float]]:
            found = np.asarray(label_probabilities(self.model, params, tokens))
            return [(self.labels[int(row.argmax())], float(row.max())) for row in found]

        return in_batches(rows, run, size=self.cfg.eval.batch_size, max_length=max_length)


@functools.partial(jax.jit, static_argnames="model")
def label_probabilities(model: nn.Module, params: Any, tokens: jax.Array) -> jax.Array:
    """tokens int [B, S], padded with PAD on the right -> float32 [B, classes]."""
    logits: Any = model.apply({"params": params}, tokens, mask=tokens != PAD)
    return jax.nn.softmax(logits, axis=-1)


def row_keys(seed: int, places: np.ndarray) -> jax.Array:
    """One PRNG key a row, by its place among all inputs (int [B]): batching does not change what is sampled."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(seed), places)


def encode(tokenizer: Tokenizer, texts: Sequence[str], limit: int, what: str, *, cut: bool = False) -> list[list[int]]:
    """Token ids of each text, at most `limit`; longer ones are shortened where `cut`.

    Raises:
        ConfigError: a text has more tokens, and `cut` is False.
    """
    encoded = [tokenizer.encode(text) for text in texts]
    for number, ids in enumerate(encoded, start=1):
        if len(ids) > limit and not cut:
            which = f"{what} {number}" if len(texts) > 1 else f"the {what}"
            raise ConfigError(f"{which} has {len(ids)} tokens, but the model takes at most {limit}: shorten it")
    return [ids[:limit] for ids in encoded]
