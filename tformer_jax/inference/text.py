"""Models that take and give strings. Results come in the order of the inputs, however those were batched."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from tformer_jax.config import Config, ConfigError
from tformer_jax.data.tokenizers import Tokenizer, Tokenizers
from tformer_jax.inference import generate
from tformer_jax.special_tokens import EOS, PAD


class Translator:
    """Translates texts with a `Seq2Seq` model; `cut` shortens texts that are too long, as training does."""

    def __init__(self, cfg: Config, model: nn.Module, tokenizers: Tokenizers, *, cut: bool = False):
        self.cfg, self.tokenizers, self.cut = cfg, tokenizers, cut
        self._translate = generate.jitted(generate.translate, model, cfg.decode)

    def __call__(self, params: Any, texts: Sequence[str], *, seed: int = 0) -> list[str]:
        """One translation a text.

        Raises:
            ConfigError: a text is longer than the model reads.
        """
        room = self.cfg.model.max_length - 1
        encoded = [[*ids, EOS] for ids in encode(self.tokenizers.source, texts, room, "source", cut=self.cut)]
        limit = min(self.cfg.decode.max_new_tokens, self.cfg.model.max_length)
        key = jax.random.key(seed)

        def run(rows: list[list[int]], length: int) -> list[str]:
            source = pad_rows(rows, self.cfg.eval.batch_size, length)
            output = np.asarray(self._translate(params, source, key, limit))
            return [self.tokenizers.target.decode(row) for row in output[: len(rows)]]

        return in_batches(encoded, self.cfg.eval.batch_size, self.cfg.model.max_length, run)


class TextGenerator:
    """Continues prompts with a `DecoderLM` model."""

    def __init__(self, cfg: Config, model: nn.Module, tokenizers: Tokenizers):
        self.cfg, self.tokenizers = cfg, tokenizers
        self._continue = generate.jitted(generate.continue_text, model, cfg.decode)

    def __call__(self, params: Any, prompts: Sequence[str], *, seed: int = 0) -> list[str]:
        """What follows each prompt, without the prompt; as many tokens as the model's maximum leaves room for.

        Raises:
            ConfigError: a prompt is empty, or leaves no room.
        """
        encoded = encode(self.tokenizers.target, prompts, self.cfg.model.max_length - 1, "prompt")
        if not all(encoded):
            raise ConfigError("the prompt is empty: write at least one character")
        longest = max(map(len, encoded), default=0)
        limit = min(self.cfg.decode.max_new_tokens, self.cfg.model.max_length - longest)
        tokens = np.full((len(encoded), longest), PAD, np.int32)
        for row, ids in enumerate(encoded):
            tokens[row, longest - len(ids) :] = ids
        output = np.asarray(self._continue(params, tokens, jax.random.key(seed), limit))
        return [self.tokenizers.target.decode(row) for row in output]


class LabelClassifier:
    """Names the most probable label of texts with a `Classifier` model; `cut` shortens texts that are too long."""

    def __init__(
        self, cfg: Config, model: nn.Module, tokenizers: Tokenizers, labels: Sequence[str], *, cut: bool = False
    ):
        self.cfg, self.tokenizers, self.labels, self.cut = cfg, tokenizers, labels, cut

        def probabilities(params, tokens):
            logits: Any = model.apply({"params": params}, tokens, mask=tokens != PAD)
            return jax.nn.softmax(logits, axis=-1)

        self._probabilities = jax.jit(probabilities)

    def __call__(self, params: Any, texts: Sequence[str]) -> list[tuple[str, float]]:
        """The label of each text, and its probability.

        Raises:
            ConfigError: a text is longer than the model reads.
        """
        encoded = encode(self.tokenizers.target, texts, self.cfg.model.max_length, "text", cut=self.cut)

        def run(rows: list[list[int]], length: int) -> list[tuple[str, float]]:
            found = np.asarray(self._probabilities(params, pad_rows(rows, self.cfg.eval.batch_size, length)))
            return [(self.labels[row.argmax()], float(row.max())) for row in found[: len(rows)]]

        return in_batches(encoded, self.cfg.eval.batch_size, self.cfg.model.max_length, run)


def encode(tokenizer: Tokenizer, texts: Sequence[str], limit: int, what: str, *, cut: bool = False) -> list[list[int]]:
    """Token ids of each text, at most `limit`; longer ones are shortened where `cut`.

    Raises:
        ConfigError: a text has more tokens, and `cut` is False.
    """
    encoded = [tokenizer.encode(text) for text in texts]
    longest = max(map(len, encoded), default=0)
    if longest > limit and not cut:
        raise ConfigError(f"the {what} has {longest} tokens, but the model takes at most {limit}: shorten it")
    return [ids[:limit] for ids in encoded]


def pad_rows(rows: Sequence[Sequence[int]], count: int, length: int) -> np.ndarray:
    """Stacks token ids into int32 [count, length], padded on the right and below."""
    padded = np.full((count, length), PAD, np.int32)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    return padded


def in_batches(
    encoded: Sequence[list[int]], size: int, max_length: int, run: Callable[[list[list[int]], int], list[Any]]
) -> list[Any]:
    """Calls `run(rows, length)` on rows of similar length, and puts the results back in order.

    `length` is one of few, so that few shapes are compiled: a power of two, or `max_length`.
    """
    results: list[Any] = [None] * len(encoded)
    order = sorted(range(len(encoded)), key=lambda number: len(encoded[number]))
    for chunk in _chunks(order, size):
        longest = max(len(encoded[chunk[-1]]), 1)
        length = min(1 << (longest - 1).bit_length(), max_length)
        for number, result in zip(chunk, run([encoded[i] for i in chunk], length), strict=True):
            results[number] = result
    return results


def _chunks(items: list[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
