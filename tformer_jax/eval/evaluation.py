"""The evaluator interface and its results."""

import dataclasses
from typing import Any, Protocol


@dataclasses.dataclass(frozen=True)
class Sample:
    """One example and the model's output for it."""

    source: str
    reference: str
    output: str
    score: float | None = None
    """Beam score of an output, or probability of a predicted label; None if it is not computed."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Metrics by name, with the outputs that were made and sacreBLEU's signatures of the metrics that have one."""

    metrics: dict[str, float]
    outputs: list[Sample] = dataclasses.field(default_factory=list)
    signatures: dict[str, str] = dataclasses.field(default_factory=dict)


class Evaluator(Protocol):
    """Computes metrics of a model on a split."""

    def __call__(self, params: Any) -> Evaluation:
        """Evaluates the model with the parameters `params`."""
        ...
