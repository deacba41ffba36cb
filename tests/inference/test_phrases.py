"""Phrases that outputs must contain: how they are given, where they occur, and their tokens."""

import dataclasses

import numpy as np
import pytest

from tformer_jax.base.errors import UserError
from tformer_jax.config import DataConfig, DecodeConfig
from tformer_jax.data.placeholders import mask
from tformer_jax.data.tokenizers import Placeholders
from tformer_jax.data.tokenizers.simple import CharacterTokenizer, WordTokenizer
from tformer_jax.data.tokenizers.training import train_tokenizers
from tformer_jax.inference.phrases import (
    FORMAT,
    are_met,
    constraints_of,
    encode_constraints,
    glossary_constraints,
    read_constraints,
    word_edges,
)

BEAM = DecodeConfig(strategy="beam")
LETTERS = CharacterTokenizer("abcdeé 中国。-\U000f0000")


def encode(*phrases: str, decode=BEAM, limit: int = 99, **options):
    return encode_constraints(decode, LETTERS, read_constraints(list(phrases)), limit, **options)


def test_constraints_are_lists_of_texts_or_of_alternatives():
    assert read_constraints("a") == (("a",),)
    assert read_constraints(["a", [" b", "c d"]]) == (("a",), ("b", "c d"))
    assert read_constraints(()) == ()
    for wrong in (1, {"a": 1}, [[]], [""], [["a", " "]], [1], [["a", None]], None):
        with pytest.raises(UserError, match=FORMAT):
            read_constraints(wrong)


@pytest.mark.parametrize(
    ("phrase", "text", "met"),
    [
        ("Haus", "Das Haus.", True),
        ("Haus", "Die Haustür", False),
        ("Haus", "Reihenhaus und Haus", True),
        ("us", "Haus", False),
        (".5", "1.5", True),
        ("C++", "C++11", True),
        ("a b", "aa b a b", True),
        ("中国", "我爱中国人", True),
        ("서울", "서울에서", True),
        ("किताब", "यह किताब है", True),
        ("मत", "कीमत", False),
        ("की", "कीमत", False),
        ("क", "की बात", False),
        ("کتاب", "کتاب\u200cها", False),
        ("خواهم", "می\u200cخواهم", False),
        ("क", "क्\u200dष", False),
        ("𞤢", "𞤢𞥄", False),
        ("𑄌", "𑄌𑄋𑄴", False),
        ("love", "❤\ufe0flove", True),
        ("กิน", "เขากินข้าว", True),
        ("été", "étés", False),
        ("haus", "Haus", False),
    ],
)
def test_phrases_are_whole_words_where_scripts_write_spaces(phrase, text, met):
    assert are_met([(phrase,)], text, BEAM) is met
    assert are_met([("zz", phrase), (phrase,)], text, BEAM) is met
    assert not are_met([("zz",), (phrase,)], text, BEAM)


@pytest.mark.parametrize(
    ("changes", "text", "met"),
    [
        ({"markup": "align"}, "in <b>3</b> Wochen", True),
        ({"markup": "align"}, "in <b>3</b> alten Wochen", False),
        ({"casing": "capitals"}, "IN 3 WOCHEN", True),
        ({"casing": "capitals"}, "IN 4 WOCHEN", False),
        ({"markup": "align", "casing": "capitals"}, "IN <b>3</b> WOCHEN", True),
    ],
)
def test_markup_and_case_of_the_source_do_not_hide_a_phrase(changes, text, met):
    assert are_met([("3 Wochen",)], text, dataclasses.replace(BEAM, **changes)) is met


def test_terms_are_found_around_markup(tmp_path):
    (tmp_path / "terms.tsv").write_text("red car\trotes Auto\n")
    for markup, terms in (("align", (("rotes Auto",),)), ("keep", ())):
        decode = dataclasses.replace(BEAM, glossary=str(tmp_path / "terms.tsv"), markup=markup)
        assert constraints_of(decode, "a red <b>car</b>", ()) == terms


def test_a_glossary_applies_the_longest_term(tmp_path):
    path = tmp_path / "terms.tsv"
    path.write_text("New York\tNew York\nYork\tYork\nnew\tneu\n\nYork\thier\tYork\nhouse\tHaus\n", encoding="utf-8")
    assert glossary_constraints(str(path), "New York and York") == (("New York",), ("York", "hier"))
    assert glossary_constraints(str(path), "a new house, new houses") == (("neu",), ("Haus",))
    assert glossary_constraints(str(path), "nothing") == ()
    for text in ("New\u00a0York", "New  York", "New\u200b York"):
        assert glossary_constraints(str(path), text) == (("New York",),)
    assert glossary_constraints(str(path), "{house} %(new)s <York> http://a.b/new York") == (("York", "hier"),)
    path.write_text("nothing\tnichts\n")  # in the same process
    assert glossary_constraints(str(path), "nothing") == (("nichts",),)
    broken = tmp_path / "broken.tsv"
    broken.write_text("house Haus\n")
    with pytest.raises(UserError, match="line 1 of glossary .* must be a term, a tab and its translation"):
        glossary_constraints(str(broken), "house")


def test_tokens_decode_as_written():
    """After a space, and without one, where no letter may precede; Chinese needs no space."""
    ((direct, spaced),) = encode("ab")
    assert (LETTERS.decode(direct.ids), LETTERS.decode(spaced.ids)) == ("ab", " ab")
    assert (direct[1:], spaced[1:]) == ((True, True), (False, True))
    assert {tokens[1:] for tokens in encode("中国")[0]} == {(False, False)}
    assert {tokens[1:] for tokens in encode("-a")[0]} == {(False, True)}
    masked = mask(Placeholders(("percent",)), "a %s b")
    ((direct, _),) = encode("%s", names=Placeholders(("percent",)), originals=masked.originals)
    assert LETTERS.decode(direct.ids) == "\U000f0000"


def test_tokens_are_those_of_a_sentence():
    """Also if texts lose spaces at their ends before they are encoded."""
    example = {"source": "das Haus (Haus) ist ein Haus"}
    example["target"] = example["source"]
    tokenizer = train_tokenizers(DataConfig(tokenizer="bpe", vocab_size=280), [example] * 9).target
    ids = [tokens.ids for tokens in encode_constraints(BEAM, tokenizer, read_constraints("Haus"), 9)[0]]
    assert tuple(tokenizer.encode("ein Haus")[-1:]) in ids
    assert {tokenizer.decode(each) for each in ids} == {"Haus", " Haus"}


def test_words_of_a_vocabulary_follow_a_space():
    words = WordTokenizer(["ab", "cd", "."])
    ((tokens,),) = encode_constraints(BEAM, words, read_constraints(["ab cd"]), 9)
    assert (words.decode(tokens.ids), tokens.glued, tokens.open) == ("ab cd", False, True)


def test_edges_of_tokens():
    packed = np.frombuffer(word_edges(LETTERS), np.uint8).reshape(2, -1)
    first, last = (row[: LETTERS.vocab_size].astype(bool) for row in np.unpackbits(packed, axis=1))
    expected = [LETTERS.decode([token]) in set("abcdeé") for token in range(LETTERS.vocab_size)]
    assert first.tolist() == last.tolist() == expected


@pytest.mark.parametrize(
    ("phrases", "options", "problem"),
    [
        (["ax"], {}, "constraint 'ax' cannot be encoded with this vocabulary; leave it out"),
        (["ab"], {"decode": DecodeConfig()}, "constraints need decode.strategy='beam', not 'greedy'"),
        (["ab"], {"decode": DecodeConfig(strategy="sample")}, "constraints need decode.strategy='beam', not 'sample'"),
        ([["abc", "abcd"]], {"limit": 2}, "constraint 'abc' or 'abcd' has 3 tokens, but an output has at most 2"),
        (["a"] * 65, {}, "a text has at most 64 constraints"),
        ([["a"] * 65], {}, "a text has at most 64 constraints, each with at most 64 alternatives"),
    ],
)
def test_phrases_that_outputs_cannot_have_are_refused(phrases, options, problem):
    with pytest.raises(UserError, match=problem):
        encode(*phrases, **options)


def test_phrases_are_as_normalized_outputs_have_them():
    lower = CharacterTokenizer("ab").normalized(("lowercase",), "en")
    with pytest.raises(UserError, match="outputs have constraint 'Ab' only as 'ab': write that"):
        encode_constraints(BEAM, lower, read_constraints(["Ab"]), 9)
