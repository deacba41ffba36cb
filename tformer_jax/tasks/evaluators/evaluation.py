"""The evaluator interface and its results."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Self

TOKENIZED = "outputs:moses"
"""End of the signatures of scores of tokenized outputs."""


class Segment(NamedTuple):
    """A text to translate, and what its translation is compared with."""

    source: str
    references: tuple[str, ...]
    direction: str | None = None
    """Such as `en-de`; None: the direction of the settings."""
    document: str | None = None
    """Name of the document that the text is from."""

    @classmethod
    def from_example(cls, example: Mapping[str, str]) -> Self:
        """Returns the segment of an example of a translation corpus."""
        return cls(example["source"], (example["target"],), example.get("direction"))


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
    more_references: tuple[str, ...] = ()
    direction: str | None = None
    document: str | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    """Scores of the output alone, of metrics that a run stores."""

    @property
    def references(self) -> tuple[str, ...]:
        """All references."""
        return self.reference, *self.more_references

    def to_record(self) -> dict[str, Any]:
        """Returns the fields, without empty fields from `more_references` on."""
        optional = ("more_references", "direction", "document", "metrics")
        return {name: value for name, value in vars(self).items() if value or name not in optional}


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


Evaluator = Callable[[Any], Evaluation]
"""Computes metrics of a model on a split, given the model's parameters."""
ACCURATE = 95.0
"""Token accuracy, in percent, from which outputs should be close to the references."""
LOW_BLEU = 75.0
NEAR_PERFECT = 99.0
FEW_MATCHES = 50.0

RULES: tuple[tuple[str, Callable[[Mapping[str, float]], bool]], ...] = (
    ("bleu", lambda metrics: metrics["token_accuracy"] >= ACCURATE and metrics["bleu"] < LOW_BLEU),
    ("exact_match", lambda metrics: metrics["token_accuracy"] >= NEAR_PERFECT and metrics["exact_match"] < FEW_MATCHES),
)
"""Metrics of texts, and whether they are far below the accuracy of single tokens."""


def merged(evaluations: Iterable[Evaluation]) -> Evaluation:
    """Returns the results of all evaluators of a split as one, with remarks on metrics that contradict each other."""
    whole = Evaluation({})
    for part in evaluations:
        whole = Evaluation(
            whole.metrics | part.metrics,
            whole.outputs + part.outputs,
            whole.signatures | part.signatures,
            whole.losses or part.losses,
            whole.remarks + part.remarks,
        )
    return dataclasses.replace(whole, remarks=(*whole.remarks, *contradictions(whole.metrics)))


def contradictions(metrics: Mapping[str, float]) -> Iterator[str]:
    """Yields a sentence for each metric of texts that the accuracy of their tokens contradicts."""
    for name, contradicts in RULES:
        if {"token_accuracy", name} <= metrics.keys() and contradicts(metrics):
            yield (
                f"{name} {metrics[name]:.4g} at a token accuracy of {metrics['token_accuracy']:.4g} %: look for "
                "outputs that a limit cut, unknown tokens, or references that are written or tokenized in another way"
            )
