"""What a corpus is."""

import dataclasses
from collections.abc import Sequence

from tformer_jax.config import ConfigError

Example = dict[str, str]
"""{"source", "target"} for translation, {"text"} for language models, {"text", "label"} for classification."""


class DataError(ConfigError):
    """A corpus cannot be read; the message says which file and line, and what to do."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Three splits with random access, and the names of the labels where there are any."""

    train: Sequence[Example]
    validation: Sequence[Example]
    test: Sequence[Example]
    labels: tuple[str, ...] | None = None
