"""The format of log-probabilities: tokens as they add to the text, and names of the most probable ones."""

import math

import pytest

from tformer_jax.data.tokenizers.simple import ByteTokenizer, WordTokenizer
from tformer_jax.inference.scores import Scored
from tformer_jax.serving.logprobs import LOWEST, added_texts, logprobs
from tformer_jax.special_tokens import EOS, UNK

BYTES = ByteTokenizer()
WORDS = WordTokenizer(["one", "two", "three"])


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([], []),
        (BYTES.encode("aé!"), ["a", "", "é", "!"]),
        ([*BYTES.encode("aé")[:2], EOS], ["a", "\ufffd", "</s>"]),
        ([*BYTES.encode("a"), EOS, *BYTES.encode("b")], ["a", "</s>", "b"]),
    ],
)
def test_tokens_add_up_to_the_text(ids, expected):
    assert added_texts(BYTES, ids) == expected


def test_words_come_with_the_space_before_them():
    ids = WORDS.encode("one two three")
    assert added_texts(WORDS, ids) == ["one", " two", " three"]
    actual = logprobs([(WORDS, ids)], Scored(ids[1:], [-1.0, -2.0], [{ids[0]: -0.5, ids[1]: -1.0}, {UNK: -0.25}]))
    assert actual["tokens"] == ["one", " two", " three"]
    assert actual["text_offset"] == [0, 3, 7]
    assert actual["token_logprobs"] == [None, -1.0, -2.0]
    assert actual["top_logprobs"] == [None, {" two": -1.0, " one": -0.5}, {" three": -2.0, "<unk>": -0.25}]


def test_special_tokens_take_no_room_in_the_text():
    ids = [*BYTES.encode("a"), EOS, *BYTES.encode("b")]
    actual = logprobs([(BYTES, ids[:2]), (BYTES, ids[2:])], Scored(ids[2:], [-1.0]))
    assert (actual["tokens"], actual["text_offset"]) == (["a", "</s>", "b"], [0, 1, 1])
    assert actual["token_logprobs"] == [None, None, -1.0]


def test_tokens_with_the_same_text_have_different_names():
    first, second, third = BYTES.encode("漢")  # each of these bytes alone decodes to U+FFFD
    best = {second: -0.5, first: -1.0, third: -2.0}
    actual = logprobs([(BYTES, [first])], Scored([first], [-1.0], [best]))["top_logprobs"]
    assert actual == [{"\ufffd": -1.0, f"token_id:{second}": -0.5, f"token_id:{third}": -2.0}]


@pytest.mark.parametrize("value", [-math.inf, math.nan, -1e30])
def test_values_without_a_place_in_json(value):
    ids = BYTES.encode("a")
    actual = logprobs([(BYTES, ids)], Scored(ids, [value], [{ids[0]: value}]))
    assert (actual["token_logprobs"], actual["top_logprobs"]) == ([LOWEST], [{"a": LOWEST}])
