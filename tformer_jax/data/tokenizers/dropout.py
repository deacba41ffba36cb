"""BPE-dropout: random segmentation by skipping merges."""

import itertools
import json
from collections.abc import Callable, Sequence

import numpy as np
import tokenizers as hf

from tformer_jax.data.tokenizers.base import Tokenizer
from tformer_jax.data.tokenizers.extended import unextended
from tformer_jax.data.tokenizers.normalization import NormalizedTokenizer


def is_bpe(tokenizer: Tokenizer) -> bool:
    """Returns whether a tokenizer is a BPE, below added special tokens and a normalization."""
    inner = unextended(tokenizer)
    inner = inner.tokenizer if isinstance(inner, NormalizedTokenizer) else inner
    return getattr(inner, "kind", None) == "bpe"


class BpeDropout:
    """Byte-level BPE that skips each merge with probability `p` at each step.

    "BPE-Dropout: Simple and Effective Subword Regularization" (2020), algorithm 1. All randomness comes from the
    generator passed to `encode_batch`, so that a resumed run draws the same segmentations as an uninterrupted one.
    """

    def __init__(self, tokenizer: Tokenizer, p: float):
        self._normalize: Callable[[str], str] = str
        tokenizer = unextended(tokenizer)
        if isinstance(tokenizer, NormalizedTokenizer):
            self._normalize, tokenizer = tokenizer.normalize, tokenizer.tokenizer
        model = tokenizer.to_json()["model"]
        self._p = p
        self._words = hf.Tokenizer.from_str(json.dumps(model)).pre_tokenizer
        self._ids: dict[str, int] = model["model"]["vocab"]
        merges = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["model"]["merges"])
        self._ranks = {tuple(merge): rank for rank, merge in enumerate(merges)}

    def encode_batch(self, texts: Sequence[str], rng: np.random.Generator) -> list[list[int]]:
        """Encodes each text with a random segmentation."""
        words = ((word for word, _ in self._words.pre_tokenize_str(self._normalize(text))) for text in texts)
        return [[self._ids[piece] for word in row for piece in self._merge(list(word), rng)] for row in words]

    def _merge(self, pieces: list[str], rng: np.random.Generator) -> list[str]:
        while len(pieces) > 1:
            kept = rng.random(len(pieces) - 1) >= self._p
            pairs = itertools.pairwise(pieces)
            candidates = [(self._ranks[pair], i) for i, pair in enumerate(pairs) if kept[i] and pair in self._ranks]
            if not candidates:
                break
            _, i = min(candidates)
            pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
        return pieces
