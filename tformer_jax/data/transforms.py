"""From examples of text to token ids, and from token ids to what a model reads."""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from tformer_jax.config import Config
from tformer_jax.data.columns import Block, Column
from tformer_jax.data.corpora import Example
from tformer_jax.data.tokenizers import BpeDropout, Tokenizers
from tformer_jax.special_tokens import BOS, EOS


class IdReader(Protocol):
    """The examples of a split as token ids, by their place."""

    def __len__(self) -> int: ...

    def read(self, places: Sequence[int], rng: np.random.Generator | None = None) -> Block:
        """The ids of some examples by the example's keys; `rng` is what random tokenization draws from."""
        ...


@dataclasses.dataclass(frozen=True)
class Tokenised:
    """The examples of a split, turned into token ids as they are read; with `dropout`, each time into other ones."""

    examples: Sequence[Example]
    tokenizers: Tokenizers
    labels: tuple[str, ...] | None = None
    dropout: float = 0.0

    def __len__(self) -> int:
        return len(self.examples)

    def read(self, places: Sequence[int], rng: np.random.Generator | None = None) -> Block:
        """The ids of the examples in some places."""
        examples = [self.examples[int(place)] for place in places]
        return tokenise(examples, self.tokenizers, self.labels, self.dropout, rng)


def tokenise(
    examples: Sequence[Example],
    tokenizers: Tokenizers,
    labels: tuple[str, ...] | None = None,
    dropout: float = 0.0,
    rng: np.random.Generator | None = None,
) -> Block:
    """The ids of each example, without special tokens; a label becomes its place in `labels`."""
    block = {}
    for key in examples[0]:
        values = [example[key] for example in examples]
        if key == "label":
            assert labels is not None
            block[key] = Column.of([[labels.index(value)] for value in values])
            continue
        tokenizer = tokenizers.source if key == "source" else tokenizers.target
        if dropout and rng is not None:
            block[key] = Column.of(BpeDropout(tokenizer, dropout).encode_batch(values, rng))
        else:
            block[key] = Column.of(tokenizer.encode_batch(values))
    return block


@dataclasses.dataclass
class Framer:
    """Turns ids into what a model of the family reads, cut to the lengths of its rows; the first cut is reported."""

    length: int
    source_length: int
    carry: bool = False
    """Let the rest of a document that is too long follow in further examples."""
    reported: bool = dataclasses.field(default=False, init=False)

    def __call__(self, ids: Block) -> Block:
        """{"source", "target_in", "target_out"} of translation pairs, {"tokens", "label"} of classified texts,
        {"tokens", "targets"} of documents: as many examples, but for documents that are empty or carried on."""
        if "label" in ids:
            return {"tokens": self._cut(ids["text"], self.length), "label": ids["label"]}
        if "text" in ids:
            tokens, targets = ids["text"], ids["text"].followed_by(EOS)
            if not self.carry:
                tokens, targets = self._cut(tokens, self.length), targets.cut(self.length)
            return {"tokens": tokens.in_pieces(self.length), "targets": targets.in_pieces(self.length)}
        target = self._cut(ids["target"], self.length - 1)
        return {
            "source": self._cut(ids["source"], self.source_length - 1).ended_by(EOS),
            "target_in": target.begun_by(BOS),
            "target_out": target.ended_by(EOS),
        }

    def _cut(self, column: Column, limit: int) -> Column:
        cut = column.cut(limit)
        if cut is not column and not self.reported:
            logging.getLogger(__name__).warning(
                "cutting texts of more than %d tokens, the first of %d; a longer last bucket in data.bucket_lengths, "
                "or a longer data.window, keeps them whole",
                limit,
                column.lengths[column.lengths > limit][0],
            )
            self.reported = True
        return cut


def framer(cfg: Config) -> Framer:
    """The framer of the rows that `cfg.data` describes."""
    data = cfg.data
    if data.batching == "buckets":
        return Framer(data.bucket_lengths[-1], data.bucket_lengths[-1])
    return Framer(data.window, data.source_window or data.window, carry=data.overlong == "carry")
