"""Scores of translations against one or several references."""

from collections.abc import Mapping, Sequence

import numpy as np

from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, kinds
from tformer_jax.config.directions import Direction
from tformer_jax.config.metrics import DEFAULT, Metric, References, build_metric
from tformer_jax.tasks.evaluators.evaluation import Evaluation

Metrics = Mapping[str, Metric]
"""Metrics of texts in one language, by name."""
Row = dict[str, np.ndarray]
"""`Metric.statistics` of one text by metric: float64 [S] each."""


def text_metrics(cfg: Config, language: str, languages: Sequence[str] = ()) -> dict[str, Metric]:
    """Returns BLEU, chrF, exact match and the metrics of `eval.metrics`; languages are as for `Metric`.

    Raises:
        UserError: a package or file that a metric needs is missing.
    """
    names = {*DEFAULT, *cfg.eval.metrics}
    return {name: build_metric(cfg.eval, name, language, languages) for name in kinds.METRICS if name in names}


def target_language(cfg: Config, direction: str | None) -> str:
    """Returns the target language of a direction; None: the target language of the settings."""
    return cfg.data.target_language if direction is None else Direction.parse(direction).target


def measure_texts(
    metrics: Mapping[str, Metrics],
    languages: Sequence[str],
    sources: Sequence[str],
    outputs: Sequence[str],
    references: References,
) -> list[Row]:
    """Returns the statistics of each text, for the metrics that apply to its language.

    Args:
        metrics: metrics by language.
        languages: the language of each output.

    Raises:
        UserError: a metric fails, or does not have a score of each output.
    """
    groups: dict[tuple[str, str | None], list[int]] = {}
    for place, language in enumerate(languages):
        for name, metric in metrics[language].items():
            if metric.applies:
                groups.setdefault((name, language if metric.by_language else None), []).append(place)
    rows: list[Row] = [{} for _ in outputs]
    for (name, _), places in groups.items():
        columns = ([texts[place] for place in places] for texts in (sources, outputs, references))
        statistics = metrics[languages[places[0]]][name].statistics(*columns)  # type: ignore[arg-type]
        if len(statistics) != len(places):
            raise UserError(f"the metric {name!r} has {len(statistics):,} scores of {len(places):,} outputs")
        for place, values in zip(places, statistics, strict=True):
            rows[place][name] = values
    return rows


def score_rows(rows: Sequence[Row], metrics: Metrics, references: References) -> Evaluation:
    """Returns the scores of texts in one language, given the statistics of each, and what determines them."""
    scores = {name: metrics[name].score(np.sum([row[name] for row in rows], axis=0)) for name in rows[0]}
    signatures = {name: text for name in scores if (text := metrics[name].signature_of(references))}
    return Evaluation(scores, signatures=signatures)
