"""The interface of objectives, and how they are built from the settings."""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from tformer_jax.config import DataConfig
from tformer_jax.data.columns import TokenIds
from tformer_jax.data.objectives.denoising import Denoising
from tformer_jax.data.objectives.masked_tokens import MaskedTokens
from tformer_jax.data.objectives.span_corruption import SpanCorruption
from tformer_jax.data.objectives.vocabulary import Vocabulary
from tformer_jax.data.tokenizers import Tokenizer


class Objective(Protocol):
    """Makes model inputs and labels of a text. All randomness comes from the generator of a call."""

    @property
    def tokens(self) -> int:
        """Number of tokens of a text that fills a row."""
        ...

    @property
    def lengths(self) -> dict[str, int]:
        """Length of a row by batch key."""
        ...

    def __call__(self, ids: np.ndarray, rng: np.random.Generator) -> TokenIds:
        """Makes an example of the token ids of a text, int32 [n], 2 <= n <= `tokens`."""
        ...


OBJECTIVES: dict[str, Callable[[DataConfig, Vocabulary], Objective]] = {
    "masked_tokens": MaskedTokens.of,
    "span_corruption": SpanCorruption.of,
    "denoising": Denoising.of,
}
"""Builds each value of `data.objective`."""


def objective_of(cfg: DataConfig, tokenizer: Tokenizer) -> Objective:
    """Returns the objective that `cfg.objective` names, for texts in the vocabulary of `tokenizer`."""
    assert cfg.objective is not None
    return OBJECTIVES[cfg.objective](cfg, Vocabulary(tokenizer))
