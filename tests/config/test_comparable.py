"""Which configs have metrics that can be compared."""

from typing import Any

import pytest

from tformer_jax.config import Config, comparable, flat

PAIRS = {"data": {"source": "tsv", "train": ("a.tsv",), "validation": ("v.tsv",)}}
LM = {
    "model": {"family": "decoder_lm"},
    "data": {"source": "text", "train": ("a.txt",), "validation": ("v.txt",), "batching": "windows"},
}
MASKED = {
    "model": {"family": "masked_lm"},
    "data": {"source": "text", "train": ("a.txt",), "batching": "windows", "objective": "masked_tokens"},
}
CLASSIFIER = {"model": {"family": "classifier"}, "data": {"source": "tsv", "train": ("a.tsv",)}}


def settings(base: dict[str, dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """Returns the settings of a config; `data__window=3` changes `data.window`."""
    values = {name: dict(section) for name, section in base.items()}
    for name, value in changes.items():
        *sections, last = name.split("__")
        inner = values
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
    return flat(Config.from_dict(values))


@pytest.mark.parametrize(
    ("base", "changes", "name"),
    [
        (PAIRS, {"train__metric": "bleu"}, "train.metric"),
        (PAIRS, {"data__validation": ("w.tsv",)}, "data.validation"),
        (PAIRS, {"data__test": ("t.tsv",)}, "data.test"),
        (CLASSIFIER, {"data__train": ("b.tsv",)}, "data.train"),
        (CLASSIFIER, {"data__validation_fraction": 0.2}, "data.validation_fraction"),
        (CLASSIFIER, {"eval__examples": 50}, "eval.examples"),
        (PAIRS, {"data__tokenizer": "bytes"}, "the kind of the target tokenizer"),
        (PAIRS, {"model__max_length": 1024}, "model.max_length"),
        (LM, {"data__batching": "packed"}, "data.batching"),
        (LM, {"model__prefix_lm": True}, "model.prefix_lm"),
        (MASKED, {"data__noise__density": 0.3}, "data.noise.density"),
        (MASKED, {"data__noise__whole_words": True}, "data.noise.whole_words"),
        (MASKED, {"data__window": 128}, "data.window"),
    ],
)
def test_what_changes_the_examples_or_the_labels_is_named(base, changes, name):
    for pair in ((settings(base), settings(base, **changes)), (settings(base, **changes), settings(base))):
        assert comparable.difference(*pair).partition(" differs")[0] == name


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        (PAIRS, {"data__bucket_lengths": (8, 64)}),
        (PAIRS, {"data__batching": "packed", "data__window": 64}),
        (PAIRS, {"model__dropout": 0.2, "train__label_smoothing": 0.2}),
        (LM, {"data__window": 128}),
        (CLASSIFIER, {"data__tokenizer": "bytes"}),
        (CLASSIFIER, {"data__bucket_lengths": (16, 32)}),
        (PAIRS, {"data__target_tokenizer": "bpe"}),
        (PAIRS, {"eval__bleu_tokenize": "char"}),
    ],
)
def test_what_does_not_is_compared(base, changes):
    assert comparable.difference(settings(base), settings(base, **changes)) is None


def test_other_tokens_have_the_same_bleu():
    bleu = {**PAIRS, "train": {"metric": "bleu"}}
    assert comparable.difference(settings(bleu), settings(bleu, data__tokenizer="bytes")) is None
    assert "data.target_language" in comparable.difference(settings(bleu), settings(bleu, data__target_language="fr"))


def test_other_references_have_another_bleu():
    bleu = {**PAIRS, "train": {"metric": "bleu"}, "eval": {"references": "normalized"}}
    bleu["data"] = {**PAIRS["data"], "normalize": ("nfkc",)}
    for changes in ({"data__normalize": ("nfkc", "lowercase")}, {"eval__bleu_tokenize": "char"}):
        assert "compares with" in comparable.difference(settings(bleu), settings(bleu, **changes))


def test_the_names_are_those_of_settings():
    """The functions read settings by name, which a renamed setting would break."""
    known = flat(Config())
    for group in (comparable.METRIC, comparable.CORPUS, comparable.HELD_OUT):
        assert {*group} <= known.keys()
