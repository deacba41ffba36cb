"""From examples of text to token ids, and from token ids to what a model reads."""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from tformer_jax.config import Config
from tformer_jax.data.corpora import Example
from tformer_jax.data.tokenizers import BpeDropout, Tokenizers
from tformer_jax.special_tokens import BOS, EOS

Ids = dict[str, np.ndarray]
"""Token ids by the example's keys, int32 [tokens]; a label is an array of one number."""
Tokens = dict[str, np.ndarray]
"""One example as token ids by the keys of a batch; a class label is an array of one number."""


Block = dict[str, tuple[np.ndarray, np.ndarray]]
"""Several examples: by key, the ids of all of them side by side, and how many each has."""


class IdReader(Protocol):
    """Examples as token ids, by their place in a split."""

    def __len__(self) -> int: ...

    def read(self, places: Sequence[int], rng: np.random.Generator | None = None) -> list[Ids]:
        """The ids of some examples; `rng` is what random tokenization draws from."""
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

    def read(self, places: Sequence[int], rng: np.random.Generator | None = None) -> list[Ids]:
        """The ids of the examples in some places."""
        return tokenise(
            [self.examples[int(place)] for place in places], self.tokenizers, self.labels, self.dropout, rng
        )


def tokenise(
    examples: Sequence[Example],
    tokenizers: Tokenizers,
    labels: tuple[str, ...] | None = None,
    dropout: float = 0.0,
    rng: np.random.Generator | None = None,
) -> list[Ids]:
    """The ids of each example, without special tokens; a label becomes its place in `labels`."""
    found: list[Ids] = [{} for _ in examples]
    for key in examples[0]:
        values = [example[key] for example in examples]
        if key == "label":
            assert labels is not None
            columns = [[labels.index(value)] for value in values]
        else:
            tokenizer = tokenizers.source if key == "source" else tokenizers.target
            if dropout and rng is not None:
                columns = BpeDropout(tokenizer, dropout).encode_batch(values, rng)
            else:
                columns = tokenizer.encode_batch(values)
        for ids, column in zip(found, columns, strict=True):
            ids[key] = np.asarray(column, np.int32)
    return found


@dataclasses.dataclass
class Framer:
    """Turns ids into what a model of the family reads, cut to the lengths of its rows.

    The first example that must be cut is reported.
    """

    length: int
    source_length: int
    carry: bool = False
    """Let the rest of a document that is too long follow in further examples."""
    reported: bool = dataclasses.field(default=False, init=False)

    def __call__(self, ids: Ids) -> list[Tokens]:
        """{"source", "target_in", "target_out"} of a translation pair, {"tokens", "label"} of a classified text,
        {"tokens", "targets"} of a document: one example, but for documents that are empty or carried on."""
        if "label" in ids:
            return [{"tokens": self._cut(ids["text"], self.length), "label": ids["label"]}]
        if "text" in ids:
            return self._document(np.append(ids["text"], np.int32(EOS)))
        source = self._cut(ids["source"], self.source_length - 1)
        target = self._cut(ids["target"], self.length - 1)
        end = np.int32(EOS)
        return [
            {
                "source": np.append(source, end),
                "target_in": np.concatenate([[np.int32(BOS)], target]),
                "target_out": np.append(target, end),
            }
        ]

    def _document(self, ids: np.ndarray) -> list[Tokens]:
        if not self.carry:
            ids = self._cut(ids, self.length + 1)
        starts = range(0, len(ids) - 1, self.length)
        return [
            {
                "tokens": ids[start : min(start + self.length, len(ids) - 1)],
                "targets": ids[start + 1 : start + self.length + 1],
            }
            for start in starts
        ]

    def _cut(self, ids: np.ndarray, limit: int) -> np.ndarray:
        if len(ids) > limit and not self.reported:
            logging.getLogger(__name__).warning(
                "cutting texts of more than %d tokens, the first of %d; a longer last bucket in data.bucket_lengths, "
                "or a longer data.window, keeps them whole",
                limit,
                len(ids),
            )
            self.reported = True
        return ids[:limit]


def framer(cfg: Config) -> Framer:
    """The framer of the rows that `cfg.data` describes."""
    data = cfg.data
    if data.batching == "buckets":
        return Framer(data.bucket_lengths[-1], data.bucket_lengths[-1])
    return Framer(data.window, data.source_window or data.window, carry=data.overlong == "carry")


def join_examples(examples: Sequence[Tokens]) -> Block:
    """The examples as few arrays, which travel fast between processes."""
    keys = examples[0] if examples else ()
    return {
        key: (
            np.concatenate([example[key] for example in examples]),
            np.array([len(example[key]) for example in examples]),
        )
        for key in keys
    }


def split_examples(block: Block) -> list[Tokens]:
    """The inverse of `join_examples`."""
    columns = []
    for ids, lengths in block.values():
        stops = np.cumsum(lengths).tolist()
        columns.append([ids[start:stop] for start, stop in zip([0, *stops], stops, strict=False)])
    return [dict(zip(block, row, strict=True)) for row in zip(*columns, strict=True)]
