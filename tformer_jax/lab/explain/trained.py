"""Figures that a trained run computes for the topics of attention, the residual stream and beam search."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import tformer_jax as tj
from tformer_jax.base.errors import UserError
from tformer_jax.cli import attention_page
from tformer_jax.data.characters import is_blank
from tformer_jax.data.tokenizers import Tokenizer, token_texts
from tformer_jax.inference.scores import Scored
from tformer_jax.inference.watch import Watched
from tformer_jax.lab.explain.figures import Curve, Heat, Lines, cell_texts
from tformer_jax.lab.explain.search import BEAMS, BY_ALPHA, STEPS, by_alpha
from tformer_jax.lab.explain.topic import MAX_TOKENS, Example, Topic
from tformer_jax.report.attention import SIDES, TITLES, norms, visible
from tformer_jax.report.run import load_all

Scores = tuple[Sequence[str], Scored]

MAX_HEADS = 8
"""Maximum number of heads that are shown."""


@dataclasses.dataclass(frozen=True)
class TrainedFigures:
    """What a run computes for the text of the page."""

    name: str
    watched: Watched
    tokens: Mapping[str, Sequence[str]]
    """Texts of the tokens that the "encoder" and "decoder" read, as far as the model has them."""
    outputs: Sequence[Scores] = ()
    """Texts of the tokens of the outputs of beam search, best first, and their log-probabilities."""

    def add(self, topics: Mapping[str, Topic]) -> dict[str, Topic]:
        """Returns topics by name, with the figures of the run before the figures of random weights."""
        own = {"heads": self._heads, "placement": self._residuals, "encoder-decoder": self._cross, "beams": self._beams}
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
        return [self._map(f"Head {n} of {self.name}", kind, head, caption) for n, head in enumerate(weights)]

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


def default_text(run: tj.Run, otherwise: str) -> str:
    """Returns the first held-out text of a run that has few enough tokens for a page, or the beginning of another."""
    (loaded,) = load_all([run.path])
    texts = loaded.outputs[loaded.split].sources if loaded.split else []
    tokenizer = run.tokenizers.source if run.model.reads_source else run.tokenizers.target
    limit = min(MAX_TOKENS, run.config.model.max_length - tokenizer.special.added_to_side)
    short = (text for text in texts if 3 < len(tokenizer.encode(text)) < min(MAX_TOKENS // 2, limit + 1))
    words = otherwise.split()
    while len(tokenizer.encode(" ".join(words))) > limit:
        words.pop()
    return next(short, " ".join(words))


def trained_example(run: tj.Run, text: str, target: str | None) -> tuple[Example, TrainedFigures]:
    """Returns the tokens of the figures, and what the run computes for them.

    Args:
        target: None: the translation by the run; for other models, the tokens of the text reversed.

    Raises:
        UserError: a text has too few or too many tokens.
    """
    translates = run.model.reads_source
    if target is not None and not translates:
        raise UserError(f"--target: {run.path} is not a translator; leave it out")
    translated = run.translate([text])[0] if translates and target is None else None
    target = target if translated is None else translated
    prompt = (text, "") if run.config.model.prefix_lm else text
    (watched,) = run.watch([(text, target) if translates else prompt])
    tokens = {stack: list(map(visible, texts)) for stack, texts in attention_page.read_tokens(run, watched).items()}
    source = token_pieces(run.tokenizers.source if translates else run.tokenizers.target, text)
    other = source[::-1] if target is None else token_pieces(run.tokenizers.target, target)
    example = Example.from_tokens(source, other, "of the run's tokenizer", translated)
    return example, TrainedFigures(run.path.name, watched, tokens, search_outputs(run, text))


def token_pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    """Returns the texts of the tokens of a text, without the special tokens around it."""
    return list(map(visible, token_texts(tokenizer, tokenizer.encode(text))))


def search_outputs(run: tj.Run, text: str) -> list[Scores]:
    """Returns the tokens of the outputs of beam search with their log-probabilities, best first; encoders have none."""
    if not run.model.decodes:
        return []
    settings: dict[str, Any] = {"strategy": "beam", "beams": BEAMS}
    if run.model.continues:
        fewest = min(run.config.decode.min_new_tokens, STEPS)
        settings |= {"max_new_tokens": STEPS, "min_new_tokens": fewest, "prefix": ""}
    (outputs,) = run.outputs([text], BEAMS, **settings)
    scored = run.score([(text, output.text) for output in outputs if not is_blank(output.text)])
    name = functools.partial(token_texts, run.tokenizers.target)
    return [(list(map(visible, name(output.tokens))), output) for output in scored if output.tokens]
