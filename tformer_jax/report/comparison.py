"""Compares two runs: metrics with a paired test, losses at equal cost, settings, and outputs."""

import dataclasses
import functools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from tformer_jax.base.numbers import counted
from tformer_jax.config import comparable
from tformer_jax.config.metrics import base_metric, group_of_metric
from tformer_jax.report.bootstrap import RESAMPLES, Estimate, estimates
from tformer_jax.report.outputs import Outputs
from tformer_jax.report.run import RunFiles, differing_keys
from tformer_jax.report.series import Series

FRACTIONS = (0.25, 0.5, 0.75, 1.0)
"""Parts of the shared range of steps, tokens or seconds at which losses are compared."""
CHANGED = 10
"""Number of outputs shown that gained most, and that lost most."""


@dataclasses.dataclass(frozen=True)
class LossAt:
    """Losses of both runs at an equal number of steps, tokens or seconds; None where a run has none."""

    axis: str
    at: float
    train: tuple[float | None, float | None]
    validation: tuple[float | None, float | None]


@dataclasses.dataclass(frozen=True)
class Change:
    """An example whose two outputs differ in quality, as `Outputs.quality` measures it."""

    source: str
    reference: str
    texts: tuple[str, str]
    quality: tuple[float, float]

    @property
    def gain(self) -> float:
        """By how much the second output is better."""
        return self.quality[1] - self.quality[0]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Differences between the runs `a`, the baseline, and `b`."""

    a: RunFiles
    b: RunFiles
    split: str | None
    """The split whose outputs are compared; None if there is none with the same examples and labels."""
    metrics: dict[str, list[Estimate]]
    """Estimates of both runs by metric."""
    losses: list[LossAt]
    settings: dict[str, tuple[Any, Any]]
    """Settings that differ, by their full names."""
    gained: list[Change]
    lost: list[Change]
    equal: int | None
    """Number of examples with equal outputs; None if only losses are compared."""
    examples: int
    """Number of examples, or of parts of the split whose losses are compared."""

    @property
    def overall(self) -> dict[str, list[Estimate]]:
        """The estimates over all examples, or the means over all directions."""
        return {name: pair for name, pair in self.metrics.items() if not group_of_metric(name)}

    @property
    def by_direction(self) -> dict[str, dict[str, list[Estimate]]]:
        """The estimates of each direction by metric; empty if there is only one."""
        directions: dict[str, dict[str, list[Estimate]]] = {}
        for name, pair in self.metrics.items():
            if direction := group_of_metric(name):
                directions.setdefault(direction, {})[base_metric(name)] = pair
        return directions

    @property
    def example_counts(self) -> str:
        """The numbers of compared examples and of equal outputs, or of parts of the split, in words."""
        if self.equal is None:
            return f"{counted(self.examples, 'part')} of the split"
        return f"{counted(self.examples, 'example')}, {self.equal:,} with equal outputs"

    @property
    def steps(self) -> tuple[int, int]:
        """The steps after which the outputs of both runs were generated."""
        assert self.split is not None
        return self.a.outputs[self.split].step, self.b.outputs[self.split].step

    @functools.cached_property
    def same_tokens(self) -> bool:
        """Whether losses per token are comparable: by the settings of labels, and by the saved tokenizers."""
        if self.a.task.references == "labels":
            return True
        if comparable.labels(self.a.config) != comparable.labels(self.b.config):
            return False
        a, b = _target_tokenizer(self.a), _target_tokenizer(self.b)
        if a and b:
            return bool(a == b)
        return comparable.target_tokens(self.a.config) == comparable.target_tokens(self.b.config)

    def why_unpaired(self, *names: str) -> str:
        """Returns a sentence on why the metrics of both runs, called `names`, are not compared; "" if they are."""
        if self.metrics:
            return ""
        if self.a.task is not self.b.task:
            return "The models have different tasks."
        if unevaluated := [name for name, run in zip(names, (self.a, self.b), strict=True) if not run.split]:
            return f"Not evaluated yet: {', '.join(unevaluated)}."
        return "The runs were not evaluated on the same examples and labels, so their metrics cannot be paired."

    @property
    def loss_remark(self) -> str:
        """Why losses are shown without their differences; "" if they have differences."""
        return "" if self.same_tokens else "; no differences, because the runs predict other tokens"


def compare_runs(a: RunFiles, b: RunFiles, resamples: int = RESAMPLES) -> Comparison:
    """Compares run `b` with the baseline `a` on the test split, or else the validation split, of the same examples."""
    split = shared_split(a, b)
    metrics: dict[str, list[Estimate]] = {}
    changes: list[Change] = []
    examples, equal = 0, None
    if split:
        pair = a.outputs[split], b.outputs[split]
        metrics = estimates(pair, a.task, resamples)
        changes = list(dict.fromkeys(_changes(a, b, split)))  # equal examples once
        examples = len(pair[0].labels)
        if a.task.references and pair[0].texts:
            equal = sum(mine == theirs for mine, theirs in zip(pair[0].texts, pair[1].texts, strict=True))
            examples = len(pair[0].texts)
    names = differing_keys([a.config, b.config])
    return Comparison(
        a,
        b,
        split,
        metrics,
        list(_losses(a, b)) if a.task is b.task else [],
        {name: (a.config.get(name), b.config.get(name)) for name in names},
        sorted((change for change in changes if change.gain > 0), key=lambda change: -change.gain)[:CHANGED],
        sorted((change for change in changes if change.gain < 0), key=lambda change: change.gain)[:CHANGED],
        equal,
        examples,
    )


def shared_split(a: RunFiles, b: RunFiles) -> str | None:
    """Returns "test", or else "validation", if both runs have current outputs of the same examples of it."""
    for split in ("test", "validation"):
        if a.task is not b.task or not (a.is_current(split) and b.is_current(split)):
            continue
        mine, theirs = a.outputs[split], b.outputs[split]
        if not (mine.texts or len(mine.labels)):
            continue
        same = _same_documents if a.task.documents and a.task.generates else _same_examples
        if same(mine, theirs) and _same_labels(a, b, split):
            return split
    return None


def _target_tokenizer(run: RunFiles) -> Any:
    """Returns the JSON of the run's target tokenizer; None if it cannot be read."""
    try:
        return json.loads((run.folder / "tokenizers" / "target.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _same_examples(a: Outputs, b: Outputs) -> bool:
    return (a.sources, a.references, a.directions) == (b.sources, b.references, b.directions)


def _same_documents(a: Outputs, b: Outputs) -> bool:
    """Returns whether the parts have equal numbers of labels, and samples show the same documents, split anywhere."""
    first, second = (
        ["".join((prompt + rest).split()) for prompt, rest in zip(side.sources, side.references, strict=True)]
        for side in (a, b)
    )
    alike = all(x.startswith(y) or y.startswith(x) for x, y in zip(first, second, strict=False))
    return alike and np.array_equal(a.labels, b.labels)


def _same_labels(a: RunFiles, b: RunFiles, split: str) -> bool:
    """Returns whether runs on documents, whose outputs do not show all labels, read the same corpus."""
    if not a.task.documents:
        return True
    checksums = [run.corpus.get(f"the checksum of the {split} examples") for run in (a, b)]
    same_corpus = checksums[0] == checksums[1] or None in checksums
    return same_corpus and comparable.labels(a.config) == comparable.labels(b.config)


def _changes(a: RunFiles, b: RunFiles, split: str) -> Iterator[Change]:
    mine, theirs = a.outputs[split], b.outputs[split]
    first, second = mine.quality(a.task), theirs.quality(b.task)
    if first is None or second is None:
        return
    rows = zip(mine.sources, mine.references, mine.texts, theirs.texts, first, second, strict=True)
    for source, reference, old, new, before, after in rows:
        if old != new:
            yield Change(source, reference, (old, new), (float(before), float(after)))


def _losses(a: RunFiles, b: RunFiles) -> Iterator[LossAt]:
    """Yields the losses, without label smoothing, at parts of the range that both runs cover; steps are whole."""
    for axis in ("step", "tokens", "seconds"):
        ends = [run.axis(axis, run.train.steps)[-1:] for run in (a, b)]
        if not all(len(end) and np.isfinite(end).all() for end in ends):
            continue
        parts = (fraction * float(min(ends[0][0], ends[1][0])) for fraction in FRACTIONS)
        for at in dict.fromkeys(part if axis == "seconds" else float(max(round(part), 1)) for part in parts):
            train = [_value_at(run, run.train, run.nll_column, axis, at) for run in (a, b)]
            held_out = [_value_at(run, run.group("validation"), "loss", axis, at) for run in (a, b)]
            yield LossAt(axis, at, (train[0], train[1]), (held_out[0], held_out[1]))


def _value_at(run: RunFiles, series: Series, name: str, axis: str, at: float) -> float | None:
    """Interpolates a metric linearly between its finite records; None outside of them."""
    values = series.columns.get(name)
    if values is None:
        return None
    finite = np.isfinite(values)
    places = run.axis(axis, series.steps[finite])
    if not len(places) or not places[0] <= at <= places[-1]:
        return None
    return float(np.interp(at, places, values[finite]))
