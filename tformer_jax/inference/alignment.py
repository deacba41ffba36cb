"""Alignments of words by cross-attention, and the attention head that aligns best."""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from tformer_jax.config import DecodeConfig
from tformer_jax.config.decode import AlignmentHead
from tformer_jax.config.transforms import Transform, format_source
from tformer_jax.data.placeholders import mask
from tformer_jax.data.tokenizers import Tokenizer, Tokenizers
from tformer_jax.data.tokenizers.language_tags import languages_of
from tformer_jax.data.tokenizers.tokens import token_ranges
from tformer_jax.data.word_links import Links, Reference, error_rate, word_ranges, word_spans
from tformer_jax.inference.batching import compute_rows
from tformer_jax.inference.encoding import shared_length
from tformer_jax.inference.requests import as_request
from tformer_jax.inference.watch import Watched, watch
from tformer_jax.models import registry
from tformer_jax.nn.sharding import replicate


def text_places(tokenizer: Tokenizer, ids: Sequence[int]) -> range:
    """Returns the places of the tokens of a source between its language tags and special tokens."""
    special, tags = tokenizer.special, {*languages_of(tokenizer).values()}
    places = range(len(special.before), len(ids))
    while places and ids[places[0]] in tags:
        places = places[1:]
    while places and ids[places[-1]] in tags:
        places = places[:-1]
    return places[: max(len(places) - len(special.after_source), 0)]


def source_ranges(
    tokenizers: Tokenizers,
    ids: Sequence[int],
    text: str,
    transforms: Sequence[Transform],
    spans: Callable[[str], list[tuple[int, int]]] = word_spans,
) -> list[range]:
    """Returns the places of the tokens of each word of a source, whose `ids` are as the model reads them.

    Args:
        transforms: `data.transforms`; some of them format sources.
        spans: returns start and end of each word of a text.
    """
    places, (written, start) = text_places(tokenizers.source, ids), formatted(transforms, text)
    first = [(0, len(written[:start].rstrip()))] if start else []
    shifted = [(start + begin, start + end) for begin, end in spans(text)]
    parts = token_ranges(
        tokenizers.source, written, [*first, *shifted], lambda part: mask(tokenizers.placeholders, part).text
    )
    return [places[part.start : part.stop] for part in parts[len(first) :]]


def formatted(transforms: Sequence[Transform], text: str) -> tuple[str, int]:
    """Returns a source in the formats of transforms, and where its text begins there."""
    written = format_source(transforms, text)
    start = written.rfind(text)
    return (text, 0) if start < 0 else (written, start)


def written_ranges(text: str, beginnings: Sequence[str], spans: Sequence[tuple[int, int]]) -> list[range]:
    """Returns the places of the tokens that write each span of characters of an output.

    Args:
        beginnings: the texts of the first 1, ..., T - 1 of T tokens; only the characters that a text shares with the
            output are counted.
    """
    lengths = [shared_length(text, part) for part in beginnings]
    ends = [*np.maximum.accumulate([0, *lengths]).tolist(), len(text)]
    places = range(len(ends) - 1)
    inside = [[n for n in places if ends[n] < stop and start < ends[n + 1]] for start, stop in spans]
    return [range(part[0], part[-1] + 1) for part in inside]


def word_links(weights: np.ndarray, source: Sequence[range], target: Sequence[range]) -> Links:
    """Links each word of a target with the words of the source that its tokens attend to most.

    Args:
        weights: [T, S]; the weights of a source word's tokens are summed.
        source, target: places of the tokens of each word.
    """
    if not source:
        return ()
    best = np.stack([weights[:, part.start : part.stop].sum(axis=1) for part in source]).argmax(axis=0)
    return tuple(sorted({(int(best[place]), word) for word, part in enumerate(target) for place in part}))


def cross_attention(
    model: nn.Module,
    params: Any,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    decodes: Sequence[DecodeConfig],
    batch_size: int,
) -> list[np.ndarray]:
    """Returns the weights of the cross-attention of a `Seq2Seq` model that aligns words.

    Args:
        pairs: token ids of each source, and the inputs of the decoder.
        decodes: the settings of each pair.

    Returns:
        float32 [T, S] for each pair, without padding; row t belongs to the token that is predicted at step t.
    """
    rows = [{"source": source, "target_in": target} for source, target in pairs]
    weights_of_pairs: dict[int, np.ndarray] = {}
    heads = [decode.aligning for decode in decodes]
    for head in dict.fromkeys(heads):
        places = [place for place, other in enumerate(heads) if other == head]
        function = functools.partial(_head_weights, layer=head.layer, head=head.head)
        weights_of_pairs.update(
            zip(places, compute_rows(function, model, params, [rows[n] for n in places], batch_size), strict=True)
        )
    shown = (weights_of_pairs[n][: len(target), : len(source)] for n, (source, target) in enumerate(pairs))
    return [aligned_rows(weights, head.query) for weights, head in zip(shown, heads, strict=True)]


def aligned_rows(weights: np.ndarray, query: str) -> np.ndarray:
    """Returns the rows of weights [T, S] where `query` reads them; of the last token, which no step reads, its own."""
    return weights if query == "predicts" else np.concatenate([weights[1:], weights[-1:]])


@functools.partial(jax.jit, static_argnames=("model", "layer", "head"))
def _head_weights(
    model: nn.Module, params: Any, batch: registry.Batch, layer: int | None, head: int | None
) -> jax.Array:
    """Returns the weights of a layer and head, float32 [B, T, S]; XLA omits what `watch` computes besides."""
    weights = watch(model, params, batch).weights["cross"][:, -1 if layer is None else layer]
    return replicate(weights.mean(axis=1) if head is None else weights[:, head])


def head_error_rates(
    tokenizers: Tokenizers,
    pairs: Sequence[Any],
    watched: Iterable[Watched],
    references: Sequence[Reference],
    transforms: Sequence[Transform] = (),
) -> dict[AlignmentHead, float]:
    """Returns the alignment error rate of each head, and of the mean of each layer, from the lowest on.

    Args:
        watched: what the model computes for each (source, target) pair.
        transforms: as for `source_ranges`.
    """
    links: dict[AlignmentHead, list[Links]] = {}
    before, tags = tokenizers.target.special.before_target, {*languages_of(tokenizers.target).values()}
    for (given, target), computed in zip(pairs, watched, strict=True):
        text = as_request(given).text
        source = source_ranges(tokenizers, computed.tokens["source"].tolist(), text, transforms)
        _, parts = word_ranges(tokenizers, text, target)
        read = computed.tokens["target_in"].tolist()
        first = len(before) + sum(1 for _ in itertools.takewhile(tags.__contains__, read[1 + len(before) :]))
        written = [range(first + part.start, first + part.stop) for part in parts]
        weights = np.asarray(computed.weights["cross"])
        with_mean = np.concatenate([weights, weights.mean(axis=1, keepdims=True)], axis=1)
        layers, heads = map(range, with_mean.shape[:2])
        for layer, head, query in itertools.product(layers, heads, ("predicts", "reads")):
            key = AlignmentHead(layer, head if head < weights.shape[1] else None, query)
            links.setdefault(key, []).append(word_links(aligned_rows(with_mean[layer, head], query), source, written))
    rates = {head: error_rate(own, references) for head, own in links.items()}
    return dict(sorted(rates.items(), key=lambda item: item[1]))
