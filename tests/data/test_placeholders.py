"""Placeholders of pairs: symbols stand for them, and outputs get them back."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import tiny
from tformer_jax.config import Config, ConfigError, DataConfig
from tformer_jax.data.features import tokenize
from tformer_jax.data.placeholders import (
    NUMBERED,
    PATTERNS,
    count_unmatched,
    has_same_placeholders,
    mask,
    mask_pair,
    mask_target,
    restore,
)
from tformer_jax.data.tokenizers import NO_PLACEHOLDERS, Placeholders, Tokenizers, from_json
from tformer_jax.data.tokenizers.simple import ByteTokenizer
from tformer_jax.data.tokenizers.training import train_tokenizers

A, B, C = NUMBERED[:3]
EVERY = Placeholders(tuple(PATTERNS))


@pytest.mark.parametrize(
    ("name", "text", "marks"),
    [
        ("percent", "%s of %d, %(name)s is %1$s, 5%% %.2f %-5d%ld", "%s|%d|%(name)s|%1$s|%%|%.2f|%-5d|%ld"),
        ("percent", "50%of 100% sure, 3 %; %", ""),
        ("percent", "%sth %sben %Y-%m", "%s|%Y|%m"),
        ("percent", "%dx%ds %(a b)s", "%d|%d|%(a b)s"),
        ("braces", "{0} {} {name} {a.b[0]!r:>10} {{ user }}${x}", "{0}|{}|{name}|{a.b[0]!r:>10}|{{ user }}|{x}"),
        ("braces", "{a b} { } {n, plural, other {x}}", "{x}"),
        (
            "tags",
            '<b>x</b><br/><a href="a>b" id=x>y</a> <br /> <h1>',
            '<b>|</b>|<br/>|<a href="a>b" id=x>|</a>|<br />|<h1>',
        ),
        ("tags", "a < b > c <3 <> <b 1<2", ""),
        ("urls", "see https://a.b/c?d=%20e, or (http://x.y).", "https://a.b/c?d=%20e|http://x.y"),
        ("urls", "“https://”, http://über, https://a.b” <http://c/d/>", "https://a.b|http://c/d/"),
    ],
)
def test_placeholders(name, text, marks):
    assert mask(Placeholders((name,)), text).originals == tuple(dict.fromkeys(marks.split("|") if marks else ()))


def test_numbers_are_those_of_the_source():
    """By hand: the target's order is another one, it repeats one, and has one that the source lacks."""
    source, target = "%s saw {0} and %s", "{0}, %s {0} <b> {1}"
    assert mask(EVERY, source) == (f"{A} saw {B} and {A}", ("%s", "{0}"))
    assert mask_pair(EVERY, source, target) == (f"{A} saw {B} and {A}", f"{B}, {A} {B} <b> {{1}}")
    assert count_unmatched(EVERY, source, target) == 2
    assert restore(f"{B}{C}x{A}", ("%s", "{0}")) == "{0}x%s"
    assert mask(Placeholders(("tags",)), source).text == source
    assert has_same_placeholders(EVERY, source, "%s {0} %s")
    assert not has_same_placeholders(EVERY, source, "%s {0}")
    assert not has_same_placeholders(EVERY, source, "%s {0} %s %s")
    assert mask_pair(EVERY, "{0} of 5 %d", "5%d {{0}}") == (f"{A} of 5 {B}", f"5{B} {{{A}}}")
    assert has_same_placeholders(EVERY, "5 %d", "5%d")
    assert mask(NO_PLACEHOLDERS, source) == (source, None)
    assert restore(source + A, None) == source + A


def test_symbols_of_the_vocabulary_are_no_placeholders():
    """By hand: a symbol stays where a pattern would match it, or begin within it."""
    marked = Placeholders(EVERY.names, ("<hint>", "</hint>", "@{x}", "%"))
    source = "<hint> %s </hint> <b>{x} @{x}</b>"
    masked = f"<hint> {A} </hint> {B}{C} @{{x}}{NUMBERED[3]}"
    assert mask(marked, source) == (masked, ("%s", "<b>", "{x}", "</b>"))
    assert mask_target(marked, "</hint> {x}", ("{x}",)) == f"</hint> {A}"
    assert count_unmatched(marked, "a <b>", "</hint> <b> <i>") == 1
    assert has_same_placeholders(marked, source, "{x} %s <b></b> <hint>")
    assert not has_same_placeholders(EVERY, source, "{x} %s <b></b> <hint>")


def test_a_trained_vocabulary_reads_symbols_in_brackets():
    pairs = [{"source": f"<{name}> copy <b>", "target": "<b>"} for name in ("general", "domain")]
    cfg = DataConfig(tokenizer="bytes", placeholders=("tags",), symbols=("<general>", "<domain>"))
    tokenizers = train_tokenizers(cfg, pairs)
    block, ids = tokenize(pairs, tokenizers), tokenizers.source.symbol_ids
    assert [row[0] for row in block["source"].rows()] == [ids["<general>"], ids["<domain>"]]
    assert block["target"].ids.tolist() == [ids[A]] * 2


def test_a_text_with_the_symbols_themselves_gets_them_back():
    source = f"{C} and %s, {A}"
    masked = mask(EVERY, source)
    assert masked == (f"{A} and {B}, {C}", (C, "%s", A))
    assert restore(masked.text, masked.originals) == source
    assert mask_target(EVERY, f"{A} {B}", masked.originals) == f"{C} "  # B is no placeholder of the source


def test_placeholders_beyond_the_last_number_stay_text():
    source = " ".join(f"{{{number}}}" for number in range(40)) + f" {A}"
    masked = mask(EVERY, source)
    assert masked.text.split() == [*NUMBERED, *(f"{{{number}}}" for number in range(32, 40))]
    assert count_unmatched(EVERY, source, "{31} {32}") == 1
    assert not has_same_placeholders(EVERY, source, restore(masked.text, masked.originals))


atoms = st.lists(
    st.sampled_from(["%s", "%d", "{0}", "<b>", "</b>", "http://a.b", A, B, "x", "%", "{", "<"]), max_size=12
)


@given(atoms, atoms, atoms)
def test_pairs_are_masked_and_restored_as_by_replacing_words(source, target, output):
    placeholders = [word for word in dict.fromkeys(source) if len(word) > 1 or word in NUMBERED]
    numbers = dict(zip(placeholders, NUMBERED, strict=False))
    read = [numbers.get(word, word) for word in source]
    written = [numbers.get(word, "" if word in NUMBERED else word) for word in target]
    assert mask_pair(EVERY, " ".join(source), " ".join(target)) == (" ".join(read), " ".join(written))
    assert mask(EVERY, " ".join(source)).originals == (tuple(placeholders) if source else None)
    assert restore(" ".join(read), tuple(placeholders)) == " ".join(source)
    originals = {symbol: word for word, symbol in numbers.items()} | dict.fromkeys(NUMBERED[len(placeholders) :], "")
    restored = [originals.get(word, word) for word in output]
    assert restore(" ".join(output), tuple(placeholders)) == " ".join(restored)


def test_vocabularies_have_the_symbols_and_pairs_are_tokenized_with_them():
    pairs = [{"source": "Copy %s to {0}!", "target": "{0}: %s kopieren! <i>"}] * 3
    cfg = DataConfig(tokenizer="bpe", vocab_size=300, placeholders=("percent", "braces"), symbols=("!",))
    tokenizers = train_tokenizers(cfg, pairs)
    tokenizer = from_json(tokenizers.source.to_json())
    assert tokenizer.symbols == ("!", *NUMBERED)
    assert tokenizers.placeholders.names == tokenizer.placeholders == ("percent", "braces")
    assert not any("%s" in tokenizer.decode([i]) for i in range(4, tokenizer.own_size))
    block = tokenize(pairs, tokenizers)
    assert tokenizer.decode(block["source"].ids[: block["source"].lengths[0]]) == f"Copy {A} to {B}!"
    assert tokenizer.decode(block["target"].ids[: block["target"].lengths[0]]) == f"{B}: {A} kopieren! <i>"


def test_a_side_without_symbols_has_no_placeholders():
    source = ByteTokenizer().with_symbols(NUMBERED, EVERY.names)
    assert Tokenizers(source, source).placeholders == Placeholders(EVERY.names, NUMBERED)
    assert not Tokenizers(source, ByteTokenizer()).placeholders
    block = tokenize([{"text": "a %s"}], Tokenizers(source, source))
    assert source.decode(block["text"].ids) == "a %s"


def test_only_translation_has_placeholders():
    with pytest.raises(ConfigError, match=r"data.placeholders.*must be \(\) for model.family='decoder_lm'"):
        Config(
            model=tiny("decoder_lm"), data=DataConfig(source="stdlib_text", batching="packed", placeholders=("tags",))
        )


@given(st.lists(st.sampled_from(["<a", "<", ">", "/", " ", "  ", "=", '"', "'", "b", "c:d"]), max_size=12).map("".join))
def test_tags_are_found_as_by_a_search_of_every_span(text):
    """The oracle reads a tag character by character: a name, and what follows a space, with quotes in pairs."""

    def is_tag(span: str) -> bool:
        name = re.match(r"</?[A-Za-z][\w:.-]*", span)
        if not name or not span.endswith(">") or len(span) == name.end():
            return False
        rest, quote = span[name.end() : -1], ""
        if rest and rest != "/" and not rest[0].isspace():
            return False
        for character in rest:
            if quote:
                quote = "" if character == quote else quote
            elif character in "\"'":
                quote = character
            elif character in "<>":
                return False
        return not quote

    actual = [match.span() for match in re.finditer(PATTERNS["tags"], text)]
    expected, start = [], 0
    while start < len(text):
        end = next((end for end in range(len(text), start, -1) if is_tag(text[start:end])), start)
        expected += [(start, end)] if end > start else []
        start = max(end, start + 1)
    assert actual == expected


def test_many_spaces_after_the_beginning_of_a_tag_take_no_time():
    """Regression test: the time grew with the third power of their number."""
    assert not re.search(PATTERNS["tags"], "x <a" + " " * 20_000 + "y")
