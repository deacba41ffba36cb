"""Interface of decoding strategies, with their state of each row besides the KV cache."""

from typing import NamedTuple, Protocol, Self

import jax

from tformer_jax.nn.kv_cache import Lineage


class Report(NamedTuple):
    """Results of one step."""

    tokens: jax.Array
    """int32 [B]: the token that each row, or its best beam, chose."""
    scores: jax.Array
    """float32 [B]: sum of log-probabilities so far, of each row or of its best beam."""
    done: jax.Array
    """bool [B]."""


class Rows(Protocol):
    """A decoding strategy and its state, a pytree of arrays whose first axis is rows.

    Initially, all prompt tokens except the last one are in the cache.
    """

    done: jax.Array
    """bool [B]: rows that are finished, or padding."""

    def next_tokens(self) -> tuple[jax.Array, Lineage | None]:
        """Returns the tokens that the model reads next, int [B, T], PAD in rows that are done, and their lineage."""

    def advance(self, logits: jax.Array) -> Self:
        """Chooses tokens by logits, float32 [B, T, V]; rows that are done do not change."""

    def ended(self, rows: jax.Array) -> Self:
        """Marks `rows`, bool [B], as done."""

    @property
    def length(self) -> int:
        """Maximum number of chosen tokens that fit into the arrays."""

    def widened(self, length: int) -> Self:
        """Extends the arrays to `length` chosen tokens."""

    def report(self) -> Report:
        """Returns the results of the last step."""
