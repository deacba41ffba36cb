"""Metrics by direction of translation, with their means over all directions and over groups of them."""

import collections
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from tformer_jax.config import Config
from tformer_jax.config.directions import Direction
from tformer_jax.config.metrics import base_metric, group_of_metric
from tformer_jax.data.corpora import Corpus, Example
from tformer_jax.data.corpora.corpus import evaluated_indices
from tformer_jax.tasks.evaluators.evaluation import Evaluation

ZERO_SHOT = "zero-shot"
"""Group of the directions without training examples."""


def evaluate_directions(
    directions: Sequence[str | None],
    trained: Collection[str],
    evaluate: Callable[[str | None, Sequence[int]], Evaluation],
) -> Evaluation:
    """Returns the evaluation of examples with the given directions.

    The metric `chrf` is the mean over all directions, `chrf:en-de` the score of one direction, and `chrf:to-en` the
    mean over a group. Examples without directions only have `chrf`.

    Args:
        directions: the direction of each example.
        trained: the directions of the training examples; () if there are none.
        evaluate: evaluates the examples with these indices, which have one direction.
    """
    places = by_direction(directions)
    if None in places:
        return evaluate(None, range(len(directions)))
    parts = {name: evaluate(name, indices) for name, indices in places.items() if name is not None}
    metrics = with_means({name: part.metrics for name, part in parts.items()}, trained)
    return Evaluation(metrics, signatures=_joined({name: part.signatures for name, part in parts.items()}))


def _joined(signatures: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Returns the signature of each metric, by direction (`bleu:en-ja`) if the directions differ in it."""
    joined: dict[str, str] = {}
    for metric in dict.fromkeys(metric for part in signatures.values() for metric in part):
        by_name = {name: part[metric] for name, part in signatures.items() if metric in part}
        first, *others = dict.fromkeys(by_name.values())
        joined |= {f"{metric}:{name}": text for name, text in by_name.items()} if others else {metric: first}
    return joined


def signatures_of(metric: str, signatures: Mapping[str, str]) -> dict[str, list[str]]:
    """Returns the different signatures of a metric, each with its directions; [] for all directions."""
    directions: dict[str, list[str]] = {}
    for name, signature in signatures.items():
        base, _, direction = name.partition(":")
        if base == metric:
            directions.setdefault(signature, []).extend([direction] if direction else [])
    return directions


def by_direction(directions: Sequence[str | None]) -> dict[str | None, list[int]]:
    """Returns the indices of the examples of each direction."""
    places: dict[str | None, list[int]] = {}
    for index, direction in enumerate(directions):
        places.setdefault(direction, []).append(index)
    return places


def with_means(parts: Mapping[str, Mapping[str, float]], trained: Collection[str]) -> dict[str, float]:
    """Returns the metrics of directions with their means over all directions and over `groups`.

    A mean is over the directions that have the metric.
    """
    groups = {"": list(parts), **group_directions(list(parts), trained), **{name: [name] for name in parts}}
    metrics = {}
    for group, members in groups.items():
        for metric in dict.fromkeys(metric for name in members for metric in parts[name]):
            values = [parts[name][metric] for name in members if metric in parts[name]]
            metrics[f"{metric}:{group}" if group else metric] = statistics.fmean(values)
    return metrics


def group_directions(directions: Sequence[str], trained: Collection[str]) -> dict[str, list[str]]:
    """Returns the groups that have directions: into the hub, from the hub, and without training examples.

    The name of the first group is `into-en` where `to-en` is a direction, from Tongan.
    """
    groups: dict[str, list[str]] = {}
    if hub := hub_of(trained or directions):
        into = "into" if f"to-{hub}" in {*directions, *trained} else "to"
        groups[f"{into}-{hub}"] = [name for name in directions if Direction.parse(name).target == hub]
        groups[f"from-{hub}"] = [name for name in directions if Direction.parse(name).source == hub]
    groups[ZERO_SHOT] = [name for name in directions if trained and name not in trained]
    return {group: members for group, members in groups.items() if members}


def check_metric(cfg: Config, corpus: Corpus) -> None:
    """Raises `ConfigError` if `train.metric` names a direction or group that no evaluation of a run has.

    Evaluations of fewer examples than directions leave out some.
    """
    group, split = group_of_metric(cfg.train.metric), corpus.validation

    def names_of(examples: Iterable[Example]) -> list[str]:
        directions = list(dict.fromkeys(example["direction"] for example in examples))
        return [*directions, *group_directions(directions, corpus.directions or ())]

    names = names_of(split)
    if group not in names:
        base = base_metric(cfg.train.metric)
        problem = f"the validation split has no direction or group {group!r}; write {base!r}, or one of"
        raise cfg.train.error("metric", f"{problem} {', '.join(f'{base}:{name}' for name in names)}")
    if group not in names_of(split[index] for index in evaluated_indices(split, cfg.eval.examples)):
        needed = len({example["direction"] for example in split})
        problem = f"leaves out {group!r} of train.metric={cfg.train.metric!r}; write at least {needed}, the number of"
        raise cfg.eval.error("examples", f"{problem} directions of the validation split, or 0 for all examples")


def hub_of(directions: Collection[str]) -> str | None:
    """Returns the language that more directions have than any other, and more than half of all have; None: no such."""
    counts = collections.Counter(language for name in directions for language in Direction.parse(name))
    (hub, most), (_, second) = counts.most_common(2)
    return hub if most > second and 2 * most > len(directions) else None
