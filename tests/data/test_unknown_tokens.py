"""Unknown tokens in decoded texts, and the parts of a source that tokens stand for."""

import dataclasses
import json

import pytest
import tokenizers as hf

from tests.inference.test_detokenization import bert, marian, metaspace, spiece
from tformer_jax.config import DataConfig
from tformer_jax.data.tokenizers import UNKNOWN_MARK, Tokenizer, from_json
from tformer_jax.data.tokenizers.simple import ByteTokenizer, CharacterTokenizer, WordTokenizer
from tformer_jax.data.tokenizers.tokens import copied_words, unknown_per_word
from tformer_jax.data.tokenizers.training import train_tokenizers
from tformer_jax.special_tokens import UNK

TEXTS = ["the cat sat", "the dog's mat", "a cat, a dog"]
THAI = "ภาษาไทยเป็นภาษาที่ไม่มีช่องว่างระหว่างคำ"


def word_piece(*texts: str) -> Tokenizer:
    return train_tokenizers(DataConfig(tokenizer="wordpiece", vocab_size=200), [{"text": t} for t in texts]).target


WORDS = WordTokenizer(["the", "cat", "sat", "dog"])
LETTERS = CharacterTokenizer(" acehst")


@pytest.mark.parametrize(
    ("tokenizer", "text", "shown", "count"),
    [
        (WORDS, "the zebra sat zoo", "the <unk> sat <unk>", 2),
        (LETTERS, "the zebra", "the <unk>e<unk><unk>a", 3),
        (word_piece(*TEXTS), "the ζεβρα sat", "the <unk> sat", 1),
        (WORDS.normalized(("lowercase",), "en"), "The Zebra", "the <unk>", 1),
        (WORDS.extended(("<mask>",)), "zebra the", "<unk> the", 1),
        (spiece(vocab_size=60), "the ζ cat", None, 1),
        (marian(), "the ζ a", None, None),
        (bert(), "the ζ", None, None),
        (metaspace(), "the ζ", None, None),
        (ByteTokenizer(), "ζ", "ζ", 0),
    ],
    ids=[
        "words",
        "characters",
        "wordpiece",
        "normalized",
        "extended",
        "sentencepiece",
        "marian",
        "bert",
        "metaspace",
        "bytes",
    ],
)
def test_unknown_tokens_are_shown_counted_or_left_out(tokenizer, text, shown, count):
    ids, special = tokenizer.encode(text), tokenizer.special
    actual = tokenizer.decode(ids, unknown="<unk>")
    assert count is None or special.count_unknown(ids) == count
    assert actual.count("<unk>") == special.count_unknown(ids)
    assert shown is None or actual == shown
    assert tokenizer.decode(ids, unknown=UNKNOWN_MARK).replace(UNKNOWN_MARK, "<unk>") == actual
    known = [i for i in ids if i != special.shown_unknown]
    assert tokenizer.decode(known) == tokenizer.decode(known, unknown="<unk>")
    if special.shown_unknown in special.name_of:  # others are ordinary tokens to their library
        assert tokenizer.decode(ids) == tokenizer.decode(known)


def test_a_shown_unknown_token_is_decoded_as_by_the_library():
    tokenizer = word_piece(*TEXTS)
    library = hf.Tokenizer.from_str(json.dumps(tokenizer.to_json()["model"]))
    ids = tokenizer.encode("ζ cat ζζ, ζ")
    assert ids.count(UNK) == 3
    assert tokenizer.decode(ids, unknown="<unk>") == library.decode(ids, skip_special_tokens=False)


def test_a_token_with_other_meanings_is_not_an_unknown_token():
    special = dataclasses.replace(WORDS.special, unknown=2)  # as GPT-2's, whose unknown token ends texts
    assert special.shown_unknown is None
    assert special.count_unknown([2, 2, 3]) == 0


@pytest.mark.parametrize(
    ("tokenizer", "text", "parts"),
    [
        (WORDS, "the  Zebra, sat", ["the", "Zebra,", "sat"]),
        (word_piece(*TEXTS), "the Ζέβρα-X, sat", ["the", "Ζέβρα", "-", "X", ",", "sat"]),
        (WORDS.normalized(("lowercase",), "en"), "The ZOO", ["the", "zoo"]),
        (ByteTokenizer(), "né à", ["né", "né", "né", "", "à", "à"]),
        (CharacterTokenizer(" कतबिाी"), "किताब की", [*["किताब"] * 5, "", "की", "की"]),
    ],
    ids=["words", "wordpiece", "normalized", "bytes", "signs"],
)
def test_tokens_stand_for_words(tokenizer, text, parts):
    actual = copied_words(tokenizer, text, whole_words=True)
    assert len(actual) == len(tokenizer.encode(text))
    assert actual == parts


def test_tokens_stand_for_characters():
    assert copied_words(LETTERS, "the z", whole_words=False) == ["t", "h", "e", "", "z"]


def test_unknown_tokens_of_a_word():
    assert unknown_per_word(WORDS) == unknown_per_word(word_piece(*TEXTS)) == 1
    assert unknown_per_word(LETTERS) == 2
    assert unknown_per_word(ByteTokenizer()) == 0


@pytest.mark.parametrize("characters", [101, 900])
def test_word_piece_reads_unspaced_texts(characters):
    text = (THAI * 40)[:characters]
    tokenizer = from_json(json.loads(json.dumps(word_piece(THAI).to_json())))
    ids = tokenizer.encode(text)
    assert UNK not in ids
    assert tokenizer.decode(ids) == text
