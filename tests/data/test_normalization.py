"""Normalization of texts before tokenization, and tokenizers of different kinds for source and target."""

import dataclasses
import json
import pickle
import random
import sys

import pytest

from tests.helpers import build, score_texts, tiny
from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, DataConfig, EvalConfig
from tformer_jax.data.tokenizers import Tokenizers, normalizer
from tformer_jax.data.tokenizers.simple import CharacterTokenizer
from tformer_jax.data.tokenizers.training import train_tokenizers
from tformer_jax.data.transforms.bpe_dropout import RandomMerges
from tformer_jax.inference.outputs import Output
from tformer_jax.tasks.evaluators.evaluation import Segment
from tformer_jax.tasks.evaluators.translation import TranslationEvaluator

STEPS = ("nfkc", "lowercase", "punctuation", "moses", "simplified")
PAIRS = [{"source": "The MAN's hat, „old“.", "target": "漢字: Ein Mann"}] * 3


@pytest.mark.parametrize(
    ("step", "text", "normalized"),
    [
        ("nfkc", "ﬁne ２", "fine 2"),
        ("lowercase", "ÄPFEL", "äpfel"),
        ("punctuation", "„Ja“ – nein…", '"Ja" - nein...'),
        ("moses", "The man's hat, red.", "The man &apos;s hat , red ."),
        ("moses", "fish &amp; chips", "fish &amp; chips"),
        ("moses", "R&D at AT&T &copy &amp;copy;", "R &amp; D at AT &amp; T &amp; copy &amp; copy ;"),
        ("simplified", "漢字 Ein", "汉字 Ein"),
    ],
)
def test_one_step(step, text, normalized):
    assert normalizer((step,), "en")(text) == normalized


def test_a_region_has_the_rules_of_its_language():
    """In German, a number with a period is an ordinal, which is one token."""
    text = "bzw. der 3. März"
    assert normalizer(("moses",), "de_CH")(text) == normalizer(("moses",), "de")(text) == text
    assert normalizer(("moses",), "en")(text) != text


def trained(**changes) -> Tokenizers:
    return train_tokenizers(DataConfig(vocab_size=300, **changes), PAIRS)


def test_texts_are_normalized_in_training_and_encoding_and_after_a_round_trip():
    tokenizers = trained(normalize=STEPS, tokenizer="characters", shared_vocab=False)
    restored = Tokenizers.from_json(json.loads(json.dumps(tokenizers.to_json())))
    for actual in (tokenizers, restored, pickle.loads(pickle.dumps(tokenizers))):
        assert actual.source.decode(actual.source.encode("The MAN's hat.")) == "the man &apos;s hat ."
        assert actual.target.decode(actual.target.encode_batch(["漢字"])[0]) == "汉 字"  # Moses separates them
    assert not {"T", "„", "漢"} & {*tokenizers.source.pieces, *tokenizers.target.pieces}


def test_source_and_target_have_tokenizers_of_their_own_kinds():
    tokenizers = trained(source_tokenizer="bpe", target_tokenizer="characters", shared_vocab=False)
    assert tokenizers.source.kind == "bpe"
    assert isinstance(tokenizers.target, CharacterTokenizer)
    assert tokenizers.target.pieces == sorted(set(PAIRS[0]["target"]))


@pytest.mark.parametrize(("p", "pieces"), [(0.0, "encoded"), (1.0, "letters")])
def test_bpe_dropout_reads_normalized_text(p, pieces):
    tokenizer = trained(normalize=("lowercase",)).source
    text = "The MAN"
    expected = tokenizer.encode(text)
    if pieces == "letters":
        vocabulary = tokenizer.backend_tokenizer.get_vocab()
        expected = [vocabulary[letter] for letter in "theĠman"]
    for each in (tokenizer, tokenizer.extended(("<mask>",))):
        assert each.is_bpe
        assert RandomMerges(each, p).encode(text, random.Random(0)) == expected


@pytest.mark.parametrize(("references", "matches"), [("raw", 0.0), ("normalized", 100.0)])
def test_references_are_compared_as_the_setting_says(references, matches):
    tokenizers = trained(normalize=("lowercase",), tokenizer="characters")
    model, params = build(tiny("seq2seq", vocab_size=tokenizers.target.vocab_size))
    cfg = Config(
        model=model.cfg,
        data=DataConfig(normalize=("lowercase",), bucket_lengths=(16,)),
        eval=EvalConfig(references=references),
    )
    evaluate = TranslationEvaluator(cfg, model, tokenizers, [Segment("A", ("B C",))])
    evaluate._translate.outputs = lambda params, sources, **_: [Output("b c", 0.0)]
    actual = evaluate(params)
    assert actual.metrics["exact_match"] == matches
    assert actual.signatures["references"] == ("whitespace|lowercase" if references == "normalized" else "raw")


def test_refused_settings():
    with pytest.raises(UserError, match="shared_vocab=True: must be False for tokenizers of different kinds"):
        DataConfig(target_tokenizer="characters")
    with pytest.raises(UserError, match="bpe_dropout: needs a BPE tokenizer, not data.tokenizer='words'"):
        DataConfig(source_tokenizer="words", target_tokenizer="words", transforms=("bpe_dropout",))
    with pytest.raises(UserError, match="normalize.*lowercase"):
        DataConfig(normalize=("lowercaes",))
    with pytest.raises(UserError, match="must be 'raw' without data.normalize"):
        Config(eval=EvalConfig(references="normalized"))


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    with pytest.raises(UserError, match=r'needs sacremoses: pip install -e "\.\[tokenizers\]"'):
        normalizer(("moses",), "en")


def test_white_space_is_cleaned_by_default_except_for_documents_and_tokenizers_of_runs(tmp_path):
    pair = trained()
    assert pair.source is pair.target
    assert pair.source.encode(" The\u3000MAN's\r\n") == pair.source.encode("The MAN's")
    assert Tokenizers.from_json(pair.to_json()).source.encode(" The  MAN") == pair.source.encode("The MAN")
    labeled = train_tokenizers(DataConfig(tokenizer="bytes"), [{"text": "a", "label": "b"}])
    assert labeled.target.steps == ("whitespace",)
    documents = train_tokenizers(DataConfig(tokenizer="bytes"), [{"text": "def f():\n    pass"}])
    assert documents.target.decode(documents.target.encode("a\n  b ")) == "a\n  b "
    documents.save(tmp_path)
    of_run = DataConfig(tokenizer="file", tokenizer_file=str(tmp_path / "target.json"))
    assert train_tokenizers(of_run, PAIRS).source.steps == ()
    cleaned = dataclasses.replace(of_run, clean_whitespace=True)
    assert train_tokenizers(cleaned, PAIRS).source.steps == ("whitespace",)


def test_a_run_that_cleans_white_space_is_not_continued_without(tmp_path):
    (tmp_path / "tokenizers").mkdir()
    trained().save(tmp_path / "tokenizers")
    cfg = DataConfig(tokenizer="file", tokenizer_file=str(tmp_path), clean_whitespace=False)
    with pytest.raises(UserError, match="clean_whitespace=False: must be None or True for data.tokenizer_file="):
        train_tokenizers(cfg, PAIRS)


def test_white_space_does_not_decide_whether_texts_match():
    scores = score_texts(["3:33 PM", "a b"], [("3:33\u202fPM ",), ("a c",)], Config(), "en")
    assert scores.metrics["exact_match"] == 50
