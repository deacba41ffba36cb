"""Remarks on metrics that contradict each other."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping

from tformer_jax.tasks.evaluators.evaluation import Evaluation

ACCURATE = 95.0
"""Token accuracy, in percent, from which outputs should be close to the references."""
LOW_BLEU = 75.0
NEAR_PERFECT = 99.0
FEW_MATCHES = 50.0

Rule = tuple[str, Callable[[Mapping[str, float]], bool]]
RULES: tuple[Rule, ...] = (
    ("bleu", lambda found: found["token_accuracy"] >= ACCURATE and found["bleu"] < LOW_BLEU),
    ("exact_match", lambda found: found["token_accuracy"] >= NEAR_PERFECT and found["exact_match"] < FEW_MATCHES),
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
