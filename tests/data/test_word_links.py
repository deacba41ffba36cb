"""Links between words: their format, the alignment error rate by hand, and the tokens of words."""

import pytest

from tformer_jax.base.errors import UserError
from tformer_jax.data.tokenizers.simple import CharacterTokenizer, WordTokenizer
from tformer_jax.data.tokenizers.tokens import token_ranges
from tformer_jax.data.word_links import error_rate, format_links, read_links, read_references, word_spans


def test_links_are_read_and_written():
    sure, possible = read_links("0-0 2-1 10-3 1p2 1?4")
    assert sure == {(0, 0), (2, 1), (10, 3)}
    assert possible == sure | {(1, 2), (1, 4)}
    assert format_links(((0, 0), (2, 1))) == "0-0 2-1"
    assert read_links("") == (frozenset(), frozenset())
    with pytest.raises(UserError, match="'1:2' is no link"):
        read_links("0-0 1:2")


def test_a_file_of_links_names_the_line_that_has_none(tmp_path):
    path = tmp_path / "links"
    path.write_text("0-0 1-1\n\n0-1\n")
    assert [sorted(sure) for sure, _ in read_references(path)] == [[(0, 0), (1, 1)], [], [(0, 1)]]
    path.write_text("0-0\n0\n")
    with pytest.raises(UserError, match=f"{path}, line 2: '0' is no link"):
        read_references(path)


def test_the_error_rate_is_that_of_och_and_ney():
    references = [read_links("0-0 1-1 2p1"), read_links("0-0")]
    assert error_rate([[(0, 0), (1, 1)], [(0, 0)]], references) == 0
    # A = 4 links, S = 3; sure ones found: 2; possible ones: 3
    assert error_rate([[(0, 0), (2, 1), (3, 3)], [(0, 0)]], references) == pytest.approx(1 - (2 + 3) / (4 + 3))
    assert error_rate([[], []], references) == 1
    assert error_rate([[]], [read_links("")]) == 0


def test_words_have_the_places_of_their_tokens():
    text = " ab  c d"
    spans = word_spans(text)
    assert [text[start:stop] for start, stop in spans] == ["ab", "c", "d"]
    characters = CharacterTokenizer([*"abcd "])
    ids = characters.encode(text)
    ranges = token_ranges(characters, text, spans)
    assert ["".join(characters.decode(ids[n] for n in part)).strip() for part in ranges] == ["ab", "c", "d"]
    assert [*token_ranges(WordTokenizer([*"abc"]), "a zebra b", word_spans("a zebra b"))] == [
        range(1),
        range(1, 2),
        range(2, 3),
    ]


class Joining(WordTokenizer):
    """Writes "of the" as one token."""

    def encode_normalized(self, texts):
        return super().encode_normalized([text.replace("of the", "of_the") for text in texts])


def test_words_that_a_token_joins_share_it():
    tokenizer, text = Joining(["end", "of_the", "of", "the", "day"]), "end of the day"
    assert token_ranges(tokenizer, text, word_spans(text)) == [range(1), range(1, 2), range(1, 2), range(2, 3)]
