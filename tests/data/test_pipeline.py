"""Batches: no example is lost or repeated, shapes are fixed, and a saved state is restored exactly."""

import collections
import dataclasses
import itertools
import json
import random
import time
import tracemalloc

import numpy as np
import pytest

from tests.helpers import rest_slow
from tformer_jax.base.errors import UserError
from tformer_jax.base.numbers import MIB
from tformer_jax.config import Config, DataConfig, EvalConfig, ModelConfig, NoiseConfig
from tformer_jax.data import order, pipeline
from tformer_jax.data.columns import jsonable
from tformer_jax.data.corpora import Corpus, DataError, Joined, load_corpus
from tformer_jax.data.corpora.corpus import Endless
from tformer_jax.data.pipeline import check_divisible, check_predictable, evaluation_batches, train_batches
from tformer_jax.data.rows import Shards
from tformer_jax.data.tokenizers.training import train_tokenizers
from tformer_jax.special_tokens import BOS, EOS, IGNORED, PAD

draw = random.Random(0)
WORDS = ["".join(draw.choices("abcdefgh", k=draw.randint(1, 11))) + str(number) for number in range(60)]
PAIRS = [{"source": word, "target": word.upper()} for word in WORDS]
TEXTS = [{"text": " ".join(WORDS[: number % 5 + 1])} for number in range(40)]
CORPORA = {
    "seq2seq": Corpus(PAIRS, [], []),
    "classifier": Corpus([{"text": word, "label": "xy"[len(word) % 2]} for word in WORDS], [], [], ("x", "y")),
    "decoder_lm": Corpus(TEXTS, [], []),
}
BUCKETS = {"bucket_lengths": (6, 10, 16), "batch_tokens": 40, "batch_multiple": 2}
WINDOWS = {"batching": "windows", "window": 7, "batch_size": 3}
TRANSFORMS = {"transforms": ({"kind": "bpe_dropout", "rate": 0.3}, {"kind": "case", "probability": 0.5})}
PACKED = {"batching": "packed", "window": 20, "batch_size": 3}
KINDS = {
    "translation in buckets": ("seq2seq", BUCKETS),
    "translation packed": ("seq2seq", PACKED | {"source_window": 17}),
    "translation with transforms": (
        "seq2seq",
        BUCKETS | {"tokenizer": "bpe", "vocab_size": 280} | TRANSFORMS,
    ),
    "classification in buckets": ("classifier", BUCKETS),
    "windows": ("decoder_lm", WINDOWS),
    "documents packed and truncated": ("decoder_lm", PACKED | {"long_documents": "truncate"}),
    "documents packed and split": ("decoder_lm", PACKED),
    "a mixture": ("seq2seq", BUCKETS | {"train": ("-", "-"), "weights": (3, 1), "validation": "-"}),
    "a mixture of windows": ("decoder_lm", WINDOWS | {"train": ("-", "-"), "weights": (3, 1), "validation": "-"}),
    "masked tokens": ("masked_lm", WINDOWS | {"objective": "masked_tokens"}),
    "a mixture of masked tokens": (
        "masked_lm",
        WINDOWS | {"objective": "masked_tokens", "train": ("-", "-"), "weights": (3, 1), "validation": "-"},
    ),
    "spans": ("seq2seq", WINDOWS | {"objective": "span_corruption"}),
    "denoising": ("seq2seq", WINDOWS | {"objective": "denoising", "noise": NoiseConfig(permute_sentences=True)}),
}
RESTORED = ("translation packed", "translation with transforms", "windows", "documents packed and split")
RESTORED += ("a mixture", "a mixture of masked tokens", "spans", "denoising")
ORDERED = ("a mixture", "translation with transforms", "masked tokens", "denoising")
SPLIT = ("documents packed and split", "a mixture", "spans")


def first_fast(kinds: tuple[str, ...]):
    """Returns all kinds for `pytest.mark.parametrize`: the given ones, and then the others, which are slow."""
    return rest_slow([*kinds, *(kind for kind in KINDS if kind not in kinds)], len(kinds))


def setup(kind: str, *, seed: int = 0, rows: int = 4, **changes):
    family, data = KINDS[kind]
    texts = "objective" in data or family == "decoder_lm"
    source, corpus = ("text", CORPORA["decoder_lm"]) if texts else ("tsv", CORPORA[family])
    cfg = Config(
        seed=seed,
        model=ModelConfig(family=family, max_length=32),
        data=DataConfig(**{"source": source, "train": "-", "tokenizer": "characters", **data, **changes}),
        eval=EvalConfig(batch_size=rows),
    )
    if cfg.data.mixed:
        half = len(corpus.train) // 2
        corpus = dataclasses.replace(corpus, train=Joined([corpus.train[:half], corpus.train[half:]]))
    return cfg, corpus, train_tokenizers(cfg.data, corpus.train)


def take(batches, count: int) -> list[dict[str, np.ndarray]]:
    return list(itertools.islice(batches, count))


def assert_same(first, second) -> None:
    for a, b in zip(first, second, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            np.testing.assert_array_equal(a[key], b[key])


@pytest.mark.parametrize("kind", first_fast(RESTORED))
def test_restored_anywhere_it_continues_with_the_very_next_batch(kind):
    assert_restored_exactly(setup(kind), batches=20, points=3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_restored_before_each_batch(kind):
    assert_restored_exactly(setup(kind), batches=40, points=40)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "data"),
    [
        ("seq2seq", {"source": "cldr_translation", "heldout_examples": 1}),
        ("classifier", {"source": "cldr_language", "heldout_examples": 1, "languages": ("en", "de")}),
        pytest.param(
            "decoder_lm",
            {"source": "stdlib_text", "batching": "packed", "window": 64, "batch_size": 2},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_restored_from_corpora_that_are_made(family, data):
    cfg = Config(
        model=ModelConfig(family=family),
        data=DataConfig(tokenizer="bytes", bucket_lengths=(64,), batch_tokens=256, batch_multiple=4, **data),
    )
    corpus = load_corpus(cfg, None)
    assert_restored_exactly((cfg, corpus, train_tokenizers(cfg.data, corpus.train)), batches=20, points=20)


def assert_restored_exactly(arguments, batches: int, points: int) -> None:
    iterator = train_batches(*arguments)
    states, whole = [], []
    for _ in range(batches):
        states.append(json.dumps(jsonable(iterator.get_state())))
        whole.append(next(iterator))
    iterator.close()
    for start in random.Random(1).sample(range(batches), points):
        restored = train_batches(*arguments)
        restored.set_state(json.loads(states[start]))
        assert_same(take(restored, min(3, batches - start)), whole[start : start + 3])
        restored.close()


@pytest.mark.parametrize("kind", first_fast(ORDERED))
def test_the_seed_fixes_the_order(kind):
    first, again = take(train_batches(*setup(kind)), 10), take(train_batches(*setup(kind)), 10)
    assert_same(first, again)
    other = take(train_batches(*setup(kind, seed=1)), 10)
    assert any(
        a[key].shape != b[key].shape or (a[key] != b[key]).any() for a, b in zip(first, other, strict=True) for key in a
    )


@pytest.mark.parametrize("size", [1, 2, 10, order.SMALL - 1, order.SMALL])
def test_shuffling_is_a_permutation_and_fast(size):
    """Of few examples, `grain.experimental.index_shuffle` needs up to 9 ms for each."""
    start = time.process_time()
    for seed in range(3):
        places = [order._shuffled_index(index, size, seed) for index in range(size)]
        assert sorted(places) == list(range(size))
    assert time.process_time() - start < 0.5


def test_each_epoch_has_every_example_once_and_another_order():
    cfg, corpus, tokenizers = setup("translation in buckets")
    seen = []
    for batch in train_batches(cfg, corpus, tokenizers):
        seen += [tokenizers.source.decode(row) for row in batch["source"]]
        if len(seen) > 4 * len(WORDS):
            break
    counts = collections.Counter(seen)
    assert set(counts) == set(WORDS)
    assert max(counts.values()) - min(counts.values()) <= 2
    places = order.index_blocks([len(WORDS)], (), cfg.seed, len(WORDS))
    epochs = [tuple(places[number].tolist()) for number in range(3)]
    assert {tuple(sorted(epoch)) for epoch in epochs} == {tuple(range(len(WORDS)))}
    assert len(set(epochs)) == 3


def test_shapes_are_those_of_the_buckets_and_multiples_are_kept():
    cfg, corpus, tokenizers = setup("translation in buckets")
    shapes = {batch["source"].shape for batch in take(train_batches(cfg, corpus, tokenizers), 60)}
    assert shapes == {(6, 6), (4, 10), (2, 16)}


@pytest.mark.parametrize("source_window", [17, None])
def test_packed_rows_have_the_lengths_of_the_windows(source_window):
    cfg, corpus, tokenizers = setup("translation packed", source_window=source_window)
    (batch,) = take(train_batches(cfg, corpus, tokenizers), 1)
    assert (batch["source"].shape, batch["target_in"].shape) == ((3, source_window or 20), (3, 20))


def test_a_translation_batch_by_hand():
    cfg, _, tokenizers = setup("translation in buckets")
    (batch,) = evaluation_batches(cfg, [{"source": "ab", "target": "ABCD"}], tokenizers)
    a, b = tokenizers.source.encode("ab")
    capitals = tokenizers.target.encode("ABCD")
    np.testing.assert_array_equal(batch["source"][0], [a, b, EOS, PAD, PAD, PAD])
    np.testing.assert_array_equal(batch["target_in"][0], [BOS, *capitals, PAD])
    np.testing.assert_array_equal(batch["target_out"][0], [*capitals, EOS, IGNORED])
    assert (batch["source"][1:] == PAD).all()
    assert (batch["target_out"][1:] == IGNORED).all()


LONG = {"source": "a" * 50, "target": "A" * 50}


def test_evaluation_reads_whole_pairs_up_to_the_length_of_the_model(caplog):
    cfg, _, tokenizers = setup("translation in buckets")
    (batch,) = evaluation_batches(cfg, [{"source": "a" * 31, "target": "A" * 31}], tokenizers)
    assert batch["target_out"][0, -1] == batch["source"][0, -1] == EOS
    (batch,) = evaluation_batches(cfg, [LONG], tokenizers)
    assert batch["source"][0, -1] == EOS
    np.testing.assert_array_equal(batch["target_out"][0], tokenizers.target.encode("A" * 32))
    np.testing.assert_array_equal(batch["target_in"][0], [BOS, *tokenizers.target.encode("A" * 31)])
    assert "truncating texts longer than 31 tokens (the first has 50); increase model.max_length" in caplog.text


@pytest.mark.parametrize("kind", ["translation in buckets", "translation packed"])
def test_training_drops_pairs_with_a_long_side(kind, caplog):
    cfg, _, tokenizers = setup(kind)
    short = [pair for pair in PAIRS if len(pair["source"]) < 9]
    corpus = Corpus([LONG, *short, {"source": "ab", "target": "A" * 20}], [], [])
    batches = take(train_batches(cfg, corpus, tokenizers), 40)
    texts = {tokenizers.target.decode(row) for batch in batches for row in split_rows(batch, "target_out")}
    assert texts == {pair["target"] for pair in short}
    assert "dropping pairs that do not fit" in caplog.text


@pytest.mark.parametrize("kind", ["translation in buckets", "translation packed"])
def test_a_truncated_target_has_no_end_label(kind):
    cfg, _, tokenizers = setup(kind, long_pairs="truncate")
    batches = take(train_batches(cfg, Corpus([LONG], [], []), tokenizers), 3)
    length = cfg.data.longest
    for batch in batches:
        rows = split_rows(batch, "target_out")
        assert rows
        for row in rows:
            np.testing.assert_array_equal(row, tokenizers.target.encode("A" * length))
        assert all(row[-1] == EOS for row in split_rows(batch, "source"))


def split_rows(batch, key) -> list[np.ndarray]:
    """Returns the tokens of each example of a batch, packed or not."""
    segments = batch.get({"source": "source_segments", "target_out": "target_segments"}[key])
    if segments is None:
        segments = (batch[key] >= 0).astype(np.int32)
    rows = zip(batch[key], segments, strict=True)
    return [row[segment == number] for row, segment in rows for number in range(1, segment.max() + 1)]


def test_training_data_of_long_pairs_alone_is_an_error():
    cfg, _, tokenizers = setup("translation in buckets")
    with pytest.raises(DataError, match="all pairs of split train are longer than 16 or 16 tokens: increase the last"):
        check_predictable(cfg, Corpus([LONG] * 3, PAIRS, PAIRS), tokenizers)
    blank = [{"source": "a", "target": ""}, {"source": "", "target": "b"}]
    with pytest.raises(DataError, match="all pairs of split train have a blank side: name other data"):
        check_predictable(cfg, Corpus(blank, PAIRS, PAIRS), tokenizers)


def test_a_large_corpus_of_long_pairs_is_not_read_whole_without_a_word(monkeypatch, caplog):
    """Regression test: 40 million pairs, of which none fits the model, were tokenized before the error."""

    class Counted(list):
        read = 0

        def __getitem__(self, index):
            self.read += 1
            return super().__getitem__(index)

    cfg, _, tokenizers = setup("translation in buckets")
    monkeypatch.setattr(pipeline, "CHECKED", 2)
    train = Counted([LONG] * (5 * pipeline.BLOCK))
    with pytest.raises(DataError, match="all pairs of split train are longer than 16 or 16 tokens: increase the last"):
        check_predictable(cfg, Corpus(train, PAIRS, PAIRS), tokenizers)
    told = (
        "none of 1,024 evenly spread pairs of split train fits into 16 or 16 tokens, so that all are read now: increase"
    )
    assert told in caplog.text
    train[-1] = PAIRS[0]  # in no block of those
    check_predictable(cfg, Corpus(train, PAIRS, PAIRS), tokenizers)
    caplog.clear()
    train[2 * pipeline.BLOCK], train.read = PAIRS[0], 0  # in the second block of those
    check_predictable(cfg, Corpus(train, PAIRS, PAIRS), tokenizers)
    assert train.read == 2 * pipeline.BLOCK and not caplog.text


def test_generated_examples_are_checked_in_little_memory():
    class Counted(Endless):
        def __len__(self) -> int:
            return 2**31

        def __getitem__(self, index):
            return PAIRS[index % len(PAIRS)]

    cfg, _, tokenizers = setup("translation in buckets")
    tracemalloc.start()
    try:
        check_predictable(cfg, Corpus(Counted(), PAIRS, PAIRS), tokenizers)
        assert tracemalloc.get_traced_memory()[1] < 10 * MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("kind", "sizes", "sentence"),
    [
        (
            "translation in buckets",
            {"bucket_lengths": (1,)},
            r"data.bucket_lengths=\(1,\): has room only for the special",
        ),
        (
            "translation packed",
            {"source_window": 1},
            "data.source_window=1: has room only for the special",
        ),
        ("translation packed", {"window": 1}, "data.window=1: has room only for the special tokens of a text"),
    ],
)
def test_rows_without_room_for_a_text(kind, sizes, sentence):
    with pytest.raises(UserError, match=sentence):
        train_batches(*setup(kind, **sizes))


@pytest.mark.parametrize("kind", ["translation in buckets", "classification in buckets"])
def test_evaluation_sees_every_example_once(kind):
    cfg, corpus, tokenizers = setup(kind, rows=7)
    family = cfg.model.family
    batches = list(evaluation_batches(cfg, corpus.train, tokenizers, corpus.labels, shards=Shards(4, (0, 1, 2, 3))))
    key = "source" if family == "seq2seq" else "tokens"
    assert {len(batch[key]) for batch in batches} == {8}
    texts = [tokenizers.source.decode(row) for batch in batches for row in batch[key] if (row != PAD).any()]
    assert sorted(texts) == sorted(WORDS)
    if family == "classifier":
        labels = np.concatenate([batch["label"] for batch in batches])
        assert (labels != IGNORED).sum() == len(WORDS)
        assert collections.Counter(labels[labels != IGNORED]) == collections.Counter(len(word) % 2 for word in WORDS)


@pytest.mark.parametrize("kind", ["documents packed and truncated", "documents packed and split"])
def test_packed_evaluation_scores_every_token_and_every_end(kind):
    cfg, _, tokenizers = setup(kind)
    texts = [text for text in TEXTS if len(text["text"]) > cfg.data.window] + [{"text": "short"}]
    assert len(texts) > 5
    labels = np.concatenate([batch["targets"].ravel() for batch in evaluation_batches(cfg, texts, tokenizers)])
    ids = [tokenizers.target.encode(text["text"]) for text in texts]
    expected = [token for text in ids for token in [*text[1:], EOS]]
    assert sorted(labels[labels != IGNORED]) == sorted(expected)


@pytest.mark.parametrize(
    ("kind", "devices", "sentence"),
    [
        ("translation in buckets", 3, "data.batch_multiple=2: must be a multiple of the 3 shards of a batch"),
        ("windows", 2, "data.batch_size=3: must be a multiple of the 2 shards of a batch"),
    ],
)
def test_batches_that_do_not_divide(kind, devices, sentence):
    with pytest.raises(UserError, match=sentence):
        train_batches(*setup(kind), shards=Shards(devices))


def test_the_rows_of_a_resumed_run_fit_a_mesh_that_the_message_names():
    """Regression test: it asked for other rows, which a resumed run is not allowed to have."""
    cfg = setup("windows", batch_size=24)[0]
    cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, accumulate=2))
    with pytest.raises(UserError, match=r"a multiple of 16: 8 shards .* a mesh of fewer shards, such as 6$"):
        check_divisible(cfg, 8)
    check_divisible(cfg, 6)


@pytest.mark.parametrize("kind", first_fast(SPLIT))
def test_processes_prepare_the_rows_of_the_same_batches(kind):
    """Two processes whose shards are not adjacent have the same state, from which a single process can continue."""
    sizes = {"batch_size": 4} if "batch_size" in KINDS[kind][1] else {"batch_multiple": 4, "batch_tokens": 80}
    whole = take(train_batches(*setup(kind, **sizes)), 12)
    assert_shards_of(setup(kind, **sizes), whole)


def assert_shards_of(arguments, whole) -> None:
    """Batches of four shards, prepared by two processes, are those of one."""
    first, second = (train_batches(*arguments, shards=Shards(4, own)) for own in ((0, 3), (1, 2)))
    for batch in whole[:6]:
        for own, actual in (((0, 3), next(first)), ((1, 2), next(second))):
            assert actual.keys() == batch.keys()
            for key, rows in batch.items():
                np.testing.assert_array_equal(actual[key], np.concatenate([np.split(rows, 4)[shard] for shard in own]))
    states = [json.dumps(jsonable(part.get_state())) for part in (first, second)]
    assert states[0] == states[1]
    alone = train_batches(*arguments)
    alone.set_state(json.loads(states[0]))
    assert_same(take(alone, len(whole) - 6), whole[6:])
    for batches in (first, second, alone):
        batches.close()
