"""Matrices of metrics by direction of translation: rows are source languages, columns are target languages."""

from collections.abc import Mapping
from typing import NamedTuple

from tformer_jax.config import kinds
from tformer_jax.config.directions import Direction
from tformer_jax.config.metrics import base_metric, lower_is_better
from tformer_jax.report.charts import order_metrics
from tformer_jax.report.comparison import Comparison
from tformer_jax.report.run import RunFiles
from tformer_jax.report.sections import format_difference, format_metric, format_p_value

LEVEL = 0.05
"""Differences with a smaller p-value are marked."""


class Cell(NamedTuple):
    """One direction of a matrix."""

    text: str
    share: float
    """How strong its color is, from -1 to 1; negative for a difference to the worse."""
    hint: str
    marked: bool = False


class Matrix(NamedTuple):
    """Cells by source and target language; both axes are in the order of the directions."""

    metric: str
    targets: list[str]
    rows: dict[str, list[Cell | None]]
    """By source language; None for a direction that is not evaluated."""


def _shown() -> set[str]:
    """Returns the metrics that have matrices."""
    return {*kinds.METRICS} - {"exact_match"}


def of_run(run: RunFiles) -> list[Matrix]:
    """Returns the matrices of the split that represents a run; [] if its examples have no named directions."""
    if run.split is None:
        return []
    directions = [name for name in dict.fromkeys(run.outputs[run.split].directions) if name]
    series, matrices = run.group(run.split), []
    for metric in order_metrics({base_metric(name) for name in series.columns} & _shown()):
        values = {name: series.final(f"{metric}:{name}") for name in directions}
        finite = {name: value for name, value in values.items() if value is not None}
        low, high = min(finite.values(), default=0.0), max(finite.values(), default=0.0)
        span = high - low or 1.0
        cells = {name: Cell(format_metric(value, metric), (value - low) / span, name) for name, value in finite.items()}
        matrices += [_arranged(metric, cells)] if cells else []
    return matrices


def of_comparison(comparison: Comparison) -> list[Matrix]:
    """Returns the matrices of differences of the second run from the first."""
    directions = comparison.by_direction
    matrices = []
    for metric in order_metrics({name for part in directions.values() for name in part} & _shown()):
        pairs = {direction: part[metric] for direction, part in directions.items() if metric in part}
        most = max(abs(b.score - a.score) for a, b in pairs.values()) or 1.0
        cells = {}
        for direction, (a, b) in pairs.items():
            scores = " and ".join(format_metric(estimate.score, metric) for estimate in (a, b))
            assert b.p_value is not None
            p = format_p_value(b.p_value)
            hint, difference = f"{direction}: {scores}, p {p if '<' in p else f'= {p}'}", b.score - a.score
            marked = b.p_value < LEVEL
            better = -difference if lower_is_better(metric) else difference
            cells[direction] = Cell(format_difference(difference, metric), better / most, hint, marked)
        matrices.append(_arranged(metric, cells))
    return matrices


def _arranged(metric: str, cells: Mapping[str, Cell]) -> Matrix:
    directions = [Direction.parse(name) for name in cells]
    languages = list(dict.fromkeys(language for direction in directions for language in direction))
    targets = [language for language in languages if language in {direction.target for direction in directions}]
    sources = [language for language in languages if language in {direction.source for direction in directions}]
    rows = {source: [cells.get(str(Direction(source, target))) for target in targets] for source in sources}
    return Matrix(metric, targets, rows)
