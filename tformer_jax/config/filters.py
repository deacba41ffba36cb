"""Settings of filters of examples."""

import dataclasses
from typing import ClassVar

from tformer_jax.config.fields import Section, setting


@dataclasses.dataclass(frozen=True)
class FilterConfig(Section):
    """Which examples are dropped when a corpus is read; each filter counts what it drops."""

    path: ClassVar[str] = "data.filters"

    blank_sides: bool = setting(True, "drop examples with a text that has no visible character, in every split")
    identical_sides: bool = setting(False, "drop training pairs whose source and target are the same text")
    duplicates: bool = setting(False, "drop training examples that occurred before")
    max_length_ratio: float | None = setting(
        None, "drop training pairs with a side of more than this many times the characters of the other", above=1
    )
