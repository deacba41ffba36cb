"""Span corruption of "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer" (2020).

Sections 3.1.4 and 3.3.4; sizes and distributions are those of T5's `random_spans_noise_mask`.
"""

import dataclasses

import numpy as np

from tformer_jax.config import DataConfig, NoiseConfig
from tformer_jax.data.columns import TokenIds
from tformer_jax.data.objectives.vocabulary import Vocabulary


@dataclasses.dataclass(frozen=True)
class SpanCorruption:
    """Replaces spans of the source by sentinels; the target has each sentinel, followed by its span."""

    noise: NoiseConfig
    tokens: int
    lengths: dict[str, int]
    vocabulary: Vocabulary

    @classmethod
    def of(cls, cfg: DataConfig, vocabulary: Vocabulary) -> "SpanCorruption":
        """Builds the objective of the longest texts whose sources have `cfg.window` tokens."""
        further = vocabulary.around - 1  # the sizes have one EOS token
        sizes = cfg.noise.longest_spans(cfg.window - further)
        target = sizes.target + further
        lengths = {"source": sizes.source + further, "target_in": target, "target_out": target}
        return cls(cfg.noise, sizes.tokens, lengths, vocabulary)

    def __call__(self, ids: np.ndarray, rng: np.random.Generator) -> TokenIds:
        """Returns `source`, `target_in` and `target_out`."""
        sizes = self.noise.span_sizes(len(ids))
        kept = random_parts(sizes.tokens - sizes.noise, sizes.spans, rng)
        spans = random_parts(sizes.noise, sizes.spans, rng)
        pieces = np.split(ids, np.cumsum(np.stack([kept, spans], axis=1).ravel())[:-1])
        sentinels = np.split(self.vocabulary.sentinels[: sizes.spans], sizes.spans)
        source = [part for pair in zip(pieces[::2], sentinels, strict=True) for part in pair]
        target = [part for pair in zip(sentinels, pieces[1::2], strict=True) for part in pair]
        return self.vocabulary.pair(np.concatenate(source), np.concatenate(target))


def random_parts(total: int, parts: int, rng: np.random.Generator) -> np.ndarray:
    """Divides `total` into `parts` positive numbers, each such division with equal probability: int [parts]."""
    cuts = 1 + np.sort(rng.choice(total - 1, parts - 1, replace=False))
    return np.diff(cuts, prepend=0, append=total)
