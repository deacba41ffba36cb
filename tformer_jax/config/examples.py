"""Settings of what happens to examples: filters when a corpus is read, and corruption for pre-training objectives."""

import dataclasses
from typing import ClassVar, NamedTuple

from tformer_jax.config import kinds
from tformer_jax.config.fields import Section, UsedBy, setting


@dataclasses.dataclass(frozen=True)
class FilterConfig(Section):
    """Which examples are dropped when a corpus is read; each filter counts what it drops."""

    path: ClassVar[str] = "data.filters"

    blank_sides: bool = setting(True, "drop examples with a text that has no visible character, in every split")
    identical_sides: bool = setting(False, "drop training pairs whose source and target are the same text")
    duplicates: bool = setting(
        False,
        "drop training examples that occurred before, in all of data.train or, with weights or stages, in their entry",
    )
    max_length_ratio: float | None = setting(
        None, "drop training pairs with a side of more than this many times the characters of the other", above=1
    )


SENTINELS = 100
"""Number of sentinel tokens of span corruption, as in T5."""


class SpanSizes(NamedTuple):
    """Sizes of one example of span corruption."""

    tokens: int
    """Tokens of text."""
    noise: int
    """Tokens that are replaced by sentinels."""
    spans: int

    @property
    def source(self) -> int:
        """Tokens of the source, with one token for its end."""
        return self.tokens - self.noise + self.spans + 1

    @property
    def target(self) -> int:
        """Tokens of the target, with one token for its end."""
        return self.noise + self.spans + 1


def _objectives(name: str) -> UsedBy:
    return {"objective": kinds.Users(kinds.OBJECTIVES, f"noise.{name}")}


@dataclasses.dataclass(frozen=True)
class NoiseConfig(Section):
    """Which tokens `data.objective` corrupts."""

    path: ClassVar[str] = "data.noise"

    density: float = setting(
        0.15,
        "fraction of the tokens that are corrupted (BERT, T5: 0.15, BART: 0.3)",
        above=0.0,
        high=0.49,
        used_by=_objectives("density"),
    )
    mean_span: float = setting(
        3.0, "mean length of corrupted spans, in tokens (T5, BART: 3)", low=1.0, used_by=_objectives("mean_span")
    )
    whole_words: bool = setting(False, "mask all tokens of a word, or none", used_by=_objectives("whole_words"))
    permute_sentences: bool = setting(
        False, "shuffle the sentences of the source (BART)", used_by=_objectives("permute_sentences")
    )

    def count(self, tokens: int) -> int:
        """Returns the number of corrupted tokens of a text of `tokens` tokens, at least one."""
        return max(round(tokens * self.density), 1)

    def span_sizes(self, tokens: int) -> SpanSizes:
        """Returns the sizes of an example of `tokens` tokens (T5's `random_spans_noise_mask`).

        Spans are separated by at least one token that stays; `tokens` is at least 2.
        """
        noise = min(self.count(tokens), tokens - 1)
        spans = max(round(noise / self.mean_span), 1)
        return SpanSizes(tokens, noise, min(spans, tokens - noise))

    def longest_spans(self, length: int) -> SpanSizes:
        """Returns the sizes of the longest text whose source has at most `length` tokens (T5's `random_spans_helper`).

        `length` is at least 3.
        """
        tokens = 2
        while self.span_sizes(tokens + 1).source <= length:
            tokens += 1
        return self.span_sizes(tokens)
