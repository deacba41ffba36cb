"""Prepares transforms for a corpus and applies them; what they draw depends on the seed, the example and the epoch."""

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from tformer_jax.config import DataConfig
from tformer_jax.config.transforms import Transform
from tformer_jax.data.corpora import Corpus, Example
from tformer_jax.data.tokenizers import Tokenizer, Tokenizers

Change: TypeAlias = Callable[[Example, random.Random, int], Example]
"""Changes a training example; the last argument is its index in the split."""
IdChange: TypeAlias = Callable[[list[int], str, Tokenizer, random.Random], list[int]]
"""Changes the ids of a text, without the special tokens around it."""
WORD_BITS = 64
"""Bits of the seed, the epoch and the index in the seed of a generator."""


class Training(NamedTuple):
    """What a transform may read when it is prepared."""

    data: DataConfig
    corpus: Corpus
    tokenizers: Tokenizers


class Transforms(NamedTuple):
    """Prepared transforms, each with its probability."""

    seed: int
    texts: tuple[tuple[float, Change], ...]
    ids: tuple[tuple[float, IdChange], ...]

    def generator(self, epoch: int, index: int) -> random.Random:
        """Returns the generator of an example in an epoch."""
        return random.Random((self.seed << 2 * WORD_BITS) + (epoch << WORD_BITS) + index)

    def change(self, example: Example, rng: random.Random, index: int) -> Example:
        """Applies the transforms of texts in order."""
        for probability, change in self.texts:
            if rng.random() < probability:
                example = change(example, rng, index)
        return example

    def change_ids(self, ids: list[int], text: str, tokenizer: Tokenizer, rng: random.Random) -> list[int]:
        """Applies the transforms of ids in order."""
        for probability, change in self.ids:
            if rng.random() < probability:
                ids = change(ids, text, tokenizer, rng)
        return ids


def build(transforms: Sequence[Transform], training: Training, seed: int) -> Transforms:
    """Prepares the transforms for a corpus.

    Raises:
        UserError: one does not fit the data, or a file that it names cannot be read.
    """
    prepared = [(transform.on_ids, (transform.probability, transform.prepare(training))) for transform in transforms]
    texts, ids = (tuple(pair for of_ids, pair in prepared if of_ids == wanted) for wanted in (False, True))
    return Transforms(seed, texts, ids)
