"""What decoding keeps of each row besides its cache, and the loop that runs all rows to their end."""

from typing import NamedTuple, Protocol, Self, TypeVar

import jax

from tformer_jax.nn.kv_cache import DecoderCache, Lineage


class Read(Protocol):
    """The model: what it makes of tokens and of a cache of those before them."""

    def __call__(
        self, tokens: jax.Array, cache: DecoderCache, lineage: Lineage | None = None, *, last_only: bool = True
    ) -> tuple[jax.Array, DecoderCache]:
        """tokens int [B, T] -> float32 logits [B, 1, V] of the last one, and the cache that holds them.

        Unless `last_only`, logits [B, T, V], and each token is read as if it were the last one: those after it take
        no room of an expert from it. With a `lineage`, the tokens are beams: logits [B, T, V].
        """


class Report(NamedTuple):
    """What a step did."""

    tokens: jax.Array
    """int32 [B]: what each row chose; of beams, the best one's choice."""
    scores: jax.Array
    """float32 [B]: of each row, or of its best beam, so far: the sum of log-probabilities."""
    done: jax.Array
    """bool [B]."""


class Rows(Protocol):
    """A strategy with its state, a pytree whose arrays all have rows on their first axis.

    It starts with a prompt, of which all but the last token has been read.
    """

    done: jax.Array
    """bool [B]: rows that are finished, or only fill up the batch."""

    def reading(self) -> tuple[jax.Array, Lineage | None]:
        """What is read next: int [B, T], PAD in rows that are done."""

    def advance(self, logits: jax.Array) -> Self:
        """Chooses by logits, float32 [B, T, V]; rows that are done stay as they are."""

    def ended(self, rows: jax.Array) -> Self:
        """With more rows, bool [B], that are done."""

    @property
    def length(self) -> int:
        """The most tokens that there is room for."""

    def widened(self, length: int) -> Self:
        """With room for so many chosen tokens."""

    def report(self) -> Report:
        """The last choice."""


AnyRows = TypeVar("AnyRows", bound=Rows)


def finish(read: Read, cache: DecoderCache, rows: AnyRows) -> AnyRows:
    """Reads what the rows choose, until all are done."""

    def advance(state: tuple[AnyRows, DecoderCache]) -> tuple[AnyRows, DecoderCache]:
        rows, cache = state
        tokens, lineage = rows.reading()
        logits, cache = read(tokens, cache, lineage)
        return rows.advance(logits), cache

    return jax.lax.while_loop(lambda state: ~state[0].done.all(), advance, (rows, cache))[0]
