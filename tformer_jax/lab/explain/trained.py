"""Figures that a trained run computes for the topics of attention, the residual stream and beam search."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from tformer_jax.inference.score import Scored
from tformer_jax.inference.watch import Watched
from tformer_jax.lab.explain.search import BY_ALPHA, by_alpha
from tformer_jax.lab.explain.topic import Curve, Heat, Lines, Topic, cell_texts
from tformer_jax.report.attention import SIDES, TITLES, norms

MAX_HEADS = 8
"""Maximum number of heads that are shown."""


@dataclasses.dataclass(frozen=True)
class TrainedFigures:
    """What a run computes for the text of the page."""

    name: str
    watched: Watched
    tokens: Mapping[str, Sequence[str]]
    """Texts of the tokens that the "encoder" and "decoder" read, as far as the model has them."""
    outputs: Sequence[tuple[Sequence[str], Scored]] = ()
    """Texts of the tokens of the outputs of beam search, best first, and their log-probabilities."""

    def add(self, topics: Mapping[str, Topic]) -> dict[str, Topic]:
        """Returns topics by name, with the figures of the run before those of random weights."""
        own = {
            "heads": self._heads,
            "placement": self._residuals,
            "encoder-decoder": self._cross,
            "beams": self._beams,
        }
        return {
            name: dataclasses.replace(topic, figures=[*own[name](), *topic.figures]) if name in own else topic
            for name, topic in topics.items()
        }

    def _heads(self) -> list[Heat | Lines]:
        kind = next((kind for kind in ("encoder", "decoder") if kind in self.watched.weights), None)
        if kind is None:
            return []
        layer = len(self.watched.weights[kind]) - 1
        weights = np.asarray(self.watched.weights[kind])[-1, :MAX_HEADS]
        caption = f"{TITLES[kind]} of layer {layer}, the last one."
        return [self._map(f"Head {n} of {self.name}", kind, one, caption) for n, one in enumerate(weights)]

    def _cross(self) -> list[Heat | Lines]:
        if "cross" not in self.watched.weights:
            return []
        weights = np.asarray(self.watched.weights["cross"])
        caption = f"Mean of the {weights.shape[1]} heads of layer {len(weights) - 1}, the last one."
        return [self._map(f"Cross-attention of {self.name}", "cross", weights[-1].mean(axis=0), caption)]

    def _residuals(self) -> list[Heat | Lines]:
        figures: list[Heat | Lines] = []
        for stack, tokens in self.tokens.items():
            stream = norms(stack, self.watched, self.tokens)["stream"]
            title = f"Norms of the residual stream of {self.name}, {stack}"
            figures.append(Heat(title, np.array(stream["values"], np.float64), stream["rows"], tokens))
        return figures

    def _beams(self) -> list[Heat | Lines]:
        if not self.outputs:
            return []
        names = ["".join(tokens) for tokens, _ in self.outputs]
        sums = [np.cumsum([0.0, *scored.log_probabilities]) for _, scored in self.outputs]
        curves = [
            Curve(name, range(len(row)), row, ["", *tokens])
            for name, row, (tokens, _) in zip(names, sums, self.outputs, strict=True)
        ]
        scores = by_alpha([len(tokens) for tokens, _ in self.outputs], [row[-1] for row in sums])
        caption = "Best first by the run's own settings of the length penalty."
        return [
            Lines(f"Sums of log-probabilities of the outputs of {self.name}", curves, "tokens", "log p"),
            Heat(
                f"Scores of the outputs of {self.name} by α", scores, names, list(BY_ALPHA), caption, cell_texts(scores)
            ),
        ]

    def _map(self, title: str, kind: str, weights: np.ndarray, caption: str) -> Heat:
        """Returns a map of weights [T, S] of the last layer, with gray where its mask hides a key."""
        queries, keys = (self.tokens[stack] for stack in SIDES[kind])
        seen = np.where(self.watched.masks[kind][-1], weights, np.nan)
        return Heat(title, seen, queries, keys, caption)
