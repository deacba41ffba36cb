"""Examples of what transforms change, for readers."""

import itertools
from collections.abc import Iterator

from tformer_jax.config import Config
from tformer_jax.data.corpora import Corpus
from tformer_jax.data.corpora.example import NO_TEXT
from tformer_jax.data.features import Tokenized
from tformer_jax.data.tokenizers import Tokenizers, token_texts
from tformer_jax.data.transforms import build_transforms
from tformer_jax.data.transforms.base import Transforms

TRIED = 1_000
"""Number of examples among which changed ones are looked for."""
TextPairs = Iterator[tuple[str, str]]
"""Texts before and after a transform."""


def show_changes(cfg: Config, corpus: Corpus, tokenizers: Tokenizers, count: int) -> Iterator[tuple[str, TextPairs]]:
    """Yields the name of each transform, and the first texts that it changes in the first epoch, at most `count`.

    Transforms of ids are shown by the tokens of sources, or texts.
    """
    transforms = build_transforms(cfg, corpus, tokenizers)
    assert transforms is not None
    numbers = {False: itertools.count(), True: itertools.count()}
    for transform in cfg.data.transforms:
        pairs = (_id_changes if transform.on_ids else _text_changes)(
            transforms, next(numbers[transform.on_ids]), corpus, tokenizers
        )
        changed = ((before, after) for before, after in pairs if before != after)
        yield transform.kind, itertools.islice(changed, count)


def _text_changes(transforms: Transforms, number: int, corpus: Corpus, tokenizers: Tokenizers) -> TextPairs:
    for index in range(min(len(corpus.train), TRIED)):
        before, after = transforms.trace(corpus.train[index], index)[number : number + 2]
        yield from ((before[key], after[key]) for key in after if key not in NO_TEXT)


def _id_changes(transforms: Transforms, number: int, corpus: Corpus, tokenizers: Tokenizers) -> TextPairs:
    readers = [
        Tokenized(corpus.train, tokenizers, corpus.labels, transforms._replace(ids=transforms.ids[:count]))
        for count in (number, number + 1)
    ]
    for index in range(min(len(corpus.train), TRIED)):
        blocks = [reader.read([index]) for reader in readers]
        key = next(iter(blocks[0]))
        tokenizer = tokenizers.source if key == "source" else tokenizers.target
        before, after = ("|".join(token_texts(tokenizer, block[key].ids.tolist())) for block in blocks)
        yield before, after
