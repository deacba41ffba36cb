"""The state of a decoding strategy: greedy decoding, sampling and beam search."""

from typing import NamedTuple, Protocol, Self

import jax

from tformer_jax.nn.kv_cache import BeamAncestry


class StepResult(NamedTuple):
    """Results of one decoding step."""

    tokens: jax.Array
    """int32 [B]: newest token of each row, or of its best beam."""
    scores: jax.Array
    """float32 [B]: sum of log-probabilities so far, of each row or of its best beam."""
    done: jax.Array
    """bool [B]."""


class DecodingState(Protocol):
    """State of a decoding strategy: a pytree of arrays whose first axis is rows; the KV cache is separate.

    Initially, all prompt tokens except the last one are in the cache.
    """

    done: jax.Array
    """bool [B]: rows that are finished, or padding."""

    def next_tokens(self) -> tuple[jax.Array, BeamAncestry | None]:
        """Returns the next inputs of the model, int [B, T], PAD in rows that are done, and their ancestry."""

    def advance(self, logits: jax.Array) -> Self:
        """Chooses the next tokens, given logits, float32 [B, T, V]; rows that are done do not change."""

    def mark_done(self, rows: jax.Array) -> Self:
        """Marks `rows`, bool [B], as done."""

    @property
    def length(self) -> int:
        """Size of the token arrays; only beam search extends them."""

    def extended(self, length: int) -> Self:
        """Extends the arrays to `length` generated tokens."""

    def result(self) -> StepResult:
        """Returns the results of the last step."""
