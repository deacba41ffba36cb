"""Several outputs of each row of token ids, with their scores."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn

from tformer_jax.config import Config
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.inference import generate, score
from tformer_jax.inference.batching import in_batches
from tformer_jax.special_tokens import PAD

Ids = list[int]


class Output(NamedTuple):
    """A generated text."""

    text: str
    score: float | None
    """Beam search's score, or else the sum of the log-probabilities of its tokens; None where it is not asked for."""


@dataclasses.dataclass(frozen=True)
class RowDecoder:
    """Decodes rows of sources (`Seq2Seq`) or prompts (`DecoderLM`) as `cfg.decode` says."""

    cfg: Config
    model: nn.Module
    tokenizers: Tokenizers

    def __call__(
        self, params: Any, rows: Sequence[Ids], place: int, *, seed: int, outputs: int, scored: bool
    ) -> list[list[Output]]:
        """So many outputs of each row, best first where beams are searched; those of an empty row are empty.

        `place` is that of the first row among all inputs: what is sampled depends on it, and not on the batches.
        """
        find = self._search if self.cfg.decode.strategy == "beam" else self._choose
        found = find(params, rows, place, seed, outputs, scored)
        decode = self.tokenizers.target.decode
        return [
            [Output(decode(ids), value) for ids, value in pairs] if row else [Output("", None)] * outputs
            for row, pairs in zip(rows, found, strict=True)
        ]

    def _search(self, params: Any, rows: Sequence[Ids], _place: int, _seed: int, outputs: int, _scored: bool) -> Any:
        search = generate.best_translations if self._is_seq2seq else generate.best_continuations

        def run(tokens: np.ndarray, _: np.ndarray) -> list[list[tuple[Ids, float]]]:
            found = search(self.model, params, tokens, length=self._length, cfg=self.cfg.decode)
            pairs = zip(np.asarray(found.tokens).tolist(), np.asarray(found.scores).tolist(), strict=True)
            return [list(zip(*row, strict=True))[:outputs] for row in pairs]

        return self._in_batches(rows, run)

    def _choose(self, params: Any, rows: Sequence[Ids], place: int, seed: int, outputs: int, scored: bool) -> Any:
        choose = generate.translate if self._is_seq2seq else generate.continue_text
        repeated = [row for row in rows for _ in range(outputs)]

        def run(tokens: np.ndarray, places: np.ndarray) -> list[Ids]:
            keys = row_keys(seed, place * outputs + places)
            found = choose(self.model, params, tokens, keys, length=self._length, cfg=self.cfg.decode)
            return [[token for token in ids if token != PAD] for ids in np.asarray(found).tolist()]

        chosen = self._in_batches(repeated, run)
        scores = self._scores(params, repeated, chosen) if scored else [None] * len(chosen)
        pairs = list(zip(chosen, scores, strict=True))
        return [pairs[start : start + outputs] for start in range(0, len(pairs), outputs)]

    def _scores(self, params: Any, rows: Sequence[Ids], chosen: Sequence[Ids]) -> list[float]:
        found = [
            score.pair_row(row, ids) if self._is_seq2seq else score.text_row(row + ids, len(row))
            for row, ids in zip(rows, chosen, strict=True)
        ]
        return [sum(values) for values in score.log_probabilities(self.model, params, found, self.cfg.eval.batch_size)]

    def _in_batches(self, rows: Sequence[Ids], run: Any) -> list[Any]:
        size, max_length = self.cfg.eval.batch_size, self.cfg.model.max_length
        return in_batches(rows, run, size=size, max_length=max_length, pad_left=not self._is_seq2seq)

    @property
    def _is_seq2seq(self) -> bool:
        return self.cfg.model.family == "seq2seq"

    @property
    def _length(self) -> int:
        return min(self.cfg.decode.max_new_tokens, self.cfg.model.max_length)


def row_keys(seed: int, places: np.ndarray) -> jax.Array:
    """One PRNG key a row, by its place among all inputs (int [B]): batching does not change what is sampled."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(seed), places)
