"""What an evaluator is, and what it finds."""

import dataclasses
from typing import Any, Protocol


@dataclasses.dataclass(frozen=True)
class Sample:
    """One example and what the model made of it."""

    source: str
    reference: str
    output: str


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Numbers by name, and some samples to look at."""

    metrics: dict[str, float]
    samples: list[Sample] = dataclasses.field(default_factory=list)


class Evaluator(Protocol):
    """Measures one thing on one split."""

    def __call__(self, params: Any) -> Evaluation:
        """The model with these parameters."""
        ...
