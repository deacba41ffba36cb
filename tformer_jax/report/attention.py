"""Renders what a model attends to in one text, its residual stream and its predictions by layer, as one HTML file."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from tformer_jax.base.errors import UserError
from tformer_jax.base.numbers import significant
from tformer_jax.inference.watch import SUBLAYERS, Watched, rollout
from tformer_jax.report.html import packed, render_page

TITLES = {"encoder": "Encoder self-attention", "decoder": "Decoder self-attention", "cross": "Cross-attention"}
SIDES = {"encoder": ("encoder", "encoder"), "decoder": ("decoder", "decoder"), "cross": ("decoder", "encoder")}
"""Stacks of the queries and keys of each attention."""
MEAN, ROLLOUT = "mean of heads", "rollout"
STEPS = 2**16 - 1
"""A weight w is stored as the 16-bit integer `round(w * STEPS)`."""
DIGITS = 4
"""Significant digits of norms."""
MAX_WEIGHTS = 2**22
"""Maximum number of weights in a page, which is then about 8 MB; the heads of a longer text are left out."""


def render_attention(
    name: str,
    texts: dict[str, str],
    watched: Watched,
    tokens: Mapping[str, Sequence[str]],
    label: Callable[[int], str],
    *,
    layer: int | None = None,
    head: int | None = None,
    with_heads: bool,
) -> str:
    """Returns the page.

    Args:
        name: name of the run.
        texts: texts to show, by label.
        watched: result of `tj.Run.watch`.
        tokens: texts of the tokens of "encoder" and "decoder", as far as the model has them.
        label: returns the text of a token or class that the model predicts.
        layer, head: shown first; None: the last layer, the mean of its heads.
        with_heads: whether to store the weights of all heads; see `has_heads`.
    """
    shown = {stack: [visible(text) for text in pieces] for stack, pieces in tokens.items()}
    kinds = [kind for kind in SIDES if kind in watched.weights]
    attentions = [_attention(kind, np.asarray(watched.weights[kind]), shown, layer, head, with_heads) for kind in kinds]
    masks = [packed(np.packbits(watched.masks[kind]).tobytes()) for kind in kinds]
    data = [{key: attention[key] for key in ("name", "queries", "keys", "layers", "heads")} for attention in attentions]
    residuals = [norms(stack, watched, shown) for stack in shown]
    read = shown.get("decoder") or shown["encoder"]
    return render_page(
        "attention",
        {"attentions": data, "norms": residuals},
        title=f"Attention of {name}",
        name=name,
        texts=texts,
        attentions=list(zip(attentions, masks, strict=True)),
        norms=residuals,
        lens=_lens(watched, label),
        read=read if watched.predictions.shape[1] == len(read) else ["text"],  # a classifier has one for the text
        with_heads=with_heads,
    )


def visible(text: str) -> str:
    """Returns the text of a token with visible spaces and line breaks."""
    return text.replace(" ", "▁").replace("\n", "⏎").replace("\t", "⇥") or "∅"


def has_heads(shapes: Collection[tuple[int, int, int, int]], head: int | None) -> bool:
    """Returns whether the weights of all heads fit the page.

    Args:
        shapes: shapes [L, N, T, S] of the weights of each attention.
        head: the head that the page shows first, as for `render_attention`.

    Raises:
        UserError: the page would have more than `MAX_WEIGHTS` weights, or no head `head`.
    """
    tokens = max((max(T, S) for _, _, T, S in shapes), default=0)
    if sum(2 * L * T * S for L, _, T, S in shapes) > MAX_WEIGHTS:
        raise UserError(
            f"the text has {tokens} tokens, too many for a page: shorten it, or write arrays (--batch FILE --npz FILE)"
        )
    fits = sum(L * (N + 2) * T * S for L, N, T, S in shapes) <= MAX_WEIGHTS
    if not fits and head is not None:
        raise UserError(f"--head {head}: the page of {tokens} tokens has only means of heads; shorten the text")
    return fits


def _attention(
    kind: str, weights: np.ndarray, tokens: dict[str, list[str]], layer: int | None, head: int | None, with_heads: bool
) -> dict[str, Any]:
    """Returns one attention: all heads of each layer, their mean, and for self-attention its rollout."""
    L, N = weights.shape[0], weights.shape[1] if with_heads else 0
    views = [weights[:, :N], weights.mean(axis=1, keepdims=True)]
    heads = [*map(str, range(N)), MEAN]
    if kind != "cross":
        views.append(rollout(weights)[:, None])
        heads.append(ROLLOUT)
    stored = np.round(np.concatenate(views, axis=1) * STEPS).astype("<u2")
    queries, keys = (tokens[stack] for stack in SIDES[kind])
    best = views[1][-1, 0]
    return {
        "name": kind,
        "title": TITLES[kind],
        "queries": queries,
        "keys": keys,
        "layers": L,
        "heads": heads,
        "layer": L - 1 if layer is None else min(layer, L - 1),
        "head": N if head is None else head,
        "weights": packed(stored.tobytes()),
        "strongest": [(query, keys[row.argmax()], float(row.max())) for query, row in zip(queries, best, strict=True)],
    }


def norms(stack: str, watched: Watched, tokens: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Returns the norms of a stack's residual stream and of what each sub-layer adds, by row of the chart."""
    stream = watched.norms[stack]
    sublayers = [
        name for name in SUBLAYERS if name != "cross_attention" or (stack == "decoder" and "cross" in watched.weights)
    ]
    names = [f"{number // len(sublayers)} {sublayers[number % len(sublayers)]}" for number in range(len(stream) - 1)]
    return {
        "name": stack,
        "tokens": tokens[stack],
        "stream": {"rows": [*(f"before {name}" for name in names), "end"], "values": _rounded(stream)},
        "added": {"rows": names, "values": _rounded(watched.added[stack]) if names else []},
    }


def _lens(watched: Watched, label: Callable[[int], str]) -> list[tuple[str, list[list[tuple[str, float]]]]]:
    """Returns the columns of the table of predictions, by layer: for each token, texts and probabilities."""
    names = ["embeddings", *(f"layer {number}" for number in range(len(watched.predictions) - 1))]
    columns = [
        [
            [(label(token), float(p)) for token, p in zip(ids, values, strict=True)]
            for ids, values in zip(tokens.tolist(), probabilities, strict=True)
        ]
        for tokens, probabilities in zip(watched.predictions, watched.probabilities, strict=True)
    ]
    return list(zip(names, columns, strict=True))


def _rounded(values: Any) -> list[list[float | None]]:
    return significant(np.asarray(values).tolist(), DIGITS)
