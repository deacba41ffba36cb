"""Texts are split into sentences and joined without a change of what stands between them."""

import dataclasses
import random

import pytest

from tests.helpers import build, tiny
from tests.inference.test_text import TOKENIZERS, setup
from tformer_jax.base import checks
from tformer_jax.base.errors import UserError
from tformer_jax.config import DecodeConfig
from tformer_jax.inference.encoding import TextError
from tformer_jax.inference.outputs import Output, Parts, join_texts
from tformer_jax.inference.requests import EncodedRequest, Request
from tformer_jax.inference.sentences import split_sentences
from tformer_jax.inference.text import Translator


def test_sentences_and_what_is_between_them_are_the_text():
    draw = random.Random(0)
    parts = [
        "Dr. Smith came.",
        "Why?",
        "It is 3.5 p. m.",
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        "我爱你。",
        "Ü",
        ".",
        "",
        "\u3000",
        "no end",
    ]
    for language in ("en", "de", "zh", "xx"):
        for _ in range(100):
            text = "".join(draw.choices(parts, k=draw.randint(0, 9)))
            sentences, gaps = split_sentences(text, language)
            assert len(gaps) == len(sentences) + 1
            rejoined = "".join(gap + sentence for gap, sentence in zip(gaps, (*sentences, ""), strict=True))
            assert rejoined == text
            if len(sentences) > 1:
                assert all(sentence == sentence.strip() != "" for sentence in sentences)
                assert not "".join(gaps).strip()


@pytest.mark.parametrize(
    ("language", "text", "sentences", "gaps"),
    [
        ("en", " Dr. Smith came. Why?\n\n Yes. ", ("Dr. Smith came.", "Why?", "Yes."), (" ", " ", "\n\n ", " ")),
        ("zh", "我爱你。你呢？", ("我爱你。", "你呢？"), ("", "", "")),
        ("de", " Am 3. Mai. ", (" Am 3. Mai. ",), ("", "")),
        ("en", "", ("",), ("", "")),
    ],
)
def test_sentences_by_hand(language, text, sentences, gaps):
    assert split_sentences(text, language) == (sentences, gaps)


def test_outputs_are_joined_by_the_gaps_of_the_source():
    """A gap that the source does not write becomes a space, except after scripts without spaces."""
    assert join_texts(["A.", "B.", "C."], ["  ", " ", "\n\n", "\n"]) == "  A. B.\n\nC.\n"
    assert join_texts(["I do.", "Who?"], ["", "", ""]) == "I do. Who?"
    assert join_texts(["我。", "谁？"], ["", "", ""]) == "我。谁？"
    assert join_texts(["", "Who?"], ["", "", ""]) == "Who?"


def test_the_output_of_a_text_counts_its_sentences():
    parts = Parts((EncodedRequest((4,)), EncodedRequest((5,))), ("", "\n", ""))
    given = [
        [Output("a", -1.0), Output("b", None, None, 1, True, constraints_met=False)],
        [Output("c", -2.0, "model.max_length", 2), Output("d", -2.0, None, 0, True, constraints_met=True)],
    ]
    expected = [
        Output("a\nc", -3.0, "model.max_length", 2, sentences=2),
        Output("b\nd", None, None, 1, True, constraints_met=False, sentences=2),
    ]
    assert parts.join(given) == expected
    pieces = [*parts.pieces(lambda row: iter([Output("x", None), Output("y", None)]))]
    assert "".join(piece.text for piece in pieces) == "xy\nxy"
    assert pieces[-1].sentences == 2


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["greedy", "sample"])
def test_texts_of_one_sentence_have_the_outputs_of_today(strategy, caplog):
    """The sentences of others have the outputs that they have alone, samples apart."""
    model, params = build(tiny("seq2seq"), seed=1)
    cfg = setup("seq2seq")
    plain = DecodeConfig(max_new_tokens=5, strategy=strategy, temperature=2.0 if strategy == "sample" else 1.0)
    texts = ["abc", "abc. Cde? Efg", "g", " ", "fed\n\ncba", "abc"]
    translate = Translator(dataclasses.replace(cfg, decode=plain), model, TOKENIZERS)
    split = Translator(
        dataclasses.replace(cfg, decode=dataclasses.replace(plain, split_sentences=True)), model, TOKENIZERS
    )
    before, actual = translate.outputs(params, texts), split.outputs(params, texts)
    assert [actual[n] for n in (0, 2, 3, 5)] == [before[n] for n in (0, 2, 3, 5)]
    assert [output.sentences for output in actual] == [1, 3, 1, 1, 2, 1]
    assert list(split.stream(params, texts)) == [[output] for output in actual]
    if strategy == "greedy":
        a, b, c, d, e = translate(params, ["abc.", "Cde?", "Efg", "fed", "cba"])
        assert (actual[1].text, actual[4].text) == (join_texts([a, b, c], ["", " ", " ", ""]), f"{d}\n\n{e}")
    (alone,) = split.outputs(params, ["abc. abc. abc"])
    assert "".join(piece.text for piece in split.stream_pieces(params, "abc. abc. abc")) == alone.text
    assert strategy == "greedy" or len({*alone.text.split()}) == 3  # other samples of equal sentences
    caplog.clear()
    split(params, texts)
    assert "6 texts were translated as 9 sentences (decode.split_sentences)" in caplog.text
    with pytest.raises(TextError, match="has constraints, and 2 sentences: use a glossary"):
        split(params, [Request("Abc. Bcd.", constraints=["a"])])


def test_a_language_model_has_no_sentences():
    with pytest.raises(UserError, match="decode.split_sentences=True: must be False for model.family='decoder_lm'"):
        dataclasses.replace(setup("decoder_lm"), decode=DecodeConfig(split_sentences=True))


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setattr(checks, "not_installed", list)
    with pytest.raises(UserError, match=r'decode.split_sentences needs sentencex: pip install -e ".\[sentences\]"'):
        split_sentences("a", "en")
