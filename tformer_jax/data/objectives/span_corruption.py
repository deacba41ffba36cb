"""Span corruption of "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer" (2020).

Sections 3.1.4 and 3.3.4; sizes and distributions are as in T5's `random_spans_noise_mask`.
"""

from typing import Self

import numpy as np

from tformer_jax.config import DataConfig
from tformer_jax.config.examples import SENTINELS
from tformer_jax.data.columns import TokenIds
from tformer_jax.data.objectives import Objective, check_window
from tformer_jax.data.objectives.vocabulary import Vocabulary
from tformer_jax.data.tokenizers import SENTINEL_TOKENS


class SpanCorruption(Objective):
    """Replaces spans of the source by sentinels; the target has each sentinel, followed by its span."""

    settings = (*Objective.settings, "noise.mean_span")
    added = SENTINEL_TOKENS

    @staticmethod
    def check(data: DataConfig) -> None:
        """Raises `ConfigError` for windows that are too short, or need more sentinels than there are."""
        check_window(data)
        if (spans := data.noise.longest_spans(data.window).spans) > SENTINELS:
            raise data.error(
                "window", f"needs {spans} sentinels, but there are only {SENTINELS}; increase data.noise.mean_span"
            )

    @classmethod
    def build(cls, cfg: DataConfig, vocabulary: Vocabulary) -> Self:
        """Builds the objective of the longest texts whose sources have `cfg.window` tokens."""
        further = vocabulary.around - 1  # the sizes have one EOS token
        return cls(cfg.noise, cfg.noise.longest_spans(cfg.window - further).tokens, vocabulary)

    @property
    def lengths(self) -> dict[str, int]:
        further, sizes = self.vocabulary.around - 1, self.noise.span_sizes(self.tokens)
        target = sizes.target + further
        return {"source": sizes.source + further, "target_in": target, "target_out": target}

    def __call__(self, ids: np.ndarray, rng: np.random.Generator) -> TokenIds:
        """Returns `source`, `target_in` and `target_out`."""
        sizes = self.noise.span_sizes(len(ids))
        gaps = draw_parts(sizes.tokens - sizes.noise, sizes.spans, rng)
        spans = draw_parts(sizes.noise, sizes.spans, rng)
        pieces = np.split(ids, np.cumsum(np.stack([gaps, spans], axis=1).ravel())[:-1])
        sentinels = np.split(self.vocabulary.sentinels[: sizes.spans], sizes.spans)
        source = [part for pair in zip(pieces[::2], sentinels, strict=True) for part in pair]
        target = [part for pair in zip(sentinels, pieces[1::2], strict=True) for part in pair]
        return self.vocabulary.pair(np.concatenate(source), np.concatenate(target))


def draw_parts(total: int, parts: int, rng: np.random.Generator) -> np.ndarray:
    """Divides `total` into `parts` positive numbers, each such division with equal probability: int [parts]."""
    cuts = 1 + np.sort(rng.choice(total - 1, parts - 1, replace=False))
    return np.diff(cuts, prepend=0, append=total)
