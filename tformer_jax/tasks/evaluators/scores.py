"""Scores of translations against one or several references, computed by sacreBLEU."""

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import sacrebleu

from tformer_jax.config import Config
from tformer_jax.config.directions import Direction
from tformer_jax.data.characters import clean_whitespace
from tformer_jax.tasks.evaluators.bleu import bleu_metric, spbleu_metric
from tformer_jax.tasks.evaluators.evaluation import Evaluation, Sample

Metrics = Mapping[str, Any]
"""Metrics of sacreBLEU by name."""


def text_metrics(cfg: Config, language: str) -> dict[str, Any]:
    """Returns BLEU, chrF and those of `eval.metrics` for outputs in a language.

    Raises:
        UserError: a package or file that a metric needs is missing.
    """
    metrics: dict[str, Any] = {"bleu": bleu_metric(cfg, language), "chrf": sacrebleu.CHRF()}
    if "chrf++" in cfg.eval.metrics:
        metrics["chrf++"] = sacrebleu.CHRF(word_order=2)
    if "ter" in cfg.eval.metrics:
        metrics["ter"] = sacrebleu.TER()
    if "spbleu" in cfg.eval.metrics:
        metrics["spbleu"] = spbleu_metric(Path(cfg.eval.spbleu_model or "").expanduser())
    return metrics


def target_language(cfg: Config, direction: str | None) -> str:
    """Returns the target language of a direction; None: that of the settings."""
    return cfg.data.target_language if direction is None else Direction.parse(direction).target


def score_texts(outputs: Sequence[str], references: Sequence[Sequence[str]], metrics: Metrics) -> Evaluation:
    """Computes corpus scores with sacreBLEU's signatures, and `exact_match`, the percentage of exact matches.

    Exact matches have the same characters as a reference after `clean_whitespace`, as BLEU does not compare white space
    either.

    Args:
        references: one or several of each output.
    """
    sets = list(itertools.zip_longest(*references))
    found = {name: metric.corpus_score(outputs, sets).score for name, metric in metrics.items()}
    exact = sum(
        clean_whitespace(output) in map(clean_whitespace, each)
        for output, each in zip(outputs, references, strict=True)
    )
    found["exact_match"] = 100 * exact / len(references)
    return Evaluation(found, signatures={name: str(metric.get_signature()) for name, metric in metrics.items()})


def sentence_scores(cfg: Config, samples: Iterable[Sample]) -> Iterator[dict[str, float]]:
    """Yields the scores of each output alone; BLEU counts only n-grams of lengths that the output has."""
    by_language: dict[str, Metrics] = {}
    for sample in samples:
        language = target_language(cfg, sample.direction)
        if language not in by_language:
            metrics = text_metrics(cfg, language)
            by_language[language] = {name: copy.copy(metric) for name, metric in metrics.items()}
            for name in by_language[language].keys() & {"bleu", "spbleu"}:
                by_language[language][name].effective_order = True
        yield {
            name: metric.sentence_score(sample.output, sample.references).score
            for name, metric in by_language[language].items()
        }
