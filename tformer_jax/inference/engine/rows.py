"""Rows of requests, and the tokens that they get."""

import dataclasses
from typing import NamedTuple

from tformer_jax.config import DecodeConfig
from tformer_jax.data.placeholders import UNMASKED, Masked
from tformer_jax.inference.detokenization import TextBuffer, TextStream
from tformer_jax.inference.engine.page_table import Allocation
from tformer_jax.inference.final_texts import Unfinished
from tformer_jax.inference.forced import FirstTokens
from tformer_jax.inference.requests import TokenConstraints


@dataclasses.dataclass
class RequestRow:
    """One row of a request."""

    request: int
    sample: int
    decode: DecodeConfig
    prompt: list[int]
    source: list[int] | None
    """Encoder input."""
    max_new_tokens: int
    """Maximum number of tokens to generate."""
    expected: int
    """Number of new tokens that arrays are first allocated for."""
    reserved: int
    """Number of new tokens that pages are reserved for before the row starts."""
    seeds: tuple[int, int]
    stream: TextStream | TextBuffer
    first: FirstTokens
    num_outputs: int
    scored: bool
    generated: int = 0
    allocation: Allocation = dataclasses.field(default_factory=Allocation)
    copies: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """At most one page to copy, (from, to), once the first row of the request has read the prompt."""
    phrases: TokenConstraints = ()
    masked: Masked = UNMASKED
    """The text of the source, with the placeholders that outputs get back."""
    unfinished: Unfinished | None = None
    """The output, if its text is withheld until its end; its text and tokens are empty."""

    @property
    def slots(self) -> int:
        """Number of cache slots that are reserved before the row starts."""
        return len(self.prompt) + self.reserved * self.decode.width

    def slots_after(self, steps: int) -> int:
        """Returns the maximum number of cache slots that the row uses after `steps` more steps."""
        most = len(self.prompt) + self.max_new_tokens * self.decode.width
        unused = 0 if self.generated else self.decode.width - 1
        return min(self.allocation.filled + steps * self.decode.tokens_per_step - unused, most)


class NewTokens(NamedTuple):
    """Tokens that a row generated in one call, which takes one or more steps."""

    tokens: list[int]
    """For beam search, the tokens of the best beam in each step."""
    scores: list[float]
    """Score of the row after each token."""
    done: bool
