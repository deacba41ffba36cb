"""Beam search for outputs that must contain phrases."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np

from tformer_jax.inference import sampling
from tformer_jax.inference.beam import UNUSED, WORST, BeamState
from tformer_jax.inference.requests import TokenConstraints
from tformer_jax.nn.padding import take_per_row
from tformer_jax.nn.xla import top_k
from tformer_jax.special_tokens import PAD


@flax.struct.dataclass
class Phrases:
    """Constraints of B rows: C each, of A phrases of P tokens; PAD pads phrases, and fills missing ones."""

    tokens: jax.Array
    """int32 [B, C, A, P]."""
    glued: jax.Array
    """bool [B, C, A]: as in `PhraseTokens`."""
    open: jax.Array
    """bool [B, C, A]."""

    @classmethod
    def from_rows(cls, rows: Sequence[TokenConstraints], sizes: tuple[int, int, int]) -> "Phrases":
        """Returns NumPy arrays."""
        tokens: Any = np.full((len(rows), *sizes), PAD, np.int32)
        edges: Any = np.zeros((2, len(rows), *sizes[:2]), bool)
        for row, constraints in enumerate(rows):
            for place, phrases in enumerate(constraints):
                for number, phrase in enumerate(phrases):
                    tokens[row, place, number, : len(phrase.ids)] = phrase.ids
                    edges[:, row, place, number] = phrase.glued, phrase.open
        return cls(tokens, *edges)

    @property
    def lengths(self) -> jax.Array:
        """int32 [B, C, A]: number of tokens of each phrase; 0 for missing ones."""
        return (self.tokens != PAD).sum(axis=-1, dtype=jnp.int32)


@flax.struct.dataclass
class ConstrainedBeamState(BeamState):
    """State of beam search whose outputs contain a phrase of each constraint ("dynamic beam allocation").

    "Fast Lexically Constrained Decoding with Dynamic Beam Allocation for Neural Machine Translation" (2018), in the
    vectorized form of "Improved Lexically Constrained Decoding for Translation and Monolingual Rewriting" (2019).
    Candidates are the most probable continuations of each beam, and the tokens that continue or begin a phrase. A
    candidate's bank is its number of phrase tokens: of all complete phrases, plus the longest phrase beginning that it
    ends with. Beams are chosen in turn: the best candidate of each bank, from the highest bank, then the second best of
    each, and so on. Only a hypothesis with all phrases may end; if none has them all at the maximum length, incomplete
    ones are outputs. Phrases are whole words: a letter before or after them makes them incomplete.
    """

    phrases: Phrases
    met: jax.Array
    """bool [B, k, C]: constraints with a phrase that ended before the last token, and constraints of padding."""

    @classmethod
    def start(cls, *args: Any, **options: Any) -> BeamState:
        """As `BeamState.start`, with the option `phrases`."""
        missing = (jnp.asarray(options["phrases"].tokens) == PAD).all(axis=(2, 3))[:, None]
        return super().start(*args, met=jnp.repeat(missing, options["cfg"].beams, axis=1), **options)

    def _candidates(self, logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        k, n = self.cfg.beams, 1 + len(self.constraints.eos)
        allowed, total = self._log_weights(logits)
        values, tokens = top_k(allowed, min(n * k, logits.shape[-1]))
        values = jnp.where(jnp.arange(values.shape[-1]) < n * self.settings.beams[:, None, None], values, -jnp.inf)
        wanted = self._next_of_phrases(self._matches())
        repeated = ((wanted[..., None] == tokens[..., None, :]) & (values > -jnp.inf)[..., None, :]).any(axis=-1)
        repeated |= jnp.tril(wanted[..., None] == wanted[..., None, :], -1).any(axis=-1)
        own = jnp.where(repeated | (wanted == PAD), -jnp.inf, jnp.take_along_axis(allowed, wanted, axis=-1))
        sums = self.sums[..., None] + jnp.concatenate([values, own], axis=-1) - total
        B, _, m = sums.shape
        sums, tokens = sums.reshape(B, k * m), jnp.concatenate([tokens, wanted], axis=-1).reshape(B, k * m)
        parents = jnp.broadcast_to(jnp.repeat(jnp.arange(k), m), tokens.shape)
        order = in_turn(self._after(parents, tokens).bank, sums)[:, : n * k]
        sums, parents, tokens = (jnp.take_along_axis(x, order, axis=1) for x in (sums, parents, tokens))
        sums = jnp.where(jnp.arange(n * k) < n * self.settings.beams[:, None], sums, UNUSED)
        return self._with_forced(sums, parents, tokens)

    def _allowed(self, logits: jax.Array, total: jax.Array) -> jax.Array:
        incomplete = ~(self.met | self._pending(self._matches()).any(axis=-1)).all(axis=-1)
        ends = sampling.among(jnp.arange(logits.shape[-1]), self.constraints.eos)
        return jnp.where(ends & incomplete[..., None], -jnp.inf, super()._allowed(logits, total))

    def _best_running(self, sums: jax.Array, ends: jax.Array) -> tuple[jax.Array, jax.Array]:
        chosen = ~ends & (jnp.cumsum(~ends, axis=1) <= self.settings.beams[:, None])
        return top_k(jnp.where(chosen, sums, UNUSED), self.cfg.beams)

    def _may_finish(self, sums: jax.Array, ends: jax.Array, parents: jax.Array, tokens: jax.Array) -> jax.Array:
        complete = self._after(parents, tokens).met.all(axis=-1)
        several = (ends & complete & (sums > WORST / 2)).any(axis=1) | (self.finished.scores > WORST).any(axis=1)
        return complete | ~several[:, None]

    def _carried(self, parents: jax.Array, tokens: jax.Array, order: jax.Array) -> dict[str, Any]:
        return {"met": take_per_row(self._after(parents, tokens).met_before, order)}

    def _matches(self) -> jax.Array:
        """Returns bool [B, k, C, A, P + 1]: entry j says whether the last j tokens are the first j of a phrase."""
        tokens, P = self.phrases.tokens[:, None], self.phrases.tokens.shape[-1]
        places = self.generated[:, None] + jnp.arange(-P - 1, 0)
        last = jnp.take_along_axis(self.running, jnp.maximum(places, 0)[:, None], axis=2)
        last = jnp.where(places[:, None] >= 0, last, PAD)
        after_letter = (self._edges[1][last] & (last != PAD))[:, :, None, None, ::-1]
        separate = ~(self.phrases.glued[:, None, ..., None] & after_letter)
        same = [
            (last[:, :, None, None, P + 1 - j :] == tokens[..., :j]).all(axis=-1) & (j <= self.phrases.lengths[:, None])
            for j in range(P + 1)
        ]
        return jnp.stack(same, axis=-1) & separate

    @property
    def _edges(self) -> jax.Array:
        """bool [2, V]: tokens that begin with a letter, and that end with one."""
        packed = np.frombuffer(self.constraints.word_edges, np.uint8).reshape(2, -1)
        return jnp.asarray(np.unpackbits(packed, axis=1).astype(bool))

    def _pending(self, matches: jax.Array) -> jax.Array:
        """Returns bool [B, k, C, A]: phrases that the last tokens complete, unless the next one adds a letter."""
        lengths = jnp.broadcast_to(self.phrases.lengths[:, None], matches.shape[:-1])
        return jnp.take_along_axis(matches, lengths[..., None], axis=-1)[..., 0] & (lengths > 0)

    def _next_of_phrases(self, matches: jax.Array) -> jax.Array:
        """Returns the tokens that continue the phrases of constraints that are not met, int32 [B, k, C * A], or PAD."""
        B, k, C, A, _ = matches.shape
        lengths = jnp.where(matches, jnp.arange(matches.shape[-1]), -1).max(axis=-1)
        missing = ~(self.met | self._pending(matches).any(axis=-1))[..., None] & (lengths >= 0)
        padded = jnp.pad(self.phrases.tokens, ((0, 0), (0, 0), (0, 0), (0, 1)), constant_values=PAD)[:, None]
        following = jnp.take_along_axis(padded, jnp.maximum(lengths, 0)[..., None], axis=-1)[..., 0]
        return jnp.where(missing, following, PAD).reshape(B, k, C * A)

    def _after(self, parents: jax.Array, tokens: jax.Array) -> "_Progress":
        """Returns the progress of candidates, given their beams and new tokens, int32 [B, M]."""
        matches = self._matches()
        follows = self._edges[0][tokens][..., None, None] & self.phrases.open[:, None]
        met_before = take_per_row(self.met, parents)
        met_before |= (take_per_row(self._pending(matches), parents) & ~follows).any(axis=-1)
        same = self.phrases.tokens[:, None] == tokens[..., None, None, None]
        grown = take_per_row(matches, parents)[..., :-1] & same
        count = jnp.where(grown, jnp.arange(1, grown.shape[-1] + 1), 0).max(axis=-1)
        lengths = self.phrases.lengths[:, None]
        met = met_before | ((count == lengths) & (lengths > 0)).any(axis=-1)
        bank = (met * lengths.max(axis=-1)).sum(axis=-1) + jnp.where(met[..., None], 0, count).max(axis=(2, 3))
        return _Progress(met_before, met, bank)


class _Progress(NamedTuple):
    """Progress of M candidates of each row."""

    met_before: jax.Array
    """bool [B, M, C]: as `ConstrainedBeamState.met`."""
    met: jax.Array
    """bool [B, M, C]: the same, with phrases that the last token completes."""
    bank: jax.Array
    """int32 [B, M]: number of tokens of phrases."""


def in_turn(banks: jax.Array, sums: jax.Array) -> jax.Array:
    """Returns the order of candidates, int [B, M], that takes the best of each bank, then the second best of each, ...

    Args:
        banks: int [B, M]; the highest comes first in each round.
        sums: float32 [B, M], the larger the better; candidates whose sum is missing come last.
    """
    banks = jnp.where(sums > WORST / 2, banks, -1)
    order = jnp.lexsort((-sums, -banks))
    banks = jnp.take_along_axis(banks, order, axis=1)
    places = jnp.arange(banks.shape[1])
    begins = jnp.pad(banks[:, 1:] != banks[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    turns = places - jax.lax.cummax(jnp.where(begins, places, 0), axis=1)
    turns = jnp.where(banks < 0, banks.shape[1], turns)
    return jnp.take_along_axis(order, jnp.argsort(turns, axis=1, stable=True), axis=1)
