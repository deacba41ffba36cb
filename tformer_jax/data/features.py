"""Tokenizes examples and builds model inputs from their token ids."""

import contextlib
import contextvars
import dataclasses
import logging
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tformer_jax.config import Config, DataConfig
from tformer_jax.config.task import task_of
from tformer_jax.data.columns import Block, Column
from tformer_jax.data.corpora import Example
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.tokens import document_end
from tformer_jax.special_tokens import DEFAULT_SPECIAL_TOKENS, EOS, IGNORED, SpecialTokens

if TYPE_CHECKING:
    from tformer_jax.data.tags import Tags
    from tformer_jax.data.transforms.base import Transforms


_REPORTED = contextvars.ContextVar("_REPORTED", default=False)


@contextlib.contextmanager
def long_texts_reported(reported: bool) -> Iterator[None]:
    """Context in which a new `FeatureConverter` says nothing about long texts if they are `reported` already."""
    token = _REPORTED.set(reported)
    try:
        yield
    finally:
        _REPORTED.reset(token)


class IdReader(Protocol):
    """Random access to the token ids of a split."""

    def __len__(self) -> int: ...

    def read(self, indices: Sequence[int]) -> Block:
        """Returns the token ids of the examples at `indices`."""


@dataclasses.dataclass(frozen=True)
class Tokenized:
    """Tokenizes the examples of a split on access, changed by `transforms`.

    With transforms, an index may be `epoch * len(self) + index`: they draw anew in each epoch.
    """

    examples: Sequence[Example]
    tokenizers: Tokenizers
    labels: tuple[str, ...] | None = None
    transforms: "Transforms | None" = None

    def __len__(self) -> int:
        return len(self.examples)

    def read(self, indices: Sequence[int]) -> Block:
        """Tokenizes the examples at `indices`."""
        if self.transforms is None:
            return tokenize([self.examples[int(index)] for index in indices], self.tokenizers, self.labels)
        examples, changes = [], []
        for number in indices:
            epoch, index = divmod(int(number), len(self))
            transforms, epoch = self.transforms.at_epoch(epoch)
            rng = transforms.generator(epoch, index)
            examples.append(transforms.change(self.examples[index], rng, index))
            changes.append((transforms, rng))
        return tokenize(examples, self.tokenizers, self.labels, changes)


def tokenize(
    examples: Sequence[Example],
    tokenizers: Tokenizers,
    labels: tuple[str, ...] | None = None,
    changes: "Sequence[tuple[Transforms, random.Random]]" = (),
) -> Block:
    """Tokenizes examples, without the special tokens around them; a label becomes its index in `labels`.

    Symbols stand for the placeholders of pairs. Documents begin with the special tokens before a text.

    Args:
        changes: the transforms of each example, which change its ids, with their generator; (): there are none.
    """
    given = examples
    if names := tokenizers.placeholders:
        from tformer_jax.data.placeholders import mask_example

        examples = [mask_example(names, example) for example in examples]
    block: Block = {}
    for key in examples[0]:
        values = [example[key] for example in examples]
        if key == "links":
            from tformer_jax.data.word_links import linked_places

            sizes = block["target"].lengths.tolist()
            places = [linked_places(tokenizers, pair, size) for pair, size in zip(given, sizes, strict=True)]
            block[key] = Column.from_rows(places)
        elif key == "label":
            assert labels is not None
            block[key] = Column.from_rows([[labels.index(value)] for value in values])
        elif key == "messages":
            from tformer_jax.data.tokenizers.chats import encode_chats

            block |= encode_chats(tokenizers.target, values)
        elif key == "direction":
            from tformer_jax.data.tags import direction_column

            block[key] = direction_column(tokenizers, values)
        else:
            tokenizer = tokenizers.source if key == "source" else tokenizers.target
            rows = tokenizer.encode_batch(values)
            if changes:
                drawn = zip(rows, values, changes, strict=True)
                rows = [transforms.change_ids(ids, text, tokenizer, rng) for ids, text, (transforms, rng) in drawn]
            block[key] = Column.from_rows(rows)
    if block.keys() == {"text"}:
        block["text"] = block["text"].surround(tokenizers.target.special.before)
    return block


@dataclasses.dataclass
class FeatureConverter:
    """Converts token ids to the inputs and labels of a model.

    They are truncated to the row lengths, or dropped; the first time is logged as a warning.
    """

    length: int
    source_length: int
    split: bool = False
    """Split a document that is too long into several examples instead of truncating it."""
    drop: bool = False
    """Drop pairs and conversations that are too long instead of truncating them."""
    drop_blank: bool = False
    """Drop pairs with a side that has no token, and conversations without a label."""
    source: SpecialTokens = DEFAULT_SPECIAL_TOKENS
    """Special tokens of sources."""
    target: SpecialTokens = DEFAULT_SPECIAL_TOKENS
    """Special tokens of targets, texts and documents."""
    end: int = EOS
    """Label of the last token of a document."""
    settings: tuple[str, str] = ("data.window", "data.source_window")
    """Names of the settings that `length` and `source_length` are, for messages."""
    tags: "Tags | None" = None
    """Tags of examples with directions."""
    adapt: Callable[[Block], Block] | None = None
    """Turns the result into the inputs and labels of a task (`Task.features`)."""
    reported: bool = dataclasses.field(default_factory=_REPORTED.get, init=False)
    """Whether no warning about long texts is due."""

    def __call__(self, ids: Block) -> Block:
        """Returns {"source", "target_in", "target_out"} for translation pairs, {"tokens", "label"} for labeled texts
        and {"tokens", "targets"} for documents and conversations.

        Each example yields one example, except long pairs and conversations if `drop`, which yield none, and
        documents: an empty one yields none, a long one several if `split`. A truncated target has no end label, so that
        no model learns to stop there.
        """
        features = self._features(ids)
        return features if self.adapt is None else self.adapt(features)

    def _features(self, ids: Block) -> Block:
        if "label" in ids:
            texts = self._truncate(ids["text"], self.limits(ids)["text"], self.settings[0])
            return {"tokens": texts.surround(self.target.before, self.target.after), "label": ids["label"]}
        if "messages" in ids:
            return self._chats(ids["messages"], ids["answers"])
        if "text" in ids:
            tokens, targets = ids["text"], ids["text"].shift_left(self.end)
            if not self.split:
                tokens, targets = self._truncate(tokens, self.length, self.settings[0]), targets.truncate(self.length)
            return {"tokens": tokens.split(self.length), "targets": targets.split(self.length)}
        return self._pairs(ids)

    def _chats(self, ids: Column, answers: Column) -> Block:
        """Labels the assistant's tokens; drops conversations that are too long, or without an answer in their row."""
        labels = Column(np.where(answers.ids, ids.ids, IGNORED), ids.lengths).shift_left(IGNORED)
        inputs = np.maximum(ids.lengths - 1, 0)
        fits = (inputs <= self.length) | (not self.drop)
        self._warn_of_dropped(fits, "conversations", f"{self.length} tokens", self.settings[0])
        tokens = self._truncate(ids.truncate(inputs), self.length, self.settings[0])
        targets = labels.truncate(tokens.lengths)
        if self.drop_blank:
            fits &= np.array([(row != IGNORED).any() for row in targets.rows()], bool)
        return {"tokens": tokens.select(fits), "targets": targets.select(fits)}

    def _warn_of_dropped(self, fits: np.ndarray, what: str, limits: str, settings: str) -> None:
        if not fits.all() and not self.reported:
            logging.getLogger(__name__).warning(
                "dropping %s that do not fit %s; increase %s to keep them, or set data.long_pairs='truncate'",
                *(what, limits, settings),
            )
            self.reported = True

    def _pairs(self, ids: Block) -> Block:
        if self.drop or self.drop_blank:
            lengths = {key: column.lengths for key, column in ids.items()}
            fits = self._fits(lengths)
            limits = f"{self.source_length} tokens of source and {self.length} of target"
            self._warn_of_dropped(fits, "pairs", limits, " or ".join(dict.fromkeys(reversed(self.settings))))
            chosen = fits & self._has_tokens(lengths)
            ids = {key: column.select(chosen) for key, column in ids.items()}
        source = self._truncate(ids["source"], self.limits(ids)["source"], self.settings[1])
        source_tags, tags = ((), ()) if self.tags is None else self.tags.of_sides(ids)
        first, last = ((), source_tags) if self.source.tags_last else (source_tags, ())
        start, tags = self.target.start_target(tags)
        inputs, labels = (
            ids["target"].surround([*self.target.before_target, *given], self.target.after_side)
            for given in (tags, [IGNORED] * len(tags))
        )
        target = self._truncate(labels, self.length, self.settings[0])
        aligned: Block = {}
        if "links" in ids:  # of data without tags
            places, before = ids["links"].ids, len(self.source.before)
            column = Column(np.where(places < 0, IGNORED, places + before), ids["links"].lengths)
            around = [IGNORED] * len(self.target.before_target), [IGNORED] * len(self.target.after_side)
            aligned = {"aligned": column.surround(*around).truncate(target.lengths)}
        return {
            **aligned,
            "source": source.surround([*self.source.before, *first], [*self.source.after_source, *last]),
            "target_in": inputs.prepend(start).truncate(target.lengths),
            "target_out": target,
        }

    def limits(self, keys: Collection[str]) -> dict[str, int]:
        """Returns the maximum number of ids of each text of examples with these keys; {} if texts are split."""
        if "source" in keys:
            source = self.source_length - self.source.added_to_side
            target = self.length - self.target.added_to_side
            if self.tags is not None:
                source -= len(self.tags.source)
                target -= len(self.target.start_target(self.tags.target)[1])
            return {"source": source, "target": target}
        if "label" in keys:
            return {"text": self.length - self.target.added_to_text}
        if "messages" in keys:
            return {"messages": self.length + 1}
        return {} if self.split else {"text": self.length}

    def _fits(self, lengths: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns whether both sides of pairs fit into their rows: bool [pairs]."""
        limits = self.limits(lengths)
        long = np.any([lengths[side] > limit for side, limit in limits.items()], axis=0)
        return ~long if self.drop else np.ones_like(long)

    def _has_tokens(self, lengths: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns whether both sides of pairs have tokens: bool [pairs]."""
        blank = (lengths["source"] == 0) | (lengths["target"] == 0)
        return ~blank if self.drop_blank else np.ones_like(blank)

    def pieces(self, lengths: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns the number of examples made of each text, given the numbers of its ids by key: int64 [texts]."""
        if "source" in lengths:
            return (self._fits(lengths) & self._has_tokens(lengths)).astype(np.int64)
        if "text" not in lengths or "label" in lengths:
            return np.ones(len(next(iter(lengths.values()))), np.int64)
        pieces = -(-lengths["text"] // self.length)
        return pieces if self.split else np.minimum(pieces, 1)

    def _truncate(self, column: Column, limit: int, setting: str) -> Column:
        truncated = column.truncate(limit)
        if truncated is not column and not self.reported:
            logging.getLogger(__name__).warning(
                "truncating texts longer than %d tokens (the first has %d); increase %s to keep them",
                limit,
                column.lengths[column.lengths > limit][0],
                setting,
            )
            self.reported = True
        return truncated


def feature_converter(cfg: Config, tokenizers: Tokenizers) -> FeatureConverter:
    """Builds the `FeatureConverter` for the row lengths in `cfg.data`.

    Raises:
        UserError: a row has no room for a text beside its special tokens.
    """
    data, source, target = cfg.data, tokenizers.source.special, tokenizers.target.special
    if data.batching == "buckets":
        length = source_length = data.bucket_lengths[-1]
        name = source_name = "bucket_lengths"
        settings = ("the last of data.bucket_lengths",) * 2
    else:
        length, source_length = data.window, data.source_window or data.window
        name, source_name = "window", "source_window" if data.source_window else "window"
        settings = (f"data.{name}", f"data.{source_name}")
    task = task_of(cfg)
    if task.pairs:
        tags = (len(data.source_tags), len(target.start_target(data.target_tags)[1])) if data.multilingual else (0, 0)
        _check_room(data, source_name, source_length, source.added_to_side + tags[0])
        _check_room(data, name, length, target.added_to_side + tags[1])
    elif not task.documents:
        _check_room(data, name, length, target.added_to_text)
    end = document_end(tokenizers.target)
    return FeatureConverter(
        length,
        source_length,
        split=data.long_documents == "split",
        drop=data.long_pairs == "drop",
        drop_blank=data.filters.blank_sides,
        source=source,
        target=target,
        end=IGNORED if end is None else end,
        settings=settings,
        tags=_tags(data, tokenizers),
        adapt=task.features,
    )


def _tags(data: DataConfig, tokenizers: Tokenizers) -> "Tags | None":
    if not data.multilingual:
        return None
    from tformer_jax.data.tags import Tags

    return Tags.from_config(data, tokenizers)


def evaluation_converter(cfg: Config, tokenizers: Tokenizers) -> FeatureConverter:
    """Builds the `FeatureConverter` of evaluation: pairs and labeled texts as far as the model can read them."""
    convert = dataclasses.replace(feature_converter(cfg, tokenizers), split=True, drop=False, drop_blank=False)
    if task_of(cfg).documents:
        return convert
    longest = cfg.model.max_length
    return dataclasses.replace(convert, length=longest, source_length=longest, settings=("model.max_length",) * 2)


def _check_room(cfg: DataConfig, name: str, length: int, added: int) -> None:
    if length <= added:
        raise cfg.error(name, f"has room only for the special tokens of a text; write at least {added + 1}")
