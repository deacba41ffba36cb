"""The topic of beam search."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from tformer_jax.config import DecodeConfig
from tformer_jax.inference.beam import WORST, BeamState, length_penalty
from tformer_jax.inference.constraints import NO_CONSTRAINTS
from tformer_jax.inference.sampling import RowSettings
from tformer_jax.lab.explain.figures import Curve, Heat, Lines, cell_texts
from tformer_jax.lab.explain.mathml import formula, fraction, total
from tformer_jax.lab.explain.topic import Example, Shape, Topic, make_topic
from tformer_jax.special_tokens import BOS, EOS, PAD, SPECIAL_TOKENS, UNK

BEAMS, STEPS = 3, 6
# With this penalty, the score times the length is the sum.
CFG = DecodeConfig(strategy="beam", beams=BEAMS, length_penalty="average", length_alpha=1.0)
BY_ALPHA = {f"α = {alpha}": dataclasses.replace(CFG, length_alpha=alpha) for alpha in (0.0, 0.6, 1.0)}
SMOOTHING = 0.05
"""Added to the number of times that a word follows another."""

Prefix = tuple[int, ...]


def beams(example: Example) -> Topic:
    """Explains beam search on a model that knows which words follow each other."""
    names = [*SPECIAL_TOKENS, *dict.fromkeys(word.lower() for word in example.source)]
    logits = _bigrams([names.index(word.lower()) for word in example.source], len(names))
    sums, rows = _search(logits)
    outputs = _outputs(rows)
    scores = by_alpha([len(output) for output in outputs], [sums[output] for output in outputs])
    return make_topic(
        "beams",
        formulas=(
            formula("score =", fraction(total("t", "log p ( y_t | y_{<t} )"), "length^α")),
            formula("GNMT : ( 5 + length )^α / 6^α instead of length^α"),
        ),
        shapes=(
            Shape("logits", "B k V", (1, BEAMS, len(names)), "scores of the next token of each beam"),
            Shape("sums", "B k", rows.sums.shape, "sums of log-probabilities"),
            Shape("running", "B k T", rows.running.shape, "tokens of each beam"),
        ),
        functions=(BeamState, length_penalty),
        figures=(
            Lines(
                "Sums of log-probabilities of all beams",
                _paths(sums, names),
                "tokens",
                "log p",
                "Lines end where a beam was dropped or ended in </s>.",
            ),
            Heat(
                "Scores of the outputs by α",
                scores,
                [" ".join(names[number] for number in output) for output in outputs],
                list(BY_ALPHA),
                "Best first for α = 1; a larger α favors longer outputs.",
                cell_texts(scores),
            ),
        ),
        values={"beams": BEAMS, "steps": STEPS},
    )


def by_alpha(lengths: Sequence[int], sums: Sequence[float]) -> np.ndarray:
    """Returns the scores of outputs for each length penalty of `BY_ALPHA`: float [outputs, penalties].

    Args:
        lengths: numbers of tokens.
        sums: sums of log-probabilities.
    """
    penalties = [length_penalty(jnp.asarray(lengths), cfg) for cfg in BY_ALPHA.values()]
    return np.array(sums)[:, None] / np.stack(penalties, axis=1)


def _paths(sums: dict[Prefix, float], names: Sequence[str]) -> list[Curve]:
    """Returns a line for each beam that was not extended: the sums of its prefixes."""
    leaves = [
        prefix for prefix in sums if prefix and not any(other[: len(prefix)] == prefix != other for other in sums)
    ]
    paths = [[leaf[:length] for length in range(len(leaf) + 1)] for leaf in leaves]
    return [
        Curve(
            " ".join(names[number] for number in path[-1]),
            range(len(path)),
            [sums[prefix] for prefix in path],
            [names[prefix[-1]] if prefix else SPECIAL_TOKENS[BOS] for prefix in path],
        )
        for path in paths
    ]


def _bigrams(ids: list[int], V: int) -> np.ndarray:
    """Returns logits of the next token after each token: float32 [V, V]."""
    counts = np.full((V, V), SMOOTHING)
    counts[:, UNK] = 1e-9
    np.add.at(counts, ([BOS, *ids], [*ids, EOS]), 1)
    return np.log(counts).astype(np.float32)


def _search(logits: np.ndarray) -> tuple[dict[Prefix, float], BeamState]:
    """Searches with the model `logits`; returns the sums of all beams of all steps, and the last state."""

    @jax.jit
    def start() -> BeamState:
        last, counts, limit = (jnp.full((1,), number) for number in (BOS, 1, STEPS))
        return BeamState.start(
            last, counts, limit, RowSettings.from_config(CFG, 1), NO_CONSTRAINTS, length=STEPS, cfg=CFG
        )

    @jax.jit
    def advance(rows: BeamState) -> BeamState:
        return rows.advance(jnp.asarray(logits)[rows.next_tokens()[0]])

    rows = start()
    sums: dict[Prefix, float] = {(): 0.0}
    while not np.asarray(rows.done).all():
        rows = advance(rows)
        length = int(rows.generated[0])
        for tokens, log_probability in zip(np.asarray(rows.running)[0], np.asarray(rows.sums)[0], strict=True):
            if log_probability > WORST / 2:  # missing beams have sums near `WORST`, or below
                sums[tuple(tokens[:length].tolist())] = float(log_probability)
        for output, score in zip(_outputs(rows), np.asarray(rows.finished.scores)[0], strict=False):
            if output not in sums:
                sums[output] = float(score) * len(output)
    return sums, rows


def _outputs(rows: BeamState) -> list[Prefix]:
    """Returns the tokens of the finished outputs, best first."""
    outputs = [tuple(number for number in row if number != PAD) for row in np.asarray(rows.finished.tokens)[0].tolist()]
    return [output for output in outputs if output]
