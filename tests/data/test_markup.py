"""Markup is taken out of texts and put back by alignments: exhaustively over short texts, and against an XML parser."""

import collections
import itertools
import random
import re
import xml.etree.ElementTree as ElementTree

import pytest

from tformer_jax.data.markup import keeps_markup, leave_out, put_back, take_out, unit_spans
from tformer_jax.data.tokenizers import Placeholders

PIECES = ("a", "bc", " ", ".", "<b>", "</b>", "<i>", "</i>", "<br/>", "{0}")
MARK = re.compile(r"<[^>]*>|\{0\}")


def is_well_formed(text: str) -> bool:
    try:
        ElementTree.fromstring(f"<r>{text}</r>")
    except ElementTree.ParseError:
        return False
    return True


def check(text: str, draw: random.Random) -> None:
    """Puts the markup of a text into a translation of random words with random links."""
    segment = take_out(text)
    assert not MARK.search(segment.plain)
    assert "".join(segment.plain.split()) == "".join(MARK.sub("", text).split())
    output = " ".join(draw.choice(["x", "yz", "u."]) for _ in range(draw.randrange(4)))
    sources, targets = len(unit_spans(segment.plain)), len(unit_spans(output))
    every = [*itertools.product(range(sources), range(targets))]
    links = draw.sample(every, draw.randint(0, len(every)))
    actual = put_back(segment, output, links)
    assert collections.Counter(MARK.findall(actual)) == collections.Counter(MARK.findall(text)), (text, output, links)
    assert "".join(MARK.sub("", actual).split()) == "".join(output.split())
    if is_well_formed(text):
        assert is_well_formed(actual), (text, output, links, actual)
    assert keeps_markup(text, actual)


@pytest.mark.parametrize(
    "length", [0, 1, 2, 3, pytest.param(4, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)]
)
def test_no_mark_is_lost_or_invented_and_nesting_stays(length):
    draw = random.Random(length)
    for pieces in itertools.product(PIECES, repeat=length):
        check("".join(pieces), draw)


def test_an_equal_translation_gets_the_text_back():
    """Words are single, so that spaces alone could differ."""
    texts = (
        "Click <b>here</b> now.",
        "Delete <i><b>all</b> {0} files</i>, please.",
        "{0} of %s: <a href='x y'>the page</a>",
        "end {name}",
        "<p>{0}</p>",
        "<b></b> cat <i></i>, dog",
        "",
        "नमस्ते <b>दुनिया</b>",
        "我<b>喜欢</b>猫",
    )
    for text in texts:
        segment = take_out(text)
        links = [(n, n) for n in range(len(unit_spans(segment.plain)))]
        assert put_back(segment, segment.plain, links) == text


@pytest.mark.parametrize(
    ("text", "output", "links", "expected"),
    [
        ("a <b>red</b> car", "une voiture rouge", [(0, 0), (1, 2), (2, 1)], "une voiture <b>rouge</b>"),
        ("Delete {0} files", "Dateien löschen", [(0, 1), (1, 0)], "{0} Dateien löschen"),
        ("<b>one</b> two <i>three</i>", "C B A", [(0, 2), (1, 1), (2, 0)], "<i>C</i> B <b>A</b>"),
        ("<i>not <b>seen</b></i> it", "X Y Z", [(0, 0), (1, 2), (2, 1)], "<i>X Y <b>Z</b></i>"),
        ("<b>a</b> <i>b</i>", "X", [(0, 0), (1, 0)], "<i></i><b>X</b>"),  # one word for both
        ("<b>a</b> b", "X Y", [(1, 0), (1, 1)], "<b></b>X Y"),  # aligned with nothing
        ("a<br/>b", "X Y", [(0, 0), (1, 1)], "X<br/> Y"),
        ("</b> a <b>", "X", [(0, 0)], "</b> X <b>"),
        ("a %d.", "5.", [(0, 0), (1, 1)], "5 %d."),
        ("Weight %s kg", "Gewicht 3.5 kg", [(0, 0), (1, 2)], "Gewicht 3.5 %s kg"),
        ("<b>Total</b> cost", "12,345.67 Euro", [(0, 0), (1, 1)], "<b>12,345.67</b> Euro"),
        ("<b>a b c</b> d", "W X Y Z V U", [(0, 0), (1, 1), (2, 5), (3, 2), (3, 3), (3, 4)], "<b>W X Y Z V U</b>"),
        ("<b>a b</b> d", "W X Y Z V U", [(0, 0), (1, 5), (2, 2), (2, 3), (2, 4)], "<b>W</b> X Y Z V U"),
    ],
)
def test_marks_go_to_the_aligned_words(text, output, links, expected):
    assert put_back(take_out(text), output, links) == expected


def test_texts_without_markup_are_as_they_were():
    for text in ("100 % sure, 3 < 4 > 2", " a  b ", "{", "%", "a\tb"):
        segment = take_out(text)
        assert segment == (text, [])
        assert put_back(segment, "x  y ", []) == "x  y "


def test_invented_marks_are_left_out_until_none_is_there():
    assert leave_out("a <b>%s</b> {0}.") == ("a  .", 4)
    assert leave_out("<<b>i>%<br/>d 5 < 6") == (" 5 < 6", 4)
    assert leave_out("{0} %s", Placeholders(("braces",))) == ("{0} ", 1)
    draw = random.Random(0)
    for _ in range(500):
        text = "".join(draw.choices([*PIECES, "<", ">", "%", "s", "{", "}"], k=8))
        assert not take_out(leave_out(text)[0]).marks


def test_encoded_characters_of_addresses_are_text():
    """Regression test: `%20F` was a placeholder, also within an address."""
    text = "see https://a.org/My%20Files.pdf?q=%d0%b0, %s <b>now</b> ftp://a.org/{0}/%s"
    assert leave_out(text) == ("see https://a.org/My%20Files.pdf?q=%d0%b0,  now ftp://a.org//", 5)
    segment = take_out("<b>see</b> https://a.org/My%20Files.pdf")
    assert segment.plain == "see https://a.org/My%20Files.pdf"
    links = [(n, n) for n in range(len(unit_spans(segment.plain)))]
    assert put_back(segment, segment.plain, links) == "<b>see</b> https://a.org/My%20Files.pdf"
    assert keeps_markup("https://a.org/%d0%b0", "at https://a.org/")
    assert not keeps_markup("x%20F", "x")


def test_words_that_end_with_signs_stay_apart():
    assert take_out("नमस्ते<br/>दुनिया").plain == "नमस्ते दुनिया"
    assert take_out("日本<br/>。").plain == "日本。"


def test_placeholders_that_the_model_reads_stay():
    text = "<b>{0}</b> of %s"
    assert take_out(text, Placeholders(("braces",))).plain == "{0} of"
    assert take_out(text, Placeholders(("braces", "tags", "percent"))) == (text, [])
    assert keeps_markup(text, "<b></b> %s", Placeholders(("braces",)))
    assert not keeps_markup(text, "<b></b> %s")
    assert not keeps_markup("a", "a {0}")
    marked = Placeholders(symbols=("<hint>", "</hint>"))
    assert take_out("<b>x <hint> y </hint></b>", marked).plain == "x <hint> y </hint>"
    assert keeps_markup("a <hint> b </hint> <i>", "<i> b", marked)
