"""BPE-dropout: texts are segmented at random."""

import dataclasses
import functools
import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping
from typing import ClassVar

from tformer_jax.config import DataConfig, kinds
from tformer_jax.config.fields import setting
from tformer_jax.config.transforms import Transform
from tformer_jax.data.tokenizers import Tokenizer
from tformer_jax.data.tokenizers.huggingface import BYTE
from tformer_jax.data.transforms.base import IdChange, Training
from tformer_jax.special_tokens import UNK


@dataclasses.dataclass(frozen=True)
class BpeDropout(Transform):
    """Segments texts with BPE that skips merges at random; texts of other tokenizers are as before."""

    on_ids: ClassVar[bool] = True
    probability: float = setting(1.0, "probability with which a text is segmented at random", low=0, high=1)
    rate: float = setting(0.1, "probability of skipping a merge", low=0, high=1)

    def check_fit(self, data: DataConfig) -> None:
        """Raises `ConfigError` if no tokenizer can be a BPE."""
        sides = data.tokenizer_kinds
        if not any(kind == "file" or kinds.load(kinds.TOKENIZERS, kind).is_bpe for kind in sides):
            raise self.error("kind", f"needs a BPE tokenizer, not data.tokenizer={sides[0]!r}")

    def prepare(self, training: Training) -> IdChange:
        """Returns the segmentation.

        Raises:
            UserError: no tokenizer is a BPE.
        """
        tokenizers = {training.tokenizers.source, training.tokenizers.target}
        merges = {tokenizer: RandomMerges(tokenizer, self.rate) for tokenizer in tokenizers if tokenizer.is_bpe}
        if not merges:
            raise self.error("kind", "needs a BPE tokenizer, which the data does not have")
        return functools.partial(_segment, merges)


def _segment(
    merges: Mapping[Tokenizer, "RandomMerges"], ids: list[int], text: str, tokenizer: Tokenizer, rng: random.Random
) -> list[int]:
    return merges[tokenizer].encode(text, rng) if tokenizer in merges else ids


class RandomMerges:
    """BPE that skips each merge with probability `rate` at each step.

    "BPE-Dropout: Simple and Effective Subword Regularization" (2020), algorithm 1.

    Args:
        tokenizer: one that `is_bpe`.
    """

    def __init__(self, tokenizer: Tokenizer, rate: float):
        library = tokenizer.to_library()
        assert library is not None
        model = json.loads(library.to_str())["model"]
        self._rate, self._tokenizer, self._words = rate, tokenizer, library.pre_tokenizer
        self._ids: dict[str, int] = model["vocab"]
        merges = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
        self._ranks = {tuple(merge): rank for rank, merge in enumerate(merges)}

    def encode(self, text: str, rng: random.Random) -> list[int]:
        """Encodes a text with a random segmentation."""
        parts = self._tokenizer.split_symbols(self._tokenizer.normalize(text))
        return [i for part in parts for i in self._encode(part, rng)]

    def _encode(self, part: str | int, rng: random.Random) -> Iterator[int]:
        if isinstance(part, int):
            yield part
            return
        for word, _ in self._words.pre_tokenize_str(part):
            for piece in self._merge(list(word), rng):
                yield from [self._ids[piece]] if piece in self._ids else self._outside(piece)

    def _outside(self, character: str) -> list[int]:
        """Returns the ids of a character outside of the vocabulary."""
        pieces = map(BYTE.format, character.encode())
        return [self._ids[piece] for piece in pieces] if self._tokenizer.fallback_bytes else [UNK]

    def _merge(self, pieces: list[str], rng: random.Random) -> list[str]:
        """Returns the pieces of a word; a merge is drawn only if it would be the first by rank."""
        while True:
            lowest, place = math.inf, -1
            for number, pair in enumerate(itertools.pairwise(pieces)):
                rank = self._ranks.get(pair, math.inf)
                if rank < lowest and rng.random() >= self._rate:
                    lowest, place = rank, number
            if place < 0:
                return pieces
            pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
