"""The evaluator interface and its results."""

import dataclasses
from typing import Any, Protocol

TOKENIZED = "outputs:moses"
"""End of the signatures of scores of tokenized outputs."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """One example and the model's output for it."""

    source: str
    reference: str
    output: str
    score: float | None = None
    """Beam score of an output, or probability of a predicted label; None if it is not computed."""
    finish_reason: str | None = None
    """`length` if a limit ended the output, else `stop`; None for a label."""


@dataclasses.dataclass(frozen=True)
class Losses:
    """Summed losses of successive parts of a split: texts or windows of a language model, or several of them."""

    nll: list[float]
    """Sum over the labels of each part, in nats."""
    labels: list[int]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Metrics by name, with what they were computed from, and sacreBLEU's signatures of the metrics that have one."""

    metrics: dict[str, float]
    outputs: list[Sample] = dataclasses.field(default_factory=list)
    signatures: dict[str, str] = dataclasses.field(default_factory=dict)
    losses: Losses | None = None
    remarks: tuple[str, ...] = ()
    """Sentences about what may make the metrics misleading."""


class Evaluator(Protocol):
    """Computes metrics of a model on a split."""

    def __call__(self, params: Any) -> Evaluation:
        """Evaluates the model with the parameters `params`."""
        ...
