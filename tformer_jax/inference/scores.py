"""Log-probabilities of the tokens of given outputs, from one forward pass."""

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from tformer_jax.base.errors import UserError
from tformer_jax.data.chat.messages import Chat
from tformer_jax.data.placeholders import mask_pair
from tformer_jax.data.tokenizers import Tokenizer
from tformer_jax.data.tokenizers.chats import encode_chat
from tformer_jax.inference.batching import TextProcessor, compute_rows
from tformer_jax.inference.encoding import (
    NO_START,
    LongTexts,
    TextError,
    check_example,
    dropped_characters,
    prompt_length,
    start_of_text,
)
from tformer_jax.inference.languages import Languages
from tformer_jax.inference.requests import as_request
from tformer_jax.models import registry
from tformer_jax.nn.sharding import replicate
from tformer_jax.nn.xla import top_k
from tformer_jax.special_tokens import BOS, IGNORED

POSITIONS_AT_ONCE = 64
"""Number of positions per row whose logits are in memory at once."""


class Row(NamedTuple):
    """Model inputs and the output to score."""

    inputs: dict[str, list[int]]
    """Token ids by batch key (see `registry`)."""
    labels: list[int]
    """One per decoder input; IGNORED labels are not scored."""


class Scored(NamedTuple):
    """Scored tokens of an output, and their log-probabilities."""

    tokens: list[int]
    log_probabilities: list[float]
    """Natural logarithms, computed in float32."""
    top: Sequence[Mapping[int, float]] = ()
    """Log-probabilities of the most probable tokens at each position, best first, if requested."""

    @property
    def total(self) -> float:
        """Log-probability of the output."""
        return math.fsum(self.log_probabilities)


class Scorer(TextProcessor[Sequence[Any] | Chat, Row, Scored]):
    """Scores (source, target) pairs with a `Seq2Seq` model, or texts and conversations with a `DecoderLM` model.

    All tokens of a target are scored, and its end. The first token of a text is not scored, unless the tokenizer begins
    texts with a special token. A (prompt, continuation) pair of a `DecoderLM` is scored from the end of the prompt on,
    a `Chat` where the assistant writes; an empty prompt starts a text (`start_of_text`). The end that may follow a text
    is not scored, since a text may be part of a document. A text that cannot be encoded raises `TextError`. A source
    may be a `Request` with its languages; the tags of a target are not scored.
    """

    @functools.cached_property
    def _languages(self) -> Languages:
        return Languages(self.cfg.data, self.tokenizers)

    def _encode(self, long_texts: LongTexts, index: int, example: Sequence[Any] | Chat) -> Row:
        if isinstance(example, Chat):
            return self._encode_chat(long_texts, index, example)
        check_example(self.cfg.model, index, example)
        encode = self._encode_text if self.cfg.model.model_class.continues else self.encode_pair
        return encode(long_texts, index, example)

    def encode_pair(self, long_texts: LongTexts, index: int, pair: Sequence[Any]) -> Row:
        """Returns the row that scores the target of pair `index` after its tags, and its end unless it is truncated.

        Raises:
            TextError: a text is too long and not truncated, the model does not know its language, or a request has a
                prefix.
        """
        max_length, request = self.cfg.model.max_length, as_request(pair[0])
        if request.prefix is not None:
            raise TextError(index, "has a prefix, which is for outputs: leave it out")
        source_tags, tags = self._languages.tags_of(index, request)
        sides = self.tokenizers.source.special, self.tokenizers.target.special
        start, tags = sides[1].start_target(tags)
        given = [*sides[1].before_target, *tags]
        limits = max_length - sides[0].added_to_side - len(source_tags), max_length - len(given)
        text = self._languages.format_source(request.text)
        source_text, target_text = mask_pair(self.tokenizers.placeholders, text, pair[1])
        source = long_texts.fit(index, self.tokenizers.source.encode(source_text), limits[0], "source")
        ids = _encode_whole(self.tokenizers.target, index, target_text)
        target = long_texts.fit(index, ids, limits[1], "target")
        if source is None or target is None:
            return make_pair_row(sides[0].wrap_side([]), [])
        end = sides[1].after_side if len(target) == len(ids) else ()
        read = [*given, *target, *end][:max_length]
        row = make_pair_row(sides[0].wrap_side(source, source_tags), read, start)
        unscored = range(len(given) - len(tags), len(given))
        return row._replace(labels=[IGNORED if place in unscored else label for place, label in enumerate(row.labels)])

    def _encode_chat(self, long_texts: LongTexts, index: int, chat: Chat) -> Row:
        """Returns the row that scores the assistant's tokens of conversation `index`."""
        try:
            encoded = encode_chat(self.tokenizers.target, chat)
        except UserError as error:
            raise TextError(index, str(error)) from None
        ids = long_texts.fit(index, encoded.ids, self.cfg.model.max_length + 1, "conversation") or []
        return Row({"tokens": ids[:-1]}, encoded.labels[1 : len(ids)])

    def _encode_text(self, long_texts: LongTexts, index: int, example: Sequence[str]) -> Row:
        model, tokenizer = self.cfg.model, self.tokenizers.target
        before = tokenizer.special.before
        encoded = _encode_whole(tokenizer, index, "".join(example))
        prompt = prompt_length(tokenizer, example, encoded)
        if encoded and len(example) == 2 and not prompt:
            before = start_of_text(self.cfg, tokenizer)
            if not before:
                raise TextError(index, f"the prompt has no token of its own, and {NO_START}: write a longer one")
            prompt = len(before)
        text = long_texts.fit(index, encoded, model.max_length + 1 - len(before), "text")
        ids = [*before, *text] if text else []
        prompt = min(prompt, len(ids))
        row = make_text_row(ids, max(prompt, len(before), 1))
        return row._replace(inputs=row.inputs | {"prefix": [prompt]}) if model.prefix_lm else row

    def _compute(self, params: Any, rows: list[Row]) -> Iterator[Scored]:
        return score_rows(self.model, params, rows, self.cfg.eval.batch_size)


def _encode_whole(tokenizer: Tokenizer, index: int, text: str) -> list[int]:
    """Returns the token ids of text `index`; raises `TextError` if the tokenizer leaves out one of its characters."""
    if dropped := dropped_characters(tokenizer, text):
        raise TextError(index, f"has no probability: {dropped[0]!r} is not in the vocabulary")
    return tokenizer.encode(text)


def make_pair_row(source: list[int], target: list[int], start: int = BOS) -> Row:
    """Returns the row that scores all of `target`, given the special tokens around it and the decoder's first input."""
    return Row({"source": source, "target_in": [start, *target[:-1]]}, target)


def make_text_row(ids: list[int], given: int = 1) -> Row:
    """Returns the row that scores all tokens except the first `given`, which must be at least 1."""
    return Row({"tokens": ids[:-1]}, [IGNORED] * (given - 1) + ids[given:])


def score_rows(model: nn.Module, params: Any, rows: Sequence[Row], batch_size: int, top: int = 0) -> Iterator[Scored]:
    """Yields the scores of the labels of each row, except IGNORED ones.

    Args:
        top: number of most probable tokens to return at each position.
    """
    function = functools.partial(_label_scores, top=top)
    scores = compute_rows(
        function, model, params, [row.inputs | {model.labels: row.labels} for row in rows], batch_size
    )
    return itertools.starmap(_scored, zip(rows, scores, strict=True))


def top_rows(
    model: nn.Module, params: Any, rows: Sequence[Mapping[str, Sequence[int]]], batch_size: int, top: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the largest log-probabilities at the labels of each row, and their tokens, best first: [T, top] each.

    Args:
        rows: inputs and labels by batch key (see `registry`).
    """
    function = functools.partial(_label_scores, top=top)
    scores = compute_rows(function, model, params, rows, batch_size)
    for row, (_, log_p, ids) in zip(rows, scores, strict=True):
        labels = len(row[model.labels])
        yield log_p[:labels], ids[:labels]


def _scored(row: Row, scores: tuple[np.ndarray, ...]) -> Scored:
    """Returns the scores of a row, given results of `_label_scores`, [T] and [T, top]."""
    labels = np.array(row.labels, np.int32)
    values, *top = (part[: len(labels)][labels != IGNORED].tolist() for part in scores)
    best = [dict(zip(ids, log_p, strict=True)) for log_p, ids in zip(*top, strict=True)]
    return Scored(labels[labels != IGNORED].tolist(), values, best)


@functools.partial(jax.jit, static_argnames=("model", "top"))
def _label_scores(model: nn.Module, params: Any, batch: registry.Batch, top: int) -> tuple[jax.Array, ...]:
    """Returns log-probabilities of labels, float32 [B, T], meaningless where IGNORED; `batch` is as for `forward`.

    If `top` is not 0, also returns the largest log-probabilities, float32 [B, T, top], and their tokens, int32.
    """
    features, labels, _ = registry.forward(model, params, batch, method="features")

    def score(position: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        x, label = position
        logits: Any = model.apply({"params": params}, x, method="logits")
        log_p = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
        chosen = jnp.take_along_axis(log_p, jnp.maximum(label, 0)[:, None], axis=-1)[:, 0]
        return (chosen, *(top_k(log_p, min(top, log_p.shape[-1])) if top else ()))

    scores = jax.lax.map(score, (features.swapaxes(0, 1), labels.swapaxes(0, 1)), batch_size=POSITIONS_AT_ONCE)
    return jax.tree.map(lambda part: replicate(part.swapaxes(0, 1)), scores)
