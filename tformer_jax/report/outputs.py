"""The outputs of an evaluation: their quality by sentence, a choice of them, and their differences from references."""

import dataclasses
import functools
import itertools
import random
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import sacrebleu

from tformer_jax.tasks.task import Task

SHOWN = 12
"""Number of outputs in each group of a report."""
Piece = tuple[bool, str]
"""Whether the text differs from the other side, and the text."""


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The outputs of one split at one step, in the order of its examples."""

    step: int
    signatures: dict[str, str]
    sources: list[str]
    references: list[str]
    texts: list[str]
    scores: list[float | None]
    """Beam scores or probabilities of labels, if the run recorded them."""
    nll: np.ndarray
    """float64 [parts]: losses of parts of the split (`eval.evaluation.Losses`); empty if unrecorded."""
    labels: np.ndarray
    """int64 [parts]: numbers of labels."""
    directions: list[str | None]
    """The direction of translation of each output; None if there is only one."""
    metrics: list[dict[str, float]] = dataclasses.field(default_factory=list)
    """The scores of each output that the run stored, by metric."""

    @classmethod
    def from_json(cls, contents: dict[str, Any]) -> "Outputs":
        """Builds the outputs from the contents of `outputs/SPLIT.json`."""
        rows = contents.get("outputs", [])
        names = "source", "reference", "output", "score", "direction"
        sources, references, texts, scores, directions = ([row.get(name) for row in rows] for name in names)
        losses = contents.get("losses", {"nll": [], "labels": []})
        nll, labels = np.array(losses["nll"], np.float64), np.array(losses["labels"], np.int64)
        step, signatures = contents.get("step", 0), contents.get("signatures", {})
        metrics = [row.get("metrics", {}) for row in rows]
        return cls(step, signatures, sources, references, texts, scores, nll, labels, directions, metrics)

    def of_direction(self, direction: str | None) -> "Outputs":
        """Returns the outputs of one direction, without losses."""
        places = [place for place, name in enumerate(self.directions) if name == direction]
        names = ("sources", "references", "texts", "scores", "directions", "metrics")
        columns: dict[str, Any] = {name: [getattr(self, name)[place] for place in places] for name in names}
        return dataclasses.replace(self, **columns, nll=np.zeros(0), labels=np.zeros(0, np.int64))

    @functools.cached_property
    def hits(self) -> np.ndarray:
        """Whether each output equals its reference: bool [examples]."""
        return np.array([text == ref for text, ref in zip(self.texts, self.references, strict=True)], bool)

    @functools.cached_property
    def chrf(self) -> np.ndarray:
        """SacreBLEU's sentence chrF of each output, in percent: float64 [examples]."""
        metric = sacrebleu.CHRF()
        pairs = zip(self.texts, self.references, strict=True)
        return np.array([metric.sentence_score(text, [reference]).score for text, reference in pairs], np.float64)

    def quality(self, task: Task) -> np.ndarray | None:
        """Returns a number per output, higher for better ones: float64 [examples]; None for a task without references.

        For translations, it is the sentence chrF; for labels, the probability, negative for a wrong label.
        """
        if task.references is None or not self.texts:
            return None
        if task.references == "labels":
            probabilities = np.array([1.0 if score is None else score for score in self.scores])
            return np.where(self.hits, probabilities, -probabilities)
        return self.chrf


def choose_outputs(outputs: Outputs, task: Task, shown: int = SHOWN) -> dict[str, list[int]]:
    """Returns the indices of the worst, the best and of random outputs, by group; the same ones at every call.

    Among equally good outputs, the longest are the best.
    """
    size = len(outputs.texts)
    drawn = sorted(random.Random(0).sample(range(size), min(shown, size)))
    quality = outputs.quality(task)
    if quality is None:
        return {"samples": drawn}
    order = np.argsort(quality, kind="stable").tolist()
    best = sorted(order, key=lambda at: (-quality[at], -len(outputs.texts[at])))
    return {"worst": order[:shown], "random": drawn, "best": best[:shown]}


def mark_differences(reference: str, output: str) -> tuple[list[Piece], list[Piece]]:
    """Splits both texts into pieces and marks the pieces outside their longest common subsequence.

    Texts are compared by words, or by characters if the reference has no spaces.
    """
    pattern = r"\s+|\w+|[^\w\s]" if " " in reference.strip() else r"."
    left, right = re.findall(pattern, reference, re.DOTALL), re.findall(pattern, output, re.DOTALL)
    common = _common(left, right)
    old, new = _pieces(left, {at for at, _ in common}), _pieces(right, {at for _, at in common})
    return old, new


def _common(left: Sequence[str], right: Sequence[str]) -> list[tuple[int, int]]:
    """Returns the indices of the tokens of the common subsequence with the most characters."""
    numbers = {token: number for number, token in enumerate({*left, *right})}
    ids = np.array([numbers[token] for token in right], np.int32)
    most = np.zeros((len(left) + 1, len(right) + 1), np.int32)  # [i, j]: characters common to left[i:] and right[j:]
    for i in reversed(range(len(left))):
        matched = most[i + 1, 1:] + len(left[i]) * (ids == numbers[left[i]])
        most[i, :-1] = np.maximum.accumulate(np.maximum(most[i + 1, :-1], matched)[::-1])[::-1]
    pairs, i, j = [], 0, 0
    while most[i, j]:
        if left[i] == right[j]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
        elif most[i + 1, j] == most[i, j]:
            i += 1
        else:
            j += 1
    return pairs


def _pieces(tokens: Sequence[str], common: set[int]) -> list[Piece]:
    groups = itertools.groupby(range(len(tokens)), lambda at: at not in common)
    return [(differs, "".join(tokens[at] for at in places)) for differs, places in groups]


def histogram(columns: Sequence[np.ndarray], bins: int = 30) -> tuple[np.ndarray, list[np.ndarray]]:
    """Returns the edges of common bins, float64 [bins + 1], and the percentage of each column in each bin."""
    finite = [column[np.isfinite(column)] for column in (np.asarray(column, np.float64) for column in columns)]
    edges = np.histogram_bin_edges(np.concatenate(finite), bins)
    return edges, [100 * np.histogram(column, edges)[0] / max(len(column), 1) for column in finite]
