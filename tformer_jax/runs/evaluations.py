"""The evaluations of a run: on the validation split during training, and on the test split at its end."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from tformer_jax.data.corpora.corpus import spread
from tformer_jax.runs.experiment import Experiment
from tformer_jax.runs.guards import Watchdog
from tformer_jax.runs.record import Record
from tformer_jax.tasks.evaluators.evaluation import Evaluation, Evaluator, Sample
from tformer_jax.tasks.evaluators.remarks import merged
from tformer_jax.tasks.evaluators.split import described, evaluators_for
from tformer_jax.train.early_stopping import BestMetric


class Evaluations:
    """Evaluates parameters, and tracks `train.metric`.

    Args:
        evaluated_at: step of the last evaluation on the validation split.
    """

    def __init__(
        self, experiment: Experiment, record: Record, watchdog: Watchdog, best: Mapping[str, Any], evaluated_at: int
    ):
        self._experiment, self._record, self._watchdog = experiment, record, watchdog
        self.best = BestMetric(experiment.cfg.train, **best)
        self.evaluated_at = evaluated_at
        self.signatures: dict[str, str] = {}
        self.remarks: tuple[str, ...] = ()
        self._last: dict[str, float] = {}

    def validate(self, step: int, params: Any) -> None:
        """Evaluates the parameters of a step on the validation split, for `train.metric`."""
        self._last = self._evaluate(step, "validation", self._validators, params)
        self.best.update(self._last)
        self.evaluated_at = step

    def score(self, step: int) -> float | None:
        """Returns the score of a step by `train.metric`, higher for better ones; None if it was not evaluated."""
        return self.best.score(self._last) if self._last and self.evaluated_at == step else None

    def test(self, step: int, params: Any) -> dict[str, float]:
        """Evaluates the final parameters on the test split; returns the metrics."""
        return self._evaluate(step, "test", self._evaluators("test", limit=0), params)

    def validate_final(self, kind: str, params: Any) -> dict[str, float]:
        """Evaluates final parameters of the kind `train.weights` on the validation split, without a record."""
        metrics = self._measure(self._validators, params).metrics
        self._record.view.evaluation(f"{kind} weights validation", metrics)
        return metrics

    def _evaluate(self, step: int, split: str, evaluators: list[Evaluator], params: Any) -> dict[str, float]:
        evaluation = self._measure(evaluators, params)
        cfg, corpus = self._experiment.cfg, self._experiment.corpus
        title = described(cfg, corpus, split)
        self._record.write_evaluation(step, split, title, evaluation, self.signatures)
        samples = shown_samples(evaluation.outputs, cfg.eval.samples)
        self._record.view.evaluation(f"step {step} {title}", evaluation.metrics, samples, evaluation.remarks)
        return evaluation.metrics

    def _measure(self, evaluators: list[Evaluator], params: Any) -> Evaluation:
        with self._watchdog.paused():
            evaluation = merged(evaluator(params) for evaluator in evaluators)
        self.signatures |= evaluation.signatures
        self.remarks = evaluation.remarks
        return evaluation

    @functools.cached_property
    def _validators(self) -> list[Evaluator]:
        """The evaluators of the validation split, cached so that each compiles once."""
        return self._evaluators("validation", self._experiment.cfg.eval.examples)

    def _evaluators(self, split: str, limit: int) -> list[Evaluator]:
        experiment = self._experiment
        parts = experiment.model, experiment.corpus, experiment.tokenizers
        return evaluators_for(experiment.cfg, *parts, split, limit, shards=experiment.shards)


def shown_samples(outputs: Sequence[Sample], count: int) -> Sequence[Sample]:
    """Returns the first `count` outputs; of several directions, evenly spread ones."""
    if not count or not outputs or outputs[0].direction is None:
        return outputs[:count]
    return [outputs[place] for place in spread(len(outputs), count)]
