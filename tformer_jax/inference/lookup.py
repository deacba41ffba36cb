"""Decoding of several tokens per step, whose drafts are looked up in the prompt and the output.

Each step reads the newest token and drafts of the next ones, and keeps the drafts that decoding by single tokens would
have chosen: samples too, since each position has a PRNG key of its own. This is speculative decoding ("Fast Inference
from Transformers via Speculative Decoding", 2023) with the drafts of "Prompt Lookup Decoding" (2023).
"""

import dataclasses

import flax
import jax
import jax.numpy as jnp

from tformer_jax.inference.decoding_state import SamplingState, StepResult
from tformer_jax.inference.model_step import Step
from tformer_jax.nn.decoder_cache import DecoderCache
from tformer_jax.special_tokens import PAD

MATCH = 2
"""Number of the newest tokens that are looked up."""


def drafts(history: jax.Array, counts: jax.Array, length: int) -> jax.Array:
    """Looks up the newest `MATCH` tokens of each row, and returns the tokens that follow them at the last place.

    Drafts that reach the end of a row repeat from that place on.

    Args:
        history: int32 [B, L], tokens, then PAD.
        counts: int32 [B], number of tokens in `history`.
        length: number of tokens of a draft.

    Returns:
        int32 [B, length]; PAD in rows without a match.
    """
    columns = jnp.arange(history.shape[1])
    follows = (columns >= MATCH) & (columns < counts[:, None])
    for back in range(1, MATCH + 1):
        newest = jnp.take_along_axis(history, jnp.maximum(counts - back, 0)[:, None], axis=1)
        follows &= jnp.roll(history, back, axis=1) == newest
    start = jnp.where(follows, columns, 0).max(axis=1, keepdims=True)
    repeated = start + jnp.arange(length) % jnp.maximum(counts[:, None] - start, 1)
    return jnp.where(start > 0, jnp.take_along_axis(history, repeated, axis=1), PAD)


def skip_drafts(step: Step) -> Step:
    """Returns a step that reads only the first token of each row if no row has a draft; logits are [B, T, V]."""

    def read_first(tokens: jax.Array, cache: DecoderCache) -> tuple[jax.Array, DecoderCache]:
        logits, cache = step(tokens[:, :1], cache)
        return jnp.broadcast_to(logits, (*tokens.shape, logits.shape[-1])), cache

    def either(tokens: jax.Array, cache: DecoderCache, _: None = None) -> tuple[jax.Array, DecoderCache]:
        has_draft = (tokens[:, 1:] != PAD).any()
        return jax.lax.cond(has_draft, step, read_first, tokens, cache)

    return either


@flax.struct.dataclass
class LookupState(SamplingState):
    """State of greedy decoding or sampling with drafts; `history` has the size of all tokens."""

    accepted: StepResult
    """Tokens and scores of the last step, [B, T]."""
    removed: jax.Array
    """int32 [B]: number of draft tokens that the last step rejected."""

    @classmethod
    def from_state(cls, state: SamplingState, length: int) -> "LookupState":
        """Returns a state that drafts `length` tokens per step."""
        fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
        B = len(state.counts)
        nothing = StepResult(jnp.full((B, length + 1), PAD), jnp.zeros((B, length + 1)), state.done)
        return cls(**fields, accepted=nothing, removed=jnp.zeros_like(state.counts))

    def next_tokens(self) -> tuple[jax.Array, None]:
        """Returns the newest token of each row and its draft, PAD where no more tokens can follow, int32 [B, T]."""
        (newest, _), length = super().next_tokens(), self.accepted.tokens.shape[1] - 1
        left = self.max_new_tokens - self.generated - 1
        draft = drafts(self.history, self.counts, length)
        usable = (jnp.arange(length) < left[:, None]) & (newest != PAD)
        return jnp.concatenate([newest, jnp.where(usable, draft, PAD)], axis=1), None

    def advance(self, logits: jax.Array) -> "LookupState":
        """Generates one token in each unfinished row, and another one after each token that agrees with the draft.

        Args:
            logits: float32 [B, T, V], for the tokens of `next_tokens`.
        """
        read, _ = self.next_tokens()
        B, T = read.shape
        following = jnp.pad(read[:, 1:], ((0, 0), (0, 1)), constant_values=PAD)
        state = dataclasses.replace(self, accepted=StepResult(jnp.full((B, T), PAD), jnp.zeros((B, T)), self.done))

        def generate(carry: tuple[jax.Array, jax.Array, LookupState]) -> tuple[jax.Array, jax.Array, LookupState]:
            place, going, state = carry
            paused = dataclasses.replace(state, done=~going)
            ahead = SamplingState.advance(paused, jax.lax.dynamic_slice_in_dim(logits, place, 1, axis=1))
            done = jnp.where(going, ahead.done, state.done)
            tokens = state.accepted.tokens.at[:, place].set(jnp.where(going, ahead.last, PAD))
            scores = state.accepted.scores.at[:, place].set(ahead.scores)
            state = dataclasses.replace(ahead, done=done, accepted=StepResult(tokens, scores, done))
            return place + 1, going & ~done & (ahead.last == following[:, place]), state

        initial = jnp.zeros((), jnp.int32), ~self.done, state
        _, _, state = jax.lax.while_loop(lambda carry: carry[1].any(), generate, initial)
        count = (read != PAD).sum(axis=1, dtype=jnp.int32)
        return dataclasses.replace(state, removed=count - (state.generated - self.generated))

    def trim(self, cache: DecoderCache) -> DecoderCache:
        return cache.remove_newest(self.removed)

    def result(self) -> StepResult:
        return self.accepted
