"""Strings in, strings out: in order, whatever the batches, and clear about what does not fit."""

import dataclasses

import numpy as np
import pytest

from tests.helpers import build, tiny
from tformer_jax.config import Config, ConfigError, DataConfig, DecodeConfig, EvalConfig
from tformer_jax.data.tokenizers import CharacterTokenizer, Tokenizers
from tformer_jax.inference.text import LabelClassifier, TextGenerator, Translator, in_batches

LETTERS = CharacterTokenizer("abcdefg")  # eleven tokens with the special ones
TOKENIZERS = Tokenizers(LETTERS, LETTERS)
TEXTS = ["abc", "g", "fedcba", "", "aa", "abcdefgabc"]


def setup(family: str, batch_size: int = 2) -> Config:
    source, batching = {
        "seq2seq": ("cldr_translation", "buckets"),
        "decoder_lm": ("stdlib_text", "windows"),
        "classifier": ("cldr_language", "buckets"),
    }[family]
    return Config(
        model=tiny(family),
        data=DataConfig(source=source, batching=batching, window=8, bucket_lengths=(8, 16)),
        decode=DecodeConfig(max_new_tokens=5),
        eval=EvalConfig(batch_size=batch_size),
    )


@pytest.fixture(scope="module")
def translations():
    """The outputs for TEXTS one by one."""
    cfg = setup("seq2seq", batch_size=1)
    model, params = build(cfg.model, seed=1)
    translate = Translator(cfg, model, TOKENIZERS)
    return model, params, [translate(params, [text])[0] for text in TEXTS]


@pytest.mark.parametrize("batch_size", [2, 8])
def test_translations_come_in_order_whatever_the_batch(translations, batch_size):
    model, params, expected = translations
    assert len(set(expected)) > 1
    translate = Translator(setup("seq2seq", batch_size), model, TOKENIZERS)
    assert translate(params, TEXTS) == expected
    assert translate(params, TEXTS[::-1]) == expected[::-1]
    assert translate(params, []) == []


def test_classes_come_with_their_probability():
    cfg = setup("classifier")
    model, params = build(cfg.model)
    found = LabelClassifier(cfg, model, TOKENIZERS, ["x", "y", "z"])(params, TEXTS)
    for text, (label, probability) in zip(TEXTS, found, strict=True):
        tokens = np.array([LETTERS.encode(text) or [0]], np.int32)
        logits = np.float64(model.apply({"params": params}, tokens, mask=tokens != 0))[0]
        expected = np.exp(logits) / np.exp(logits).sum()
        assert label == "xyz"[expected.argmax()]
        assert probability == pytest.approx(expected.max(), rel=1e-4)


def test_generation_leaves_out_the_prompt_and_respects_the_maximum():
    cfg = setup("decoder_lm")
    model, params = build(cfg.model)
    generate = TextGenerator(cfg, model, TOKENIZERS)
    (alone,) = generate(params, ["abc"])
    assert len(alone) <= 5
    assert generate(params, ["abcdefgabc", "abc"])[1] == alone
    long = dataclasses.replace(cfg, decode=DecodeConfig(max_new_tokens=100))
    (rest,) = TextGenerator(long, model, TOKENIZERS)(params, ["a" * 13])
    assert len(rest) <= 16 - 13


@pytest.mark.parametrize(
    ("family", "kind", "text", "sentence"),
    [
        ("seq2seq", Translator, "a" * 16, "the source has 16 tokens, but the model takes at most 15: shorten it"),
        ("decoder_lm", TextGenerator, "a" * 16, "the prompt has 16 tokens, but the model takes at most 15: shorten it"),
        ("decoder_lm", TextGenerator, "", "the prompt is empty: write at least one character"),
    ],
)
def test_what_does_not_fit(family, kind, text, sentence):
    cfg = setup(family)
    model, params = build(cfg.model)
    with pytest.raises(ConfigError, match=sentence):
        kind(cfg, model, TOKENIZERS)(params, ["a", text])


def test_evaluation_cuts_what_does_not_fit():
    cfg = setup("classifier")
    model, params = build(cfg.model)
    classify = LabelClassifier(cfg, model, TOKENIZERS, ["x", "y", "z"], cut=True)
    assert classify(params, ["ab" * 20]) == classify(params, ["ab" * 8])


def test_batches_have_few_lengths_and_similar_rows():
    seen = []

    def run(rows, length):
        seen.append((length, [len(row) for row in rows]))
        return [sum(row) for row in rows]

    rows = [[1] * n for n in (9, 1, 12, 3, 20, 2)]
    assert in_batches(rows, 2, 16 + 4, run) == [9, 1, 12, 3, 20, 2]
    assert seen == [(2, [1, 2]), (16, [3, 9]), (20, [12, 20])]
