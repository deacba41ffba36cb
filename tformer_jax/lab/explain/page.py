"""Renders topics as one HTML file."""

from collections.abc import Callable, Sequence

from tformer_jax.base.errors import UserError
from tformer_jax.lab.explain import attention, caches, layers, positions, search, sequences
from tformer_jax.lab.explain.topic import Example, Topic
from tformer_jax.lab.explain.trained import TrainedFigures
from tformer_jax.report.html import render_page

GROUPS: dict[str, dict[str, Callable[[Example], Topic]]] = {
    "Attention": {"dot-product": attention.dot_product, "heads": attention.heads, "masks": attention.masks},
    "Positions": {
        "sinusoids": positions.sinusoids,
        "rope": positions.rope,
        "alibi": positions.alibi,
        "t5-buckets": positions.buckets,
    },
    "Layers": {"norms": layers.norms, "placement": layers.placement, "ffn": layers.ffn, "experts": layers.experts},
    "Sequences": {"encoder-decoder": sequences.encoder_decoder, "teacher-forcing": sequences.teacher_forcing},
    "Decoding": {"kv-cache": caches.kv_cache, "paged-cache": caches.paged_cache, "beams": search.beams},
}
"""The topics by group and name."""
LETTERS = {
    "B": "batch",
    "T": "query length",
    "S": "key length",
    "D": "width",
    "N": "query heads",
    "K": "key/value heads",
    "G": "N / K",
    "H": "head size",
    "F": "FFN width",
    "V": "vocabulary",
    "L": "layers",
    "E": "experts",
    "k": "experts of a token, or beams",
    "M": "pages of the pool",
    "P": "pages of a row",
    "Z": "tokens of a page",
}
TOPICS = {name: build for topics in GROUPS.values() for name, build in topics.items()}


def build_topics(
    example: Example, names: Sequence[str] = (), trained: TrainedFigures | None = None
) -> dict[str, dict[str, Topic]]:
    """Computes topics, by group and name; without names, all.

    Args:
        trained: adds figures of a run.

    Raises:
        UserError: a name is unknown.
    """
    for name in names:
        if name not in TOPICS:
            raise UserError(f"unknown topic {name!r}: write one or more of {', '.join(TOPICS)}")
    wanted = names or TOPICS
    chosen = {
        group: {name: topic(example) for name, topic in topics.items() if name in wanted}
        for group, topics in GROUPS.items()
    }
    add = trained.add if trained else dict
    return {group: add(topics) for group, topics in chosen.items() if topics}


def render_topics(groups: dict[str, dict[str, Topic]], example: Example, command: str, run: str = "") -> str:
    """Returns the page of topics.

    Args:
        command: shown as the way to make the page for another text.
        run: name of the run that computed some of the figures.
    """
    figures = [figure.data() for topics in groups.values() for topic in topics.values() for figure in topic.figures]
    return render_page(
        "explain",
        {"figures": figures},
        title="How Transformers work",
        groups=groups,
        example=example,
        command=command,
        run=run,
        letters=LETTERS,
    )
