"""What evaluations say about their outputs and their split."""

import dataclasses

import pytest

from tests.helpers import build, tiny
from tformer_jax.config import Config, DataConfig, DecodeConfig, EvalConfig
from tformer_jax.data.corpora import Corpus, load_corpus
from tformer_jax.data.corpora.prepared import _has_test
from tformer_jax.data.prepare import prepare
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.simple import CharacterTokenizer
from tformer_jax.inference.outputs import Output
from tformer_jax.tasks.evaluators import continuations as samples
from tformer_jax.tasks.evaluators.evaluation import merged
from tformer_jax.tasks.evaluators.split import evaluators_for

LETTERS = CharacterTokenizer("abcdefg")  # eleven tokens with the special ones
TOKENIZERS = Tokenizers(LETTERS, LETTERS)
PAIRS = [{"source": "abc", "target": "cab"}, {"source": "g", "target": "fedcba"}]
IS_VALIDATION = "the test split is the validation split"


def translation(test: list, split: str, decode: DecodeConfig):
    model, params = build(tiny("seq2seq"))
    cfg = Config(model=model.cfg, data=DataConfig(bucket_lengths=(8, 16)), decode=decode)
    corpus = Corpus([], PAIRS, test)
    return merged(evaluator(params) for evaluator in evaluators_for(cfg, model, corpus, TOKENIZERS, split, 0))


@pytest.mark.long
def test_outputs_of_an_evaluation_say_how_they_ended():
    decode = DecodeConfig(max_new_tokens=3, min_new_tokens=3)
    actual = translation(list(PAIRS), "validation", decode)
    assert [sample.finish_reason for sample in actual.outputs] == ["length", "length"]
    assert actual.remarks == ("2 of 2 outputs end at decode.max_new_tokens=3 and may be incomplete",)
    actual = translation(list(PAIRS), "validation", dataclasses.replace(decode, stop=tuple("abcdefg")))
    assert [sample.finish_reason for sample in actual.outputs] == ["stop", "stop"]


@pytest.mark.long
@pytest.mark.parametrize(("split", "test", "said"), [("test", PAIRS, True), ("test", [*PAIRS], False)])
def test_a_test_split_that_is_the_validation_split_is_remarked_on(split, test, said):
    remarks = translation(test, split, DecodeConfig()).remarks
    assert any(IS_VALIDATION in remark for remark in remarks) == said


def test_a_validation_split_is_what_it_says():
    assert not any(IS_VALIDATION in remark for remark in translation(PAIRS, "validation", DecodeConfig()).remarks)


@pytest.mark.parametrize("test", [(), ("b.txt",)])
def test_prepared_data_without_test_data_have_no_test_split_either(test, tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"line {number}\n" for number in range(40)))
    (tmp_path / "b.txt").write_text("another line\n")
    model = tiny("decoder_lm")
    options = {"tokenizer": "characters", "batching": "windows", "window": 8}
    cfg = Config(model=model, data=DataConfig(source="lines", train=("a.txt",), test=test, **options))
    prepare(cfg, tmp_path, tmp_path / "folder")
    again = Config(model=model, data=DataConfig(source="prepared", train=("folder",), **options))
    for corpus in (load_corpus(cfg, tmp_path), load_corpus(again, tmp_path)):
        assert (corpus.test is corpus.validation) == (not test)


def test_generated_corpora_have_a_test_split_without_naming_it():
    assert _has_test({"data": {"source": "stdlib_text", "test": []}})
    assert not _has_test({"data": {"source": "tfds", "train": ["train"], "test": []}})


@pytest.mark.parametrize(
    ("decode", "tokens"),
    [({}, 128), ({"max_new_tokens": 500}, 500), ({"min_new_tokens": 200}, 200), ({"prefix": "ab" * 75}, 151)],
)
def test_samples_of_a_language_model_are_short_unless_a_setting_says_more(decode, tokens, monkeypatch):
    """Models read up to 131,072 tokens; the samples of each evaluation are only printed."""
    asked = []

    class Decoder:
        def __init__(self, cfg, *_):
            asked.append(cfg.decode.max_new_tokens)

        def __call__(self, rows):
            return [[Output("", None, "decode.max_new_tokens")] for _ in rows]

    monkeypatch.setattr(samples, "RowDecoder", Decoder)
    cfg = Config(
        model=tiny("decoder_lm", max_length=131_072),
        data=DataConfig(source="stdlib_text", batching="windows", window=8),
        decode=DecodeConfig(**decode),
        eval=EvalConfig(samples=1),
    )
    actual = samples.ContinuationEvaluator(cfg, None, TOKENIZERS, [{"text": "abc" * 100}])(None)
    assert (asked, [sample.finish_reason for sample in actual.outputs]) == ([tokens], ["length"])
