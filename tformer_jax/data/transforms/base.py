"""Prepares transforms for a corpus and applies them; what they draw depends on the seed, the example and the epoch."""

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from tformer_jax.config import DataConfig
from tformer_jax.config.transforms import Transform, format_source
from tformer_jax.data.corpora import Corpus, Example
from tformer_jax.data.tokenizers import Tokenizer, Tokenizers

Change: TypeAlias = Callable[[Example, random.Random, int], Example]
"""Changes a training example; the last argument is its index in the split."""
IdChange: TypeAlias = Callable[[list[int], str, Tokenizer, random.Random], list[int]]
"""Changes the ids of a text, without the special tokens around it."""
WORD_BITS = 64
"""Bits of the seed, the epoch and the index in the seed of a generator."""

EPOCHS = 2**20
"""Epochs of stage n are numbered from n * `EPOCHS` if stages differ in their transforms."""


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
    stages: "tuple[Transforms, ...]" = ()
    """The transforms of each stage of `data.stages`; (): the same in all."""

    def at_epoch(self, epoch: int) -> "tuple[Transforms, int]":
        """Returns the transforms of the stage in an epoch number (see `EPOCHS`), and the number without the stage."""
        if not self.stages:
            return self, epoch
        stage, epoch = divmod(epoch, EPOCHS)
        return self.stages[stage], epoch

    def generator(self, epoch: int, index: int) -> random.Random:
        """Returns the generator of an example in an epoch."""
        return random.Random((self.seed << 2 * WORD_BITS) + (epoch << WORD_BITS) + index)

    def change(self, example: Example, rng: random.Random, index: int) -> Example:
        """Applies the transforms of texts in order."""
        for probability, change in self.texts:
            if rng.random() < probability:
                example = change(example, rng, index)
        return example

    def trace(self, example: Example, index: int) -> list[Example]:
        """Returns an example as it is read, and after each transform of texts, in the first epoch."""
        first = (self._replace(texts=self.texts[:count]) for count in range(len(self.texts) + 1))
        return [transforms.change(example, self.generator(0, index), index) for transforms in first]

    def change_ids(self, ids: list[int], text: str, tokenizer: Tokenizer, rng: random.Random) -> list[int]:
        """Applies the transforms of ids in order."""
        for probability, change in self.ids:
            if rng.random() < probability:
                ids = change(ids, text, tokenizer, rng)
        return ids


def build(transforms: Sequence[Transform], training: Training, seed: int) -> Transforms:
    """Prepares transforms for a corpus.

    Raises:
        UserError: one does not fit the data, or a file that it names cannot be read.
    """
    prepared = [(transform, (transform.probability, transform.prepare(training))) for transform in transforms]

    def select(names: Sequence[str] | None) -> Transforms:
        chosen = [(each.on_ids, pair) for each, pair in prepared if names is None or each.kind in names]
        texts, ids = (tuple(pair for of_ids, pair in chosen if of_ids == wanted) for wanted in (False, True))
        return Transforms(seed, texts, ids)

    if not training.data.stages:
        return select(None)
    from tformer_jax.config.stages import read_stages

    names = [stage.transforms for stage in read_stages(training.data)]
    stages = () if all(chosen is None for chosen in names) else tuple(map(select, names))
    return select(None)._replace(stages=stages)


def format_example(transforms: Sequence[Transform], example: Example, rng: random.Random, index: int) -> Example:
    """Returns an example whose source has the formats of transforms that give one to other splits."""
    return {**example, "source": format_source(transforms, example["source"])}


def check_symbols(transform: Transform, name: str, texts: Sequence[str], data: DataConfig) -> None:
    """Raises `ConfigError` if a text of the setting `name` of a transform is no symbol of a trained vocabulary."""
    missing = tuple(text for text in dict.fromkeys(map(str.strip, texts)) if text and text not in data.symbols)
    if missing and "file" not in data.tokenizer_kinds:
        raise transform.error(name, f"must be single tokens: add {missing} to data.symbols")


def check_marks(transform: Transform, name: str, texts: Sequence[str], tokenizers: Tokenizers) -> None:
    """Raises `ConfigError` if tokenizers read a text of the setting `name` of a transform as a placeholder."""
    from tformer_jax.data.placeholders import mask

    for text in texts:
        if mask(tokenizers.placeholders, text).originals:
            problem = f"{text.strip()!r} is a placeholder for the tokenizers, and none of their symbols"
            raise transform.error(name, f"{problem}: choose one of these, or a text without brackets")
