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
    """Metrics by name, with some samples and sacreBLEU's signatures of the metrics that have one."""

    metrics: dict[str, float]
    samples: list[Sample] = dataclasses.field(default_factory=list)
    signatures: dict[str, str] = dataclasses.field(default_factory=dict)


class Evaluator(Protocol):
    """Measures one thing on one split."""

    def __call__(self, params: Any) -> Evaluation:
        """The model with these parameters."""
        ...
