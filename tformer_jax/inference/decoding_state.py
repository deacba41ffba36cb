"""States of decoding: the interface of a strategy, and greedy decoding and sampling."""

import abc
import dataclasses
from typing import Any, NamedTuple, Self

import flax
import jax
import jax.numpy as jnp

from tformer_jax.inference.constraints import Constraints, constrain, forbid
from tformer_jax.inference.forced import FirstTokens, ForcedTokens
from tformer_jax.inference.sampling import RowSettings, among, choose
from tformer_jax.nn.decoder_cache import DecoderCache
from tformer_jax.nn.slots import BeamAncestry
from tformer_jax.special_tokens import PAD


class StepResult(NamedTuple):
    """Results of one decoding step."""

    tokens: jax.Array
    """int32 [B, T]: new tokens of each row, or of its best beam, then PAD."""
    scores: jax.Array
    """float32 [B, T]: sum of log-probabilities up to each token, of each row or of its best beam."""
    done: jax.Array
    """bool [B]."""


class DecodingState(abc.ABC):
    """State of a decoding strategy: a pytree of arrays whose first axis is rows; the KV cache is separate.

    Initially, all prompt tokens except the last one are in the cache.
    """

    done: jax.Array
    """bool [B]: rows that are finished, or padding."""

    @abc.abstractmethod
    def next_tokens(self) -> tuple[jax.Array, BeamAncestry | None]:
        """Returns the next inputs of the model, int [B, T], PAD in rows that are done, and their ancestry."""

    @abc.abstractmethod
    def advance(self, logits: jax.Array) -> Self:
        """Chooses the next tokens, given logits, float32 [B, T, V]; rows that are done do not change."""

    def trim(self, cache: DecoderCache) -> DecoderCache:
        """Removes the tokens of rejected drafts from a cache."""
        return cache

    def fits(self, cache: DecoderCache) -> jax.Array | bool:
        """Returns whether a cache has room for the next step; for all but beam search, the caller counts the slots."""
        return True

    def mark_done(self, rows: jax.Array) -> Self:
        """Marks `rows`, bool [B], as done."""
        state: Any = self
        return dataclasses.replace(state, done=self.done | rows)

    def fork(self, source: jax.Array, to: jax.Array, seeds: jax.Array) -> Self:
        """Copies row `source` to row `to`, with other seeds, uint32 [2]; the outputs of beam search share one row."""
        raise NotImplementedError

    @property
    @abc.abstractmethod
    def length(self) -> int:
        """Size of the token arrays; only beam search resizes them."""

    @abc.abstractmethod
    def resized(self, length: int, forced: int) -> Self:
        """Pads or cuts the arrays to `length` generated tokens, and pads them to `forced` first ones."""

    @abc.abstractmethod
    def result(self) -> StepResult:
        """Returns the results of the last step."""


@flax.struct.dataclass
class SamplingState(DecodingState):
    """State of greedy decoding or sampling: one output per row, token by token."""

    last: jax.Array
    """int32 [B]: the token to read next."""
    history: jax.Array
    """int32 [B, L]: prompt and generated tokens, then PAD; L may be 0 unless `constraints.need_history`."""
    counts: jax.Array
    """int32 [B]: number of tokens of the prompt and the output."""
    generated: jax.Array
    """int32 [B]: number of generated tokens."""
    max_new_tokens: jax.Array
    """int32 [B]: maximum number of tokens to generate."""
    done: jax.Array
    scored: jax.Array
    """bool [B]: rows whose `scores` are computed, at the cost of a pass over the logits."""
    scores: jax.Array
    """float32 [B]: sum of the log-probabilities of the generated tokens, forced ones excluded; 0 unless `scored`."""
    keys: jax.Array
    """[B] PRNG keys; ignored by greedy decoding."""
    settings: RowSettings
    forced: ForcedTokens
    constraints: Constraints = flax.struct.field(pytree_node=False)

    @classmethod
    def start(
        cls,
        last: jax.Array,
        counts: jax.Array,
        max_new_tokens: jax.Array,
        keys: jax.Array,
        settings: RowSettings,
        constraints: Constraints,
        *,
        history: jax.Array,
        scored: jax.Array | None = None,
        forced: ForcedTokens | None = None,
    ) -> "SamplingState":
        """Returns the initial state.

        Args:
            last: int32 [B], last token of the prompt.
            counts: int32 [B], number of tokens of the prompt.
            max_new_tokens: int32 [B], maximum number of tokens to generate; 0 for padding rows.
            history: int32 [B, L], the prompt, then PAD; L is 0, or at least the largest `counts + max_new_tokens`.
            scored: bool [B], rows whose log-probabilities are summed; None: no row.
            forced: tokens with which outputs start; None: all are chosen.
        """
        return cls(
            last=last,
            history=history,
            counts=counts,
            generated=jnp.zeros_like(counts),
            max_new_tokens=max_new_tokens,
            done=max_new_tokens <= 0,
            scored=jnp.zeros(counts.shape, bool) if scored is None else scored,
            scores=jnp.zeros(counts.shape),
            keys=keys,
            settings=settings,
            forced=forced or ForcedTokens.from_rows([FirstTokens()] * len(counts)),
            constraints=constraints,
        )

    def next_tokens(self) -> tuple[jax.Array, None]:
        """Returns the next input of the model: the newest token of each row, int32 [B, 1]."""
        return jnp.where(self.done, PAD, self.last)[:, None], None

    def advance(self, logits: jax.Array) -> Self:
        """Generates one token in each row that is not done, given logits, float32 [B, 1, V]."""
        logits = logits[:, 0]
        allowed = forbid(logits, self.constraints)
        allowed = constrain(allowed, self.history, self.counts, self.generated, self.settings, self.constraints)
        keys = jax.vmap(jax.random.fold_in)(self.keys, self.generated)
        tokens = choose(allowed, self.settings, keys)
        scored, forced = self.scored & ~self.done, self.forced.next(self.generated)
        if forced is not None:
            tokens, scored = jnp.where(forced == PAD, tokens, forced), scored & (forced == PAD)
        active = ~self.done
        generated = self.generated + active
        columns = jnp.where(active, self.counts, self.history.shape[1])
        return dataclasses.replace(
            self,
            last=jnp.where(active, tokens, self.last),
            history=self.history.at[jnp.arange(len(tokens)), columns].set(tokens, mode="drop"),
            counts=self.counts + active,
            generated=generated,
            done=self.done | among(tokens, self.constraints.eos) | (generated >= self.max_new_tokens),
            scores=self._scores(logits, tokens, scored),
        )

    def _scores(self, logits: jax.Array, tokens: jax.Array, counts: jax.Array) -> jax.Array:
        """Adds the log-probabilities of tokens [B], given logits [B, V], to `scores` where `counts`, bool [B]."""

        def added() -> jax.Array:
            chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
            return self.scores + jnp.where(counts, chosen - jax.nn.logsumexp(logits, axis=1), 0)

        return jax.lax.cond(counts.any(), added, lambda: self.scores)

    def fork(self, source: jax.Array, to: jax.Array, seeds: jax.Array) -> "SamplingState":
        rows = jax.tree.map(lambda leaf: leaf.at[to].set(leaf[source]), self)
        return dataclasses.replace(rows, keys=rows.keys.at[to].set(prng_keys(seeds[None])[0]))

    @property
    def length(self) -> int:
        return self.history.shape[1]

    def resized(self, length: int, forced: int) -> "SamplingState":
        """Pads `forced` only: histories have their full length from the start."""
        return dataclasses.replace(self, forced=self.forced.extended(forced))

    def result(self) -> StepResult:
        return StepResult(self.last[:, None], self.scores[:, None], self.done)


def prng_keys(seeds: jax.Array) -> jax.Array:
    """Returns PRNG keys [P] for seeds, uint32 [P, 2]."""
    return jax.vmap(lambda pair: jax.random.fold_in(jax.random.key(pair[0]), pair[1]))(seeds)
