"""Packing: each token once and in order, separate documents, little padding, exact restoration of states."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tformer_jax as tj
from tests.helpers import tiny
from tformer_jax.data import packing
from tformer_jax.data.columns import Column, split_examples, with_ids
from tformer_jax.data.features import FeatureConverter, Tokenized
from tformer_jax.data.packing import POOL, choose_row
from tformer_jax.data.rows import WHOLE_BATCH, RowReader
from tformer_jax.data.tokenizers.base import FIRST
from tformer_jax.special_tokens import BOS, EOS, IGNORED, PAD

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=60)


def documents(lengths, split: bool, window: int = 8):
    """Returns documents of distinct numbers, as examples of a language model."""
    fresh = itertools.count(10)
    texts = [np.array(list(itertools.islice(fresh, length)), np.int32) for length in lengths]
    features = FeatureConverter(window, window, split=split)({"text": Column.from_rows(texts)})
    return texts, split_examples(features)


def packed_once(examples, rows: int, capacity):
    read = RowReader(Tokenized((), None), FeatureConverter(0, 0), WHOLE_BATCH)
    return packing.packed_once(with_ids(examples), rows, capacity, read)


def segments_of(batches, tokens: str, segments: str):
    """Returns the ids of each segment of each row."""
    for batch in batches:
        for row, numbers in zip(batch[tokens], batch[segments], strict=True):
            assert (numbers[row == PAD] == 0).all()
            for number in range(1, numbers.max(initial=0) + 1):
                places = np.flatnonzero(numbers == number)
                assert len(places) and (np.diff(places) == 1).all(), "a segment has no hole"
                yield row[places]


@given(LENGTHS)
def test_split_documents_keep_every_token_once_and_in_order(lengths):
    texts, examples = documents(lengths, split=True)
    batches = list(packed_once(examples, 3, {"tokens": 8}))
    actual = {int(piece[0]): piece for piece in segments_of(batches, "tokens", "segments")}
    for text in texts:
        pieces = [actual.pop(int(text[start])) for start in range(0, len(text), 8)]
        np.testing.assert_array_equal(np.concatenate(pieces), text)
    assert not actual
    predicted = np.concatenate([batch["targets"][batch["targets"] != IGNORED] for batch in batches])
    assert sorted(predicted) == sorted([*np.concatenate([text[1:] for text in texts]), *[EOS] * len(texts)])


@given(LENGTHS)
def test_truncated_documents_keep_their_beginning(lengths):
    texts, examples = documents(lengths, split=False)
    batches = list(packed_once(examples, 2, {"tokens": 8}))
    actual = {int(piece[0]): piece for piece in segments_of(batches, "tokens", "segments")}
    assert len(actual) == len(texts)
    for text in texts:
        np.testing.assert_array_equal(actual[int(text[0])], text[:8])


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), min_size=1, max_size=40))
def test_pairs_stay_together(sizes):
    fresh = itertools.count(10)
    pairs = [tuple(np.array(list(itertools.islice(fresh, size)), np.int32) for size in both) for both in sizes]
    sources, targets = (Column.from_rows(side) for side in zip(*pairs, strict=True))
    examples = split_examples(FeatureConverter(length=12, source_length=8)({"source": sources, "target": targets}))
    batches = list(packed_once(examples, 3, {"source": 8, "target_in": 12}))
    assert {batch["source"].shape for batch in batches} == {(3, 8)}
    assert {batch["target_out"].shape for batch in batches} == {(3, 12)}
    sources = list(segments_of(batches, "source", "source_segments"))
    targets = list(segments_of(batches, "target_in", "target_segments"))
    assert len(sources) == len(targets) == len(pairs)
    expected = {int(source[0]): (source, target) for source, target in pairs}
    for source, target in zip(sources, targets, strict=True):
        whole_source, whole_target = expected.pop(int(source[0]))
        np.testing.assert_array_equal(source, [*whole_source, EOS])
        np.testing.assert_array_equal(target, [BOS, *whole_target])
    assert not expected


def test_targets_stand_below_their_tokens():
    _, examples = documents([3, 5], split=False)
    (batch,) = packed_once(examples, 1, {"tokens": 8})
    np.testing.assert_array_equal(batch["tokens"], [[10, 11, 12, 13, 14, 15, 16, 17]])
    np.testing.assert_array_equal(batch["targets"], [[11, 12, EOS, 14, 15, 16, 17, EOS]])
    np.testing.assert_array_equal(batch["segments"], [[1, 1, 1, 2, 2, 2, 2, 2]])


def test_empty_documents_are_no_examples():
    texts = Column.from_rows([[], [5, 6], [], []])
    for split in (True, False):
        (example,) = split_examples(FeatureConverter(8, 8, split=split)({"text": texts}))
        np.testing.assert_array_equal(example["tokens"], [5, 6])
        np.testing.assert_array_equal(example["targets"], [6, EOS])


@pytest.mark.parametrize(
    ("lengths", "capacity", "row"), [([5, 4, 3], 8, [0, 2]), ([2, 5, 6], 8, [0, 2]), ([8, 8], 8, [0])]
)
def test_a_row_by_hand(lengths, capacity, row):
    assert choose_row(np.array([lengths]), np.array([capacity])) == row


def test_free_tokens_of_one_side_are_not_those_of_the_other():
    """After (3, 4), (1, 8) is free; (2, 1) would have the same number in radix 7, and does not fit."""
    assert choose_row(np.array([[3, 3, 2], [4, 4, 1]]), np.array([4, 12])) == [0]


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=50))
def test_a_row_holds_the_oldest_and_fits(sizes):
    lengths, capacity = np.array(sizes).T, np.array([20, 24])
    chosen = choose_row(lengths, capacity)
    assert 0 in chosen
    assert len(set(chosen)) == len(chosen)
    assert (lengths[:, chosen].sum(axis=1) <= capacity).all()
    left = capacity - lengths[:, chosen].sum(axis=1)
    others = np.delete(lengths, chosen, axis=1)
    assert not (others <= left[:, None]).all(axis=0).any(), "nothing that waits would still have fitted"


def test_padding_of_sentence_pairs_stays_below_one_percent():
    rng = np.random.default_rng(0)
    source = np.clip(np.exp(rng.normal(2.6, 0.35, 8 * POOL)), 3, 40).astype(int)
    target = np.clip(source * rng.normal(1.05, 0.15, len(source)), 3, 40).astype(int)
    room = round(256 * (source + 1).sum() / (target + 1).sum())
    texts = {"source": Column(np.full(source.sum(), 9), source), "target": Column(np.full(target.sum(), 9), target)}
    examples = split_examples(FeatureConverter(length=256, source_length=room)(texts))
    batches = list(packed_once(examples, 8, {"source": room, "target_in": 256}))[:-8]
    for key in ("source", "target_in"):
        assert np.mean([(batch[key] == PAD).mean() for batch in batches]) < 0.01


def test_short_examples_of_small_corpora_are_not_taken_epochs_ahead():
    """Regression test: they filled the rows of the first epochs up to four times, and others were not drawn at all."""
    sizes = np.random.default_rng(0).integers(4, 60, 160)
    texts = [[number] * size for number, size in enumerate(sizes.tolist())]
    data = tj.DataConfig(source="python", tokenizer="ids", batching="packed", window=64, batch_size=8, vocab_size=256)
    cfg = tj.Config(model=tiny("decoder_lm", vocab_size=None, max_length=64), data=data)
    drawn, epochs = np.zeros(160), 2
    for batch in itertools.islice(tj.batches(cfg, texts), epochs * int(sizes.sum()) // (8 * 64)):
        ids, counts = np.unique(batch["tokens"], return_counts=True)
        numbers, counts = ids[ids >= FIRST] - FIRST, counts[ids >= FIRST]
        drawn[numbers] += counts / sizes[numbers]
    short = sizes < np.quantile(sizes, 0.25)
    assert drawn.max() <= epochs + 1 and drawn.min() >= epochs - 1
    assert drawn[short].mean() < drawn[~short].mean() + 0.3
