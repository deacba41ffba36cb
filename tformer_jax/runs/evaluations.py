"""The evaluations of a run: on the validation split during training, and on the test split at its end."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tformer_jax.base.errors import UserError, noted
from tformer_jax.data.corpora.corpus import spread
from tformer_jax.runs.experiment import Experiment
from tformer_jax.runs.record import Record
from tformer_jax.tasks.evaluators.evaluation import Evaluation, Evaluator, Sample, merged
from tformer_jax.tasks.evaluators.split import described, evaluators_for
from tformer_jax.train.meter import compile_seconds
from tformer_jax.train.monitor import BestMetric


class Evaluations:
    """Evaluates parameters, and tracks `train.metric`.

    Args:
        evaluated_at: step of the last evaluation on the validation split.
        own: further metrics by name, functions of outputs and references.
    """

    def __init__(
        self,
        experiment: Experiment,
        record: Record,
        best: Mapping[str, Any],
        evaluated_at: int,
        own: Mapping[str, Callable[..., float]],
    ):
        self._experiment, self._record = experiment, record
        self.best = BestMetric(experiment.cfg.train, **best)
        self.evaluated_at, self._own = evaluated_at, own
        self.signatures: dict[str, str] = {}
        self.remarks: tuple[str, ...] = ()
        self.last: dict[str, float] = {}
        """Metrics of the last evaluation on the validation split."""
        self._seconds: float | None = None

    def validate(self, step: int, params: Any) -> None:
        """Evaluates the parameters of a step on the validation split, for `train.metric`."""
        started, compiled = time.perf_counter(), compile_seconds()
        self.last = self._evaluate(step, "validation", self._validators, params)
        self._seconds = time.perf_counter() - started - (compile_seconds() - compiled)
        self.best.update(self.last)
        self.evaluated_at = step

    def seconds_left(self, step: int) -> float | None:
        """Estimates the time of the evaluations from a step on by the last one; None before the first one."""
        if self._seconds is None:
            return None
        cfg, corpus = self._experiment.cfg, self._experiment.corpus
        steps, every = cfg.train.steps, cfg.train.eval_every
        validations = steps // every - (step - 1) // every + (steps % every > 0)
        return self._seconds * (validations + len(corpus.test) / len(spread(len(corpus.validation), cfg.eval.examples)))

    def score(self, step: int) -> float | None:
        """Returns the score of a step by `train.metric`, higher for better ones; None if it was not evaluated."""
        return self.best.score(self.last) if self.last and self.evaluated_at == step else None

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
        evaluation = merged(evaluator(params) for evaluator in evaluators)
        own = own_metrics(self._own, evaluation.outputs)
        metrics = evaluation.metrics | own
        metrics = self._experiment.group.from_first(lambda: metrics)  # programs may not repeat theirs exactly
        evaluation = dataclasses.replace(evaluation, metrics=metrics)
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


def own_metrics(functions: Mapping[str, Callable[..., float]], samples: Sequence[Sample]) -> dict[str, float]:
    """Returns metrics that were given in Python: functions of a list of all outputs and a list of their references.

    Raises:
        UserError: one does not return a finite number.
    """
    values = {}
    for name, function in functions.items():
        outputs, references = [sample.output for sample in samples], [sample.reference for sample in samples]
        with noted(f"in metrics[{name!r}]"):
            values[name] = value = function(outputs, references)
        if np.shape(value) or np.asarray(value).dtype.kind not in "iuf" or not np.isfinite(value):
            raise UserError(f"metrics[{name!r}] returned {value!r}: it must return a finite number")
    return {name: float(value) for name, value in values.items()}


def shown_samples(outputs: Sequence[Sample], count: int) -> Sequence[Sample]:
    """Returns the first `count` outputs; with several directions, evenly spread outputs."""
    if not count or not outputs or outputs[0].direction is None:
        return outputs[:count]
    return [outputs[place] for place in spread(len(outputs), count)]
