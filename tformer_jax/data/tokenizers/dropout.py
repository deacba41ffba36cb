"""BPE dropout: merges that are left out at random make the segmentation of each reading another one."""

import itertools
import json
from collections.abc import Sequence

import numpy as np
import tokenizers as hf

from tformer_jax.data.tokenizers.base import Tokenizer


class BpeDropout:
    """Byte-level BPE whose merges are left out with probability `p` at each step.

    "BPE-Dropout: Simple and Effective Subword Regularization" (2020), algorithm 1. All randomness comes from the
    generator that is passed, so that a resumed run segments as an uninterrupted one.
    """

    def __init__(self, tokenizer: Tokenizer, p: float):
        model = tokenizer.to_json()["model"]
        self._p = p
        self._words = hf.Tokenizer.from_str(json.dumps(model)).pre_tokenizer
        self._ids: dict[str, int] = model["model"]["vocab"]
        merges = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["model"]["merges"])
        self._ranks = {tuple(merge): rank for rank, merge in enumerate(merges)}

    def encode_batch(self, texts: Sequence[str], rng: np.random.Generator) -> list[list[int]]:
        """The ids of each text."""
        words = ((word for word, _ in self._words.pre_tokenize_str(text)) for text in texts)
        return [[self._ids[piece] for word in found for piece in self._merged(list(word), rng)] for found in words]

    def _merged(self, pieces: list[str], rng: np.random.Generator) -> list[str]:
        while len(pieces) > 1:
            kept = rng.random(len(pieces) - 1) >= self._p
            pairs = itertools.pairwise(pieces)
            found = [
                (self._ranks[pair], place) for place, pair in enumerate(pairs) if kept[place] and pair in self._ranks
            ]
            if not found:
                break
            _, place = min(found)
            pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
        return pieces
