"""Mixtures: each entry has its share, of examples or of tokens, in an order of its own."""

import dataclasses
import random

import numpy as np
import pytest

from tests.data.test_pipeline import assert_restored_exactly, assert_same, assert_shards_of, setup, take
from tests.helpers import rest_slow
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, DataConfig, ModelConfig
from tformer_jax.data import mixtures, order
from tformer_jax.data.corpora import Corpus, DataError, Joined, load_corpus
from tformer_jax.data.mixtures import example_weights, shares
from tformer_jax.data.pipeline import train_batches
from tformer_jax.data.prepare import prepare
from tformer_jax.data.summary import summarize
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.simple import ByteTokenizer
from tformer_jax.special_tokens import IGNORED, PAD

BYTES = Tokenizers(ByteTokenizer(), ByteTokenizer())
draw = random.Random(0)
LONG = ["a" * draw.randint(30, 60) for _ in range(300)]
SHORT = ["b" * draw.randint(1, 5) for _ in range(700)]
BUCKETS = {"bucket_lengths": (8, 32, 64), "batch_tokens": 512, "batch_multiple": 4}
PACKED = {"batching": "packed", "window": 64, "batch_size": 8}
KINDS = {
    "pairs in buckets": ("seq2seq", BUCKETS),
    "pairs packed": ("seq2seq", PACKED),
    "pairs in buckets, many dropped": ("seq2seq", BUCKETS | {"bucket_lengths": (8, 48)}),
    "pairs packed and truncated": ("seq2seq", PACKED | {"window": 24, "long_pairs": "truncate"}),
    "labeled texts in buckets": ("classifier", BUCKETS),
    "documents packed and split": ("decoder_lm", PACKED | {"window": 25}),
    "documents packed and truncated": ("decoder_lm", PACKED | {"window": 25, "long_documents": "truncate"}),
}


def lines(family: str, texts: list[str]) -> list[dict[str, str]]:
    if family == "seq2seq":
        return [{"source": text, "target": text[1:] + text[:1]} for text in texts]
    return [{"text": text} | ({"label": "x"} if family == "classifier" else {}) for text in texts]


def mixed(kind: str, **changes) -> tuple[Config, Corpus, Tokenizers]:
    """Returns an equal mixture of long and short lines, by tokens unless `changes` say otherwise."""
    family, data = KINDS[kind]
    source = "lines" if family == "decoder_lm" else "tsv"
    settings = {"weights": (0.5, 0.5), "weight_by": "tokens", **data, **changes}
    cfg = Config(
        model=ModelConfig(family=family, max_length=64),
        data=DataConfig(source=source, train=("long", "short"), validation="-", tokenizer="bytes", **settings),
    )
    train = Joined([lines(family, LONG), lines(family, SHORT)])
    return cfg, Corpus(train, [], [], ("x",) if family == "classifier" else None), BYTES


def drawn(arguments, batches: int = 100) -> dict[str, np.ndarray]:
    """Counts the examples and tokens of long and of short lines in batches: int64 [2] each."""
    actual = take(train_batches(*arguments), batches)
    counts = {"examples": np.zeros(2, np.int64), "tokens": np.zeros(2, np.int64)}
    b = BYTES.target.encode("b")
    keys = {"source": "source_segments", "target_out": "target_segments", "tokens": "segments"}
    for batch in actual:
        for key in keys.keys() & batch.keys():
            segments = batch.get(keys[key], ((batch[key] != PAD) & (batch[key] != IGNORED)).astype(np.int32))
            for row, numbers in zip(batch[key], segments, strict=True):
                for number in range(1, numbers.max() + 1):
                    ids = row[numbers == number]
                    owner = int(np.isin(ids, b).any())
                    counts["tokens"][owner] += len(ids)
                    counts["examples"][owner] += key != "source"
    return counts


def share(counts: np.ndarray) -> float:
    return counts[0] / counts.sum()


OF_A_KIND = ("pairs in buckets, many dropped", "pairs packed and truncated", "documents packed and split")
"""Kinds that also drop, cut or split."""


@pytest.mark.long
@pytest.mark.parametrize("kind", rest_slow([*OF_A_KIND, *(kind for kind in KINDS if kind not in OF_A_KIND)], 3))
def test_weights_by_tokens_are_the_shares_in_tokens(kind):
    assert share(drawn(mixed(kind))["tokens"]) == pytest.approx(0.5, abs=0.03)


@pytest.mark.long
@pytest.mark.parametrize("weights", rest_slow([(3, 1), (1, 4)], 1))
def test_unequal_weights_by_tokens(weights):
    counts = drawn(mixed("pairs in buckets", weights=weights), 120)
    assert share(counts["tokens"]) == pytest.approx(weights[0] / sum(weights), abs=0.03)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        pytest.param("pairs in buckets", {}, marks=pytest.mark.slow),
        pytest.param("pairs packed", {}, marks=pytest.mark.slow),
        (
            "pairs in buckets",
            {"weights": (), "stages": ("long until step 4", "long 2 to 1, short 0 to 1 until step 9", "short")},
        ),
    ],
)
def test_prepared_data_has_the_batches_of_its_text(kind, changes, tmp_path, monkeypatch):
    """Prepared data is weighted by the lengths that it stores, of as few examples as long texts are."""
    monkeypatch.setattr("tformer_jax.data.corpora.corpus.CHARACTERS", 3000)
    cfg, corpus, tokenizers = mixed(kind, **changes)
    folders = []
    for name, texts in (("long", LONG), ("short", SHORT)):
        path = tmp_path / f"{name}.tsv"
        path.write_text("".join(f"{pair['source']}\t{pair['target']}\n" for pair in lines("seq2seq", texts)))
        data = dataclasses.replace(
            cfg.data, train=path.name, validation=path.name, weights=(), stages=(), weight_by="examples"
        )
        prepare(dataclasses.replace(cfg, data=data), tmp_path, tmp_path / name)
        folders.append(str(tmp_path / name))
    data = dataclasses.replace(cfg.data, source="prepared", train=tuple(folders), validation=())
    stored = dataclasses.replace(cfg, data=data)
    arguments = (stored, load_corpus(stored, None), tokenizers)
    assert changes or share(drawn(arguments)["tokens"]) == pytest.approx(0.5, abs=0.03)
    assert_same(take(train_batches(*arguments), 20), take(train_batches(cfg, corpus, tokenizers), 20))
    assert_restored_exactly(arguments, batches=10, points=3)


def test_weights_are_those_of_examples_by_default():
    cfg, corpus, tokenizers = mixed("pairs in buckets", weight_by="examples")
    counts = drawn((cfg, corpus, tokenizers), 200)
    assert share(counts["examples"]) == pytest.approx(0.5, abs=0.03)
    assert share(counts["tokens"]) > 0.85
    assert example_weights(cfg, corpus, tokenizers) == (0.5, 0.5)
    assert DataConfig().weight_by == "examples"


@pytest.mark.parametrize("kind", ["pairs in buckets", "documents packed and split"])
def test_weighted_by_tokens_it_is_restored_exactly(kind):
    assert_restored_exactly(mixed(kind), batches=12, points=4)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["pairs in buckets", "documents packed and split"])
def test_weighted_by_tokens_processes_have_the_same_global_batches(kind):
    assert_shards_of(mixed(kind), take(train_batches(*mixed(kind)), 12))


def test_weights_and_shares_by_hand():
    """Pairs of 4 + 2 tokens and of 1 + 1, each side with an end: 8 and 4 tokens; an example in four is dropped."""
    cfg, _, tokenizers = mixed("pairs in buckets", weights=(1, 2), bucket_lengths=(8,))
    pairs = [{"source": "aaaa", "target": "aa"}] * 3 + [{"source": "a" * 8, "target": "a"}]
    corpus = Corpus(Joined([pairs, [{"source": "b", "target": "b"}] * 5]), [], [])
    assert example_weights(cfg, corpus, tokenizers) == (1 / (8 * 3 / 4), 2 / 4)
    examples, tokens, _ = shares(cfg, corpus, tokenizers)
    np.testing.assert_allclose(examples, np.array([1 / 6, 1 / 2]) / (1 / 6 + 1 / 2))
    np.testing.assert_allclose(tokens, [1 / 3, 2 / 3])
    by_examples = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, weight_by="examples"))
    examples, tokens, _ = shares(by_examples, corpus, tokenizers)
    np.testing.assert_allclose(examples, [1 / 3, 2 / 3])
    np.testing.assert_allclose(tokens, [6 / 14, 8 / 14])


def test_packed_pairs_fill_rows_by_the_side_that_fills_more():
    """Sources of 31 tokens and their end, two in a row of 64; regression test: by the window of targets, it was 1/2."""
    cfg, _, tokenizers = mixed("pairs packed", weight_by="examples", window=16, source_window=64)
    entries = [[{"source": letter * 31, "target": letter * 5}] * 40 for letter in "ab"]
    arguments = cfg, Corpus(Joined(entries), [], []), tokenizers
    assert drawn(arguments, 10)["examples"].sum() == 10 * 8 * 2
    assert shares(*arguments).epochs.sum() * 40 / cfg.train.steps == 8 * 2


SUMMARIES = {
    "documents, tokens": ("documents packed and split", "tokens"),
    "pairs, examples": ("pairs in buckets, many dropped", "examples"),
    "documents, examples": ("documents packed and split", "examples"),
    "pairs, tokens": ("pairs in buckets, many dropped", "tokens"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", rest_slow(SUMMARIES, 2))
def test_the_summary_has_the_shares_of_the_batches(case):
    kind, weight_by = case
    cfg, corpus, tokenizers = mixed(kind, weight_by=weight_by)
    held_out = corpus.train.parts[1][:20]
    corpus = dataclasses.replace(corpus, validation=held_out, test=held_out)
    parts = summarize(cfg, corpus, tokenizers)["train"].parts
    counts = drawn((cfg, corpus, tokenizers), 200)
    assert parts[0]["tokens"] == pytest.approx(share(counts["tokens"]), abs=0.03)
    assert sum(part["examples"] for part in parts) == pytest.approx(1)


def test_few_evenly_spread_examples_are_read(monkeypatch):
    monkeypatch.setattr(mixtures, "TOKENIZED", 3)
    cfg, *_ = mixed("labeled texts in buckets")
    texts = [{"text": "a" * (1 + number % 2), "label": "x"} for number in range(6)]
    special = BYTES.target.special.added_to_text
    assert mixtures.mean_sizes(cfg, Corpus(texts, [], [], ("x",)), BYTES).tokens == [1 + special]
    monkeypatch.setattr("tformer_jax.data.corpora.corpus.CHARACTERS", 1)
    assert mixtures.mean_sizes(cfg, Corpus(texts[1:], [], [], ("x",)), BYTES).tokens == [2 + special]


def test_an_entry_without_tokens_cannot_have_a_share():
    cfg, _, tokenizers = mixed("pairs in buckets")
    train = Joined([[{"source": "a" * 90, "target": "a"}], lines("seq2seq", SHORT)])
    with pytest.raises(DataError, match="all examples of long that were read are blank or too long for their row"):
        train_batches(cfg, Corpus(train, [], []), tokenizers)


def test_where_the_unit_does_not_matter():
    with pytest.raises(UserError, match="data.weight_by='tokens': is used only with data.weights; set them, or writ"):
        mixed("pairs in buckets", weights=())
    windows = {"batching": "windows", "window": 16, "weights": (1, 3)}
    by_tokens, by_examples = (
        mixed("documents packed and split", **windows, weight_by=unit) for unit in ("tokens", "examples")
    )
    assert by_tokens[0].data.without_effect() == ["data.weight_by='tokens' has no effect with data.batching='windows'"]
    assert_same(take(train_batches(*by_tokens), 10), take(train_batches(*by_examples), 10))
    tokens = np.concatenate([batch["tokens"].ravel() for batch in take(train_batches(*by_tokens), 100)])
    a, b = (BYTES.target.encode(letter)[0] for letter in "ab")
    ends = 1 / 4, 1 / 46  # about 3 letters and 45 between two ends
    expected = 0.25 * (1 - ends[1]) / (0.25 * (1 - ends[1]) + 0.75 * (1 - ends[0]))
    assert (tokens == a).sum() / ((tokens == a) | (tokens == b)).sum() == pytest.approx(expected, abs=0.03)


def first_epochs(seed: int, sources: int = 2, size: int = 50, epochs: int = 3) -> list[tuple[int, ...]]:
    """Returns the order of each source in its first epochs, as indices within the source."""
    blocks = order.index_blocks([size] * sources, (1.0,) * sources, seed, 1)
    places = [int(blocks[number][0]) for number in range(sources * size * epochs)]
    by_source = [[place % size for place in places if place // size == source] for source in range(sources)]
    return [tuple(order[size * epoch :][:size]) for order in by_source for epoch in range(epochs)]


def test_no_two_seeds_sources_or_epochs_share_an_order():
    orders = [order for seed in range(4) for order in first_epochs(seed)]
    assert len(orders) == 4 * 2 * 3
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len(set(orders)) == len(orders)


def test_a_mixture_has_its_shares():
    cfg, corpus, tokenizers = setup("a mixture")
    first_half = {word["source"] for word in corpus.train.parts[0]}
    seen = [
        tokenizers.source.decode(row)
        for batch in take(train_batches(cfg, corpus, tokenizers), 150)
        for row in batch["source"]
    ]
    assert sum(word in first_half for word in seen) / len(seen) == pytest.approx(0.75, abs=0.02)
