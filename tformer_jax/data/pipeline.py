"""Turns a corpus into batches: an endless, seeded, resumable stream for training, single passes for evaluation."""

import dataclasses
import functools
import logging
from collections.abc import Iterator, Sequence

from tformer_jax.config import Config, kinds
from tformer_jax.config.task import task_of
from tformer_jax.data.corpora import Corpus, DataError, Example
from tformer_jax.data.corpora.corpus import CHATS, spread
from tformer_jax.data.corpora.example import NO_TEXT
from tformer_jax.data.features import FeatureConverter, document_end, feature_converter
from tformer_jax.data.prefetch import Batch, Prefetched
from tformer_jax.data.rows import (
    BLOCK,
    WHOLE_BATCH,
    Batching,
    EvaluationPass,
    Shards,
    id_reader,
    pending_reader,
    token_stream,
)
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.transforms import build_formats

PREFETCHED_BATCHES = 8
CHECKED = 256
"""Number of blocks of training examples of which one should have an example that fits the model."""
TOKEN_KEYS = {"source", "target_in", "target_out", "tokens", "targets"}
"""Keys of a batch whose values are token ids."""


def train_batches(cfg: Config, corpus: Corpus, tokenizers: Tokenizers, *, shards: Shards = WHOLE_BATCH) -> Prefetched:
    """Returns endless training batches in an order that `cfg.seed` determines, reshuffled in each epoch.

    The iterator's `get_state` and `set_state` are exact: a restored iterator continues with the next batch. The
    sequence of global batches depends only on the config. Batches are formed by the lengths of examples, which
    prepared data stores, so that only the rows of `shards.own` are read; text is tokenized in every process.

    Args:
        shards: the shards of a global batch; the returned batches have the rows of `shards.own`.

    Raises:
        UserError: a batch does not divide into the shards, the data is shorter than one window, or a transform does
            not fit the data.
        DataError: raised by the iterator for a token id outside the vocabulary.
    """
    check_divisible(cfg, shards.count)
    dataset = _batching(cfg).train_batches(cfg, corpus, tokenizers, shards)
    return Prefetched(iter(dataset.map(functools.partial(_check_ids, tokenizers))), PREFETCHED_BATCHES)


def evaluation_batches(
    cfg: Config,
    examples: Sequence[Example],
    tokenizers: Tokenizers,
    labels: tuple[str, ...] | None = None,
    *,
    indices: Sequence[int] | None = None,
    shards: Shards = WHOLE_BATCH,
) -> Iterator[Batch]:
    """Yields every example once, in batches of `cfg.eval.batch_size` rows rounded up to a multiple of the shards.

    Batches have only the rows of `shards.own`, and only these rows are read from prepared data.

    Texts are evaluated completely, whatever the length of rows in training: documents longer than a packed row continue
    in further rows, and pairs and labeled texts are truncated only where the model cannot read more.

    Args:
        indices: the examples to evaluate; None: all.
        shards: as in `train_batches`.

    Raises:
        DataError: a token id is outside the vocabulary.
    """
    rows = -(-cfg.eval.batch_size // shards.count) * shards.count
    chosen = range(len(examples)) if indices is None else indices
    reader = id_reader(examples, tokenizers, labels, build_formats(cfg))
    batches = _batching(cfg).evaluation_batches(cfg, EvaluationPass(reader, tokenizers, chosen, rows, shards))
    return (_check_ids(tokenizers, batch) for batch in batches)


def _batching(cfg: Config) -> type[Batching]:
    return kinds.load(kinds.BATCHINGS, "corrupted_windows" if cfg.data.objective else cfg.data.batching)


def without_refused(cfg: Config, corpus: Corpus, tokenizers: Tokenizers) -> Corpus:
    """Returns a corpus without the conversations that its chat template refuses (`refused_chats`)."""
    if task_of(cfg).keys != CHATS:
        return corpus
    from tformer_jax.data.refused_chats import leave_out_refused

    return leave_out_refused(cfg, corpus, tokenizers)


def check_predictable(cfg: Config, corpus: Corpus, tokenizers: Tokenizers) -> None:
    """Raises `DataError` if a split has no token to predict.

    With windows, a split needs two tokens, because the first one is not predicted.
    """
    if cfg.data.batching != "windows":
        for split in ("train", "validation", "test"):
            if not any(_has_tokens(example, tokenizers) for example in getattr(corpus, split)):
                raise DataError(f"all examples of split {split} are empty or have no token: name other data")
        _check_fitting(cfg, corpus, tokenizers)
        return
    for split, limit in (("validation", cfg.eval.examples), ("test", 0)):
        reader, end = id_reader(getattr(corpus, split), tokenizers), document_end(tokenizers.target)
        documents = spread(len(reader), min(limit or 3, 3))  # three have two separators
        tokens = len(token_stream(reader, end, documents))
        if tokens < 2:
            raise DataError(f"evaluation needs at least 2 tokens, and split {split} has {tokens}: hold out more text")


def _check_fitting(cfg: Config, corpus: Corpus, tokenizers: Tokenizers) -> None:
    """Raises `DataError` if all training pairs or conversations would be dropped.

    If there is no other in `CHECKED` blocks, warns before it reads all.
    """
    task, convert = task_of(cfg), feature_converter(cfg, tokenizers)
    if not (convert.drop and task.pairs) and task.keys != CHATS:
        return
    reader = id_reader(corpus.train, tokenizers)
    blocks = -(-len(reader) // BLOCK)

    def has_examples(convert: FeatureConverter, chosen: Sequence[int]) -> bool:
        convert.reported = True  # training reports what it drops
        read = pending_reader(reader, convert)
        return any(read(range(BLOCK * block, min(BLOCK * (block + 1), len(reader)))) for block in chosen)

    if has_examples(convert, spread(blocks, CHECKED)):
        return
    what = "pairs" if task.pairs else "conversations"
    limit = f"{f'{convert.source_length} or ' if task.pairs else ''}{convert.length} tokens"
    remedy = f"increase {convert.settings[0]}, or set data.long_pairs='truncate'"
    if blocks > CHECKED:
        logging.getLogger(__name__).warning(
            "none of %s evenly spread %s of split train fits into %s, so that all are read now: %s",
            f"{CHECKED * BLOCK:,}",
            what,
            limit,
            remedy,
        )
        if has_examples(convert, range(blocks)):
            return
    if task.pairs and not has_examples(dataclasses.replace(convert, drop=False), range(blocks)):
        raise DataError("all pairs of split train have a blank side: name other data")
    raise DataError(f"all {what} of split train are longer than {limit}: {remedy}")


def _has_tokens(example: Example, tokenizers: Tokenizers) -> bool:
    texts = {key: text for key, text in example.items() if key not in NO_TEXT}
    return any((tokenizers.source if key == "source" else tokenizers.target).encode(texts[key]) for key in texts)


def _check_ids(tokenizers: Tokenizers, batch: Batch) -> Batch:
    """Returns the batch; raises `DataError` if one of its token ids is outside the vocabulary."""
    for name in TOKEN_KEYS & batch.keys():
        size = (tokenizers.source if name == "source" else tokenizers.target).vocab_size
        if (largest := batch[name].max()) >= size:
            raise DataError(
                f"the data contains token id {largest}, but the vocabulary has only {size} tokens: the data is damaged "
                "or was prepared with other tokenizers; prepare it again"
            )
    return batch


def check_divisible(cfg: Config, shards: int) -> None:
    """Raises `UserError` unless `shards` times `cfg.train.accumulate` micro-batches split every batch evenly."""
    name = "batch_multiple" if cfg.data.batching == "buckets" else "batch_size"
    rows, count = getattr(cfg.data, name), cfg.train.accumulate
    if rows % (parts := shards * count) == 0:
        return
    needed = f"the {shards} shards of a batch (the mesh's data * fsdp * expert)"
    if rows % shards == 0:
        needed = f"{parts}: {shards} shards of a batch (the mesh's data * fsdp * expert) times train.accumulate={count}"
    fitting = max((fewer for fewer in range(1, shards) if rows % (fewer * count) == 0), default=1)
    remedy = f"a resumed run, which keeps it, needs a mesh of fewer shards, such as {fitting}"
    raise cfg.data.error(name, f"must be a multiple of {needed}; {remedy}")
