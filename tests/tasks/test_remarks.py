"""Remarks on metrics that contradict each other."""

import pytest

from tformer_jax.tasks.evaluators.evaluation import Evaluation, merged


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        ({"token_accuracy": 99.6, "exact_match": 0.0, "bleu": 90.0}, ["exact_match 0 at a token accuracy of 99.6 %"]),
        ({"token_accuracy": 100.0, "exact_match": 0.0, "bleu": 73.0}, ["bleu 73 at", "exact_match 0 at"]),
        ({"token_accuracy": 70.0, "exact_match": 6.0, "bleu": 37.0}, []),
        ({"token_accuracy": 99.8, "exact_match": 98.0, "bleu": 98.0}, []),
        ({"token_accuracy": 99.0}, []),
    ],
)
def test_metrics_of_tokens_far_above_those_of_texts_are_remarked_on(metrics, told):
    remarks = merged([Evaluation(metrics)]).remarks
    assert len(remarks) == len(told)
    assert all(sentence.startswith(start) for sentence, start in zip(remarks, told, strict=True))
