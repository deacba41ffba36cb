"""Denoising of "BART: Denoising Sequence-to-Sequence Pre-training" (2020), section 2.2."""

from typing import Self

import numpy as np

from tformer_jax.config import DataConfig
from tformer_jax.data.columns import TokenIds
from tformer_jax.data.objectives import Objective, check_window
from tformer_jax.data.objectives.vocabulary import Vocabulary
from tformer_jax.data.tokenizers import MASK


class Denoising(Objective):
    """Text infilling, with sentence permutation if `noise.permute_sentences`; the target is the whole text.

    Infilling replaces spans, whose lengths have a Poisson distribution, by one mask token each; a span of length 0
    inserts one. Spans are separated by at least one token that stays.
    """

    settings = (*Objective.settings, "noise.mean_span", "noise.permute_sentences")
    added = (MASK,)

    check = staticmethod(check_window)

    @classmethod
    def build(cls, cfg: DataConfig, vocabulary: Vocabulary) -> Self:
        """Builds the objective of texts that fill a target of `cfg.window` tokens."""
        return cls(cfg.noise, cfg.window - vocabulary.around, vocabulary)

    @property
    def lengths(self) -> dict[str, int]:
        return dict.fromkeys(("source", "target_in", "target_out"), self.tokens + self.vocabulary.around)

    def __call__(self, ids: np.ndarray, rng: np.random.Generator) -> TokenIds:
        """Returns `source`, `target_in` and `target_out`."""
        permuted = self._permute_sentences(ids, rng) if self.noise.permute_sentences else ids
        return self.vocabulary.pair(self._infill(permuted, rng), ids)

    def _infill(self, ids: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Replaces spans by mask tokens: int32 [at most n]."""
        spans = draw_span_lengths(min(self.noise.count(len(ids)), len(ids) - 1), self.noise.mean_span, rng)
        remaining = len(ids) - spans.sum()
        places = np.sort(rng.choice(remaining + 1, len(spans), replace=False))
        starts = places + np.cumsum(spans) - spans
        inside = np.arange(spans.sum()) - np.repeat(np.cumsum(spans) - spans, spans)
        return np.insert(np.delete(ids, np.repeat(starts, spans) + inside), places, self.vocabulary.mask)

    def _permute_sentences(self, ids: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        sentences = np.split(ids, np.flatnonzero(self.vocabulary.ends_sentence[ids[:-1]]) + 1)
        return np.concatenate([sentences[index] for index in rng.permutation(len(sentences))])


def draw_span_lengths(total: int, mean: float, rng: np.random.Generator) -> np.ndarray:
    """Draws Poisson lengths until they add up to `total`; the last is cut: int [at most `total`].

    Lengths of 0 are left out if there would be more than `total` lengths.
    """
    lengths: list[int] = []
    while sum(lengths) < total:
        lengths.append(min(int(rng.poisson(mean)), total - sum(lengths)))
    return np.array(lengths if len(lengths) <= total else [length for length in lengths if length])
