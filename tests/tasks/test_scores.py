"""Scores against several references, compared with the sacrebleu command."""

import json
import subprocess
import sys

import pytest
import sacrebleu

from tests.helpers import score_texts
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, ConfigError, DataConfig, EvalConfig, ModelConfig
from tformer_jax.tasks.evaluators.scores import text_metrics

OUTPUTS = ["the cat sat on a mat", "two dogs run on the beach", "he reads"]
REFERENCES = [
    ("the cat sat on the mat", "a cat was sitting on the mat"),
    ("two dogs are running on the beach", "two dogs run along the beach"),
    ("He reads a book.", "he reads"),
]


def config(**settings) -> Config:
    return Config(data=DataConfig(target_language="en"), eval=EvalConfig(**settings))


def score(outputs, references, **settings):
    return score_texts(outputs, references, config(**settings), "en")


def test_several_references_equal_the_sacrebleu_command(tmp_path):
    for name, lines in (("out", OUTPUTS), *(zip(("a", "b"), zip(*REFERENCES, strict=True), strict=True))):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    actual = score(OUTPUTS, REFERENCES, metrics=("chrf++", "ter"))
    flags = "-m sacrebleu a b -i out --format json -w 12"
    lines = subprocess.check_output([sys.executable, *f"{flags} -m bleu chrf ter".split()], cwd=tmp_path)
    expected = {entry["name"].lower(): entry for entry in json.loads(lines)}
    plus = json.loads(
        subprocess.check_output([sys.executable, *f"{flags} -m chrf --chrf-word-order 2".split()], cwd=tmp_path)
    )
    for name, entry in (
        ("bleu", expected["bleu"]),
        ("chrf", expected["chrf2"]),
        ("ter", expected["ter"]),
        ("chrf++", plus),
    ):
        assert actual.metrics[name] == pytest.approx(entry["score"], abs=1e-11)
        assert set(entry["signature"].split("|")) == set(actual.signatures[name].split("|"))
    assert actual.metrics["exact_match"] == pytest.approx(100 / 3)


def test_numbers_of_references_may_differ_between_texts():
    references = [REFERENCES[0], REFERENCES[1][:1], REFERENCES[2]]
    sets = [[each[0] for each in references], ["a cat was sitting on the mat", None, "he reads"]]
    actual = score(OUTPUTS, references)
    assert actual.metrics["bleu"] == sacrebleu.BLEU().corpus_score(OUTPUTS, sets).score
    assert actual.metrics["chrf"] == sacrebleu.CHRF().corpus_score(OUTPUTS, sets).score
    assert actual.signatures["chrf"].startswith("nrefs:var|")


def test_spbleu_is_bleu_of_the_pieces_of_the_given_model(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    texts = [text for each in REFERENCES for text in each] * 20
    (tmp_path / "texts").write_text("\n".join(texts))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "texts"), model_prefix=str(tmp_path / "m"), vocab_size=30, minloglevel=2
    )
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    split = [[" ".join(model.encode_as_pieces(text)) for text in column] for column in zip(*REFERENCES, strict=True)]
    pieces = [" ".join(model.encode_as_pieces(text)) for text in OUTPUTS]
    actual = score(OUTPUTS, REFERENCES, metrics=("spbleu",), spbleu_model=str(tmp_path / "m.model"))
    assert actual.metrics["spbleu"] == sacrebleu.BLEU(tokenize="none", force=True).corpus_score(pieces, split).score
    assert actual.metrics["spbleu"] != actual.metrics["bleu"]
    assert "|tok:spm-" in actual.signatures["spbleu"]
    with pytest.raises(
        UserError, match=r"eval.spbleu_model='.*missing': is not a SentencePiece model that can be read"
    ):
        text_metrics(config(metrics=("spbleu",), spbleu_model=str(tmp_path / "missing")), "en")


def test_scores_of_each_sentence():
    metrics = text_metrics(config(metrics=("ter", "chrf++")), "en")
    actual = {name: metric.score_texts(["", "", ""], OUTPUTS, REFERENCES) for name, metric in metrics.items()}
    assert actual == {
        "bleu": [sacrebleu.sentence_bleu(*pair).score for pair in zip(OUTPUTS, REFERENCES, strict=True)],
        "chrf": [sacrebleu.sentence_chrf(*pair).score for pair in zip(OUTPUTS, REFERENCES, strict=True)],
        "chrf++": [
            sacrebleu.sentence_chrf(*pair, word_order=2).score for pair in zip(OUTPUTS, REFERENCES, strict=True)
        ],
        "ter": [sacrebleu.sentence_ter(*pair).score for pair in zip(OUTPUTS, REFERENCES, strict=True)],
        "exact_match": [0, 0, 100],
    }


def test_settings_of_metrics_that_contradict_others():
    with pytest.raises(ConfigError, match="spbleu_model=None: must name the file of a SentencePiece model"):
        EvalConfig(metrics=("spbleu",))
    with pytest.raises(ConfigError, match=r"eval.metrics=\('ter',\): must be \(\) for model.family='decoder_lm'"):
        data = DataConfig(source="stdlib_text", batching="windows")
        Config(model=ModelConfig(family="decoder_lm"), data=data, eval=EvalConfig(metrics=("ter",)))
