"""Cleaning of white space and invisible characters."""

import re
import sys
import unicodedata

import hypothesis
import pytest
from hypothesis import strategies

from tformer_jax.data import characters
from tformer_jax.data.characters import clean_whitespace, is_blank

SPACES = [chr(code) for code in range(sys.maxunicode + 1) if chr(code).isspace()]
DECIDED_BY_NEIGHBORS = {0x180E, 0x200C, 0x200D} | {*range(0xE0000, 0xE0080)}
VISIBLE_FORMATS = {*range(0x0600, 0x0606), 0x06DD, 0x070F, 0x0890, 0x0891, 0x08E2, 0x110BD, 0x110CD}
"""Signs that enclose or precede numbers."""
HIEROGLYPHS = {*range(0x13430, 0x13440)}
"""They arrange the hieroglyphs around them."""


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        (" in  2\tweeks\r\n", "in 2 weeks"),
        ("3:33\u202fPM", "3:33 PM"),
        ("第一\u3000行", "第一 行"),
        ("zero\u200bwidth, soft\xadhyphen, mark\ufeff", "zerowidth, softhyphen, mark"),
        ("a\x00b\x07", "ab"),
        ("\u200fשלום\u200f \u2066x\u2069", "שלום x"),
        ("می\u200cخواهم", "می\u200cخواهم"),
        ("x\u200cy \u200d", "xy"),
        ("क्\u200d", "क्\u200d"),
        ("क्\u200d\u200dष", "क्\u200dष"),
        ("में\u200c", "में"),
        ("\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f468\u200d\U0001f469\u200d\U0001f467"),
        ("\U0001f3f3\ufe0f\u200d\U0001f308!", "\U0001f3f3\ufe0f\u200d\U0001f308!"),
        ("\U0001f3f4\U000e0067\U000e007f", "\U0001f3f4\U000e0067\U000e007f"),
        ("a\U000e0067\U000e007fb", "ab"),
        ("a\u034fb", "ab"),
        ("unchanged, too", "unchanged, too"),
    ],
)
def test_examples(text, cleaned):
    assert clean_whitespace(text) == cleaned


def test_every_kind_of_white_space_separates_words_once():
    for space in SPACES:
        assert clean_whitespace(f"{space}a{space}{space}b{space}") == "a b", hex(ord(space))


def test_every_control_and_format_character_is_decided():
    """By the Unicode database of Python."""
    formats = {code for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) in ("Cc", "Cf")}
    for code in sorted(formats | {*range(0x3000), *range(0x3000, sys.maxunicode, 101)}):
        text = chr(code)
        removed = unicodedata.category(text) in ("Cc", "Cf") and not text.isspace()
        if code in DECIDED_BY_NEIGHBORS | VISIBLE_FORMATS | HIEROGLYPHS or code == 0x034F:
            continue
        assert (clean_whitespace(f"a{text}b") == "ab") == removed, hex(code)


ODD = strategies.sampled_from(
    [*SPACES, "\u200c", "\u200d", "\u180e", "\u200b", "\x00", "\ufe0f", "\U000e0067", "\U0001f3f4"]
)
TEXTS = strategies.lists(strategies.one_of(ODD, strategies.characters(), strategies.sampled_from("aक्می☀"))).map("".join)


@hypothesis.given(TEXTS)
def test_the_result_is_its_own_result_and_has_the_visible_characters(text):
    cleaned = clean_whitespace(text)
    assert clean_whitespace(cleaned) == cleaned
    assert cleaned == " ".join(cleaned.split())
    assert is_blank(text) == is_blank(cleaned)
    visible = [c for c in text if not (c.isspace() or unicodedata.category(c) in ("Cc", "Cf") or c == "\u034f")]
    assert [c for c in cleaned if c in visible] == visible


def test_blank_texts():
    for text in ("", " \u3000\t\n", "\u200b\u200d\ufeff", "\u0301", "\u3164", "\x00"):
        assert is_blank(text), ascii(text)
    for text in ("a", ".", "\u200bи", "☀", "\ue000"):
        assert not is_blank(text), ascii(text)


def test_viramas_are_those_of_the_database():
    assert all(unicodedata.combining(chr(code)) == 9 for code, _ in characters.VIRAMAS)


def test_marks_of_letters_are_within_words():
    """Of all scripts; marks of symbols, such as styles of emoji, are not."""
    symbols = re.compile("VARIATION SELECTOR|MUSICAL|ZNAMENNY|SIGNWRITING|PHAISTOS|EPACT")
    marks = [chr(code) for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) in ("Mn", "Mc")]
    within = re.compile(rf"{characters.LETTER}|[{characters.UNSPACED}]")
    outside = [c for c in marks if not within.match(c) and not symbols.search(unicodedata.name(c))]
    assert outside == [c for c in outside if "\u20d0" <= c <= "\u20f0"]


def test_signs_are_marks_and_joiners():
    signs = re.compile(rf"[{characters.SIGNS}]")
    others = {chr(c) for c in range(sys.maxunicode + 1) if signs.match(chr(c)) and not re.match(r"\w", chr(c))}
    assert {c for c in others if unicodedata.category(c) not in ("Mn", "Mc", "Me", "Cn")} == set("\u180e\u200c\u200d")
