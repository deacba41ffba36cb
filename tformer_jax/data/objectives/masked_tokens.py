"""Masked language modeling of "BERT: Pre-training of Deep Bidirectional Transformers" (2019), section 3.1."""

import numpy as np

from tformer_jax.data.columns import TokenIds
from tformer_jax.data.objectives import Objective
from tformer_jax.data.tokenizers import MASK
from tformer_jax.special_tokens import IGNORED

MASKED, RANDOM = 0.8, 0.1
"""Probabilities that a chosen token is replaced by the mask token, or by a random token; otherwise it stays."""


class MaskedTokens(Objective):
    """Chooses a fraction of the tokens, replaces most of them, and predicts all that are chosen.

    Special tokens are neither chosen nor random replacements.
    """

    settings = (*Objective.settings, "noise.whole_words")
    added = (MASK,)

    @property
    def lengths(self) -> dict[str, int]:
        return {"tokens": self.tokens, "targets": self.tokens}

    def __call__(self, ids: np.ndarray, rng: np.random.Generator) -> TokenIds:
        """Returns `tokens` and `targets`, int32 [n]; targets are IGNORED where tokens were not chosen."""
        ordinary = self.vocabulary.ordinary
        candidates = np.flatnonzero(ordinary[ids])
        count = min(self.noise.count(len(ids)), len(candidates))
        if self.noise.whole_words:
            chosen = self._choose(ids, candidates, count, rng)
        else:
            chosen = rng.choice(candidates, count, replace=False)
        draws, replacements = rng.random(len(chosen)), rng.choice(np.flatnonzero(ordinary), len(chosen))
        unmasked = np.where(draws < MASKED + RANDOM, replacements, ids[chosen])
        tokens, targets = ids.copy(), np.full_like(ids, IGNORED)
        tokens[chosen] = np.where(draws < MASKED, self.vocabulary.mask, unmasked)
        targets[chosen] = ids[chosen]
        return {"tokens": tokens, "targets": targets}

    def _choose(self, ids: np.ndarray, candidates: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
        """Chooses words in random order that have at most `count` tokens together, at least one word: int [chosen]."""
        within = self.vocabulary.ends_within_word[ids[:-1]] & self.vocabulary.begins_within_word[ids[1:]]
        words = np.cumsum(np.append(True, ~within))[candidates]
        pieces = np.split(candidates, np.flatnonzero(np.diff(words)) + 1)
        chosen: list[np.ndarray] = []
        for index in rng.permutation(len(pieces)):
            if not chosen or sum(map(len, chosen)) + len(pieces[index]) <= count:
                chosen.append(pieces[index])
        return np.concatenate(chosen)
