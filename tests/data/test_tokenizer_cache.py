"""Trained tokenizers come from the cache for equal examples and settings, and for no others."""

import dataclasses

import pytest

from tformer_jax.base.user_cache import VARIABLE
from tformer_jax.config import DataConfig, kinds
from tformer_jax.data.corpora import corpus
from tformer_jax.data.corpora.corpus import Joined, Part, origin_of
from tformer_jax.data.tokenizers import training
from tformer_jax.data.tokenizers.training import train_tokenizers

PAIRS = [{"source": f"the cat {n} sat", "target": f"die Katze {n} sa\u00df"} for n in range(30)]
TEXTS = [{"text": pair["source"]} for pair in PAIRS]
CFG = DataConfig(source="python", tokenizer="bpe", vocab_size=300)
OTHERS = {
    "vocab_size": {"vocab_size": 290},
    "vocabularies": {"shared_vocab": False},
    "symbols": {"symbols": ("<x>",)},
    "normalize": {"normalize": ("lowercase",)},
    "examples": {"tokenizer_examples": 7},
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))


@pytest.fixture
def trained(monkeypatch):
    """A list with an entry for each training, which goes on as without a cache."""
    calls, train_sides = [], training._train_sides

    def count(cfg, *arguments):
        calls.append(cfg)
        return train_sides(cfg, *arguments)

    monkeypatch.setattr(training, "_train_sides", count)
    return calls


def uncached(cfg, examples, monkeypatch):
    with monkeypatch.context() as without:
        without.delenv(VARIABLE)
        return train_tokenizers(cfg, examples).to_json()


@pytest.mark.parametrize(
    "examples", [PAIRS, Joined([PAIRS[:9], PAIRS[9:]]), Part(PAIRS, range(3, 20)), Part(PAIRS, [4, 2, 2])]
)
def test_equal_examples_are_trained_on_once(examples, trained, monkeypatch):
    first, again = (train_tokenizers(CFG, examples) for _ in range(2))
    assert len(trained) == 1
    assert first.to_json() == again.to_json() == uncached(CFG, examples, monkeypatch)
    assert again.source is again.target
    train_tokenizers(CFG, [dict(example) for example in examples])
    train_tokenizers(CFG, [*examples, {"source": "a", "target": "b"}])
    assert len(trained) == (3 if examples is PAIRS else 4)  # and once without a cache


@pytest.mark.parametrize("name", OTHERS)
def test_other_settings_train_again(name, trained, monkeypatch):
    train_tokenizers(CFG, PAIRS)
    cfg = dataclasses.replace(CFG, **OTHERS[name])
    actual = train_tokenizers(cfg, PAIRS).to_json()
    assert len(trained) == 2
    assert actual == uncached(cfg, PAIRS, monkeypatch)


@pytest.mark.parametrize("objective", [None, "span_corruption", "masked_tokens"])
def test_the_tokens_of_an_objective_are_added_to_a_cached_tokenizer(objective, trained, monkeypatch):
    train_tokenizers(CFG, TEXTS)
    cfg = dataclasses.replace(CFG, objective=objective)
    actual = train_tokenizers(cfg, TEXTS)
    assert actual.to_json() == uncached(cfg, TEXTS, monkeypatch)
    assert len(trained) == 2
    added = kinds.load(kinds.OBJECTIVES, objective).added if objective else ()
    size = actual.target.vocab_size
    assert [actual.target.special.name(i) for i in range(size - len(added), size)] == [*added]


def test_order_and_parts_of_examples_count():
    origins = [
        origin_of(examples)
        for examples in (
            PAIRS,
            PAIRS[::-1],
            Joined([PAIRS[:4], PAIRS[4:]]),
            Joined([PAIRS[:5], PAIRS[5:]]),
            Joined([PAIRS[:5], PAIRS[6:]]),
            *(Part(PAIRS, indices) for indices in (range(4), range(5), [0, 1], [1, 0])),
        )
    ]
    assert len({str(origin) for origin in origins}) == len(origins)


def test_examples_that_are_slow_to_read_are_not_cached(trained, monkeypatch):
    monkeypatch.setattr(corpus, "DIGESTED", 29)
    for examples in (PAIRS, Joined([PAIRS[:2], PAIRS]), Part(PAIRS, range(2)), tuple(PAIRS)):
        assert origin_of(examples) is None
    for _ in range(2):
        train_tokenizers(CFG, PAIRS)
    assert len(trained) == 2
