"""Pre-training objectives: inputs are corrupted texts, and labels are the tokens to restore."""

import dataclasses
from typing import ClassVar, Self

import numpy as np

from tformer_jax.config import DataConfig, NoiseConfig, kinds
from tformer_jax.data.columns import TokenIds
from tformer_jax.data.objectives.vocabulary import Vocabulary
from tformer_jax.data.tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True)
class Objective:
    """Makes model inputs and labels of a text. All randomness comes from the generator of a call."""

    settings: ClassVar[tuple[str, ...]] = ("noise.density",)
    """The settings that depend on `data.objective` and that this objective uses."""
    added: ClassVar[tuple[str, ...]]
    """Special tokens that it appends to a vocabulary that lacks them."""

    noise: NoiseConfig
    tokens: int
    """Number of tokens of a text that fills a row."""
    vocabulary: Vocabulary

    @classmethod
    def build(cls, cfg: DataConfig, vocabulary: Vocabulary) -> Self:
        """Builds the objective of texts that fill rows of `cfg.window` tokens."""
        return cls(cfg.noise, cfg.window, vocabulary)

    @property
    def lengths(self) -> dict[str, int]:
        """Length of a row by batch key."""
        raise NotImplementedError

    def __call__(self, ids: np.ndarray, rng: np.random.Generator) -> TokenIds:
        """Makes an example of the token ids of a text, int32 [n], 2 <= n <= `tokens`."""
        raise NotImplementedError


def build_objective(cfg: DataConfig, tokenizer: Tokenizer) -> Objective:
    """Builds the objective that `cfg.objective` names, for texts in the vocabulary of `tokenizer`."""
    assert cfg.objective is not None
    kind: type[Objective] = kinds.load(kinds.OBJECTIVES, cfg.objective)
    return kind.build(cfg, Vocabulary(tokenizer))


def check_window(data: DataConfig) -> None:
    """Raises `ConfigError` for windows without room for two tokens and the end of a text."""
    if data.window < 3:
        raise data.error("window", f"must be at least 3 for data.objective={data.objective!r}")
