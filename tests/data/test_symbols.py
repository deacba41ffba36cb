"""Texts that are one token each, vocabularies of characters, and what the examples of a tokenizer are."""

import json
import pickle
import random
import re

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.data.trained import trained_tokenizer
from tformer_jax.config import ConfigError, DataConfig
from tformer_jax.data.tokenizers import Tokenizer, from_json
from tformer_jax.data.tokenizers.correspondence import correspondence
from tformer_jax.data.tokenizers.simple import ByteTokenizer
from tformer_jax.data.tokenizers.training import (
    _sample,
    _sample_balanced,
    adopt_tokenizers,
    balanced_counts,
    train_tokenizers,
)
from tformer_jax.data.transforms.bpe_dropout import RandomMerges
from tformer_jax.inference.detokenization import TextStream
from tformer_jax.special_tokens import SPECIAL_TOKENS, UNK

SYMBOLS = ("<b>", "<b></b>", "AB", "A", "≠", "{0}")
TEXTS = ["the cat <b>sat</b> on {0}", "AB ≠ A, <s> and </s> <2de>", "naïve 数字 %s 456 B"] * 9
LOSSLESS = {
    "bytes": {},
    "characters": {},
    "bpe": {},
    "unigram": {},
    "bpe of characters": {"character_coverage": 0.95, "byte_fallback": True},
    "unigram of characters": {"character_coverage": 0.95, "byte_fallback": True},
}


def with_symbols(name: str, **settings) -> Tokenizer:
    kind, *_ = name.split()
    return trained_tokenizer(kind, TEXTS, 600, symbols=SYMBOLS, **LOSSLESS.get(name, {}), **settings)


def scan(text: str) -> list[str]:
    """Returns the symbols of a text by trying each place, longest first."""
    symbols, start = [], 0
    while start < len(text):
        starting = [symbol for symbol in SYMBOLS if text.startswith(symbol, start)]
        symbols += [max(starting, key=len)] if starting else []
        start += max(map(len, starting), default=1)
    return symbols


texts = st.lists(st.sampled_from([*SYMBOLS, " ", "  ", "the", "<", "B", "0}", "<s>", "</s>", "<pad>", "ï数"])).map(
    "".join
)


@pytest.mark.parametrize("name", LOSSLESS)
def test_a_symbol_is_one_token_wherever_it_stands(name):
    tokenizer = with_symbols(name)
    restored = from_json(json.loads(json.dumps(tokenizer.to_json())))
    copied = pickle.loads(pickle.dumps(tokenizer))
    names = {i: symbol for symbol, i in tokenizer.symbol_ids.items()}
    assert sorted(names) == list(range(tokenizer.vocab_size - len(SYMBOLS), tokenizer.vocab_size))

    @given(texts)
    @example("A <b> B{0}{0}  AB<b></b>≠")
    def check(text):
        ids = tokenizer.encode(text)
        assert [names[i] for i in ids if i in names] == scan(text)
        assert not {*range(len(SPECIAL_TOKENS))} & {*ids} or name == "characters"
        assert UNK in ids or tokenizer.decode(ids) == text
        stream = TextStream(tokenizer)
        assert "".join([*map(stream.feed, ids), stream.close()]) == tokenizer.decode(ids)
        for other in (restored, copied):
            assert (other.encode(text), other.decode(ids)) == (ids, tokenizer.decode(ids))

    check()


@pytest.mark.parametrize("kind", ["words", "wordpiece"])
def test_symbols_are_words_of_kinds_that_write_spaces(kind):
    tokenizer = with_symbols(kind)
    assert tokenizer.decode(tokenizer.encode("the<b>cat {0} on≠")) == "the <b> cat {0} on ≠"


@pytest.mark.parametrize("steps", [("nfkc", "lowercase"), ("punctuation", "moses"), ("simplified",)])
def test_no_step_of_normalization_changes_a_symbol(steps):
    symbols = ("<B>", "ﬁ", "&", "“", "漢")
    tokenizer = trained_tokenizer("bytes", ["a"], 300, symbols=symbols).normalized(("whitespace", *steps), "en")

    @given(st.lists(st.sampled_from([*symbols, " ", "\t", "A", "xﬂ", "\ufffe", "'s", "x"])).map("".join))
    def check(text):
        ids = tokenizer.encode(text)
        assert [tokenizer.symbols[i - 260] for i in ids if i >= 260] == re.findall("|".join(symbols), text)
        others = "".join(tokenizer.decode([i for i in ids if i < 260]).split())
        between = re.sub("|".join(symbols), " \u2060 ", text)  # a word joiner, which separates words and is removed
        expected = ByteTokenizer().normalized(steps, "en").normalize(between)
        assert others.replace("\u2060", "") == "".join(expected.replace("\u2060", "").split())

    if steps != ("punctuation", "moses"):
        check()
    else:
        assert tokenizer.decode(tokenizer.encode("it’s <B>&x “")) == "it &apos;s <B> & x “"


@pytest.mark.parametrize("name", [*LOSSLESS, "words", "wordpiece"])
def test_texts_with_the_letters_of_special_tokens_and_tags_stay_texts(name):
    """Although all texts of the training split have them."""
    text = "<2de> a </s> <s> <unk> <pad> <mask> b</s>"
    kind, *_ = name.split()
    tokenizer = trained_tokenizer(kind, [text] * 50, 600, **LOSSLESS.get(name, {}))
    tokenizer = tokenizer.extended(["<2de>", "<mask>"])
    ids = tokenizer.encode(text)
    assert not {*tokenizer.special.name_of} & {*ids}
    assert tokenizer.decode(ids).replace(" ", "") == text.replace(" ", "")
    assert kind == "wordpiece" or tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", ["bpe", "bpe of characters"])
def test_dropout_leaves_symbols_whole(name):
    tokenizer, text = with_symbols(name), "the <b> cat Ω{0}AB"
    assert RandomMerges(tokenizer, 0.0).encode(text, random.Random(0)) == tokenizer.encode(text)
    ids = RandomMerges(tokenizer, 0.5).encode(text, random.Random(0))
    assert tokenizer.decode(ids) == text
    assert {tokenizer.symbol_ids[symbol] for symbol in ("<b>", "{0}", "AB")} <= {*ids}


def test_symbols_are_no_part_of_learned_tokens_and_may_be_shared():
    tokenizer = trained_tokenizer("bpe", ["xABy z"] * 50, 300, symbols=("AB",))
    assert not any("AB" in tokenizer.decode([i]) for i in range(tokenizer.own_size))
    other = ByteTokenizer().with_symbols(("{0}", "<b>")).extended(("<mask>",))
    shared = correspondence(ByteTokenizer().with_symbols(("<b>",)), other)
    assert (shared.here[-1], shared.there[-1]) == (260, 261)
    assert other.id_of("<mask>") == 262
    assert from_json(other.to_json()).decode([262, 261, 260]) == "<b>{0}"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"symbols": ("a", " ")}, "symbols.*' ' must have visible characters"),
        ({"symbols": ("a ",)}, "'a ' must have visible characters, and single spaces only within"),
        ({"symbols": ("a\u200b",)}, "must have visible characters"),
        ({"symbols": ("a", "a")}, "data.symbols.*has a value twice"),
        ({"symbols": ("</s>",)}, "'</s>' is the name of a special token"),
        ({"symbols": ("a",), "tokenizer": "file", "tokenizer_file": "x"}, "is not used by data.tokenizer='file'"),
        ({"placeholders": ("parens",)}, "data.placeholders"),
        ({"character_coverage": 0.9, "tokenizer": "words"}, "needs data.tokenizer='bpe', 'unigram' or 'characters'"),
        ({"tokenizer_temperature": 2.0}, "is used only with data.directions or language_fields; write 5.0"),
        ({"byte_fallback": True}, "needs data.character_coverage, such as 0.9995; write False"),
        ({"byte_fallback": True, "tokenizer": "words"}, "needs data.tokenizer='bpe' or 'unigram'"),
    ],
)
def test_mistakes_are_refused(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        DataConfig(**settings)


def test_given_tokenizers_have_the_symbols_of_the_config():
    given_ones = train_tokenizers(DataConfig(tokenizer="bytes", symbols=("<b>",)), [{"text": "a"}])
    assert adopt_tokenizers(DataConfig(), given_ones, []).target.symbols == ("<b>",)
    with pytest.raises(ConfigError, match=r"data.symbols.*must be among \('<b>',\)"):
        adopt_tokenizers(DataConfig(symbols=("<i>",)), given_ones, [])
    with pytest.raises(ConfigError, match=r"data.placeholders.*must be \(\)"):
        adopt_tokenizers(DataConfig(placeholders=("tags",)), given_ones, [])


@pytest.mark.parametrize("kind", ["bpe", "unigram", "characters"])
def test_coverage_leaves_out_the_rarest_characters(kind):
    """By hand: of 100 characters, 95 are a, b and spaces; c occurs 3 times, d and e once."""
    lines = ["ab " * 30 + "aaaaa", "ccc", "e", "d"]
    for coverage, alphabet in ((0.95, " ab"), (0.96, " abc"), (0.98, " abc"), (0.981, " abcd"), (1.0, " abcde")):
        tokenizer = trained_tokenizer(kind, lines, 50, character_coverage=coverage)
        covered = "".join(c for c in " abcdeΩ" if tokenizer.encode(c) != [UNK])
        assert covered == alphabet
        assert tokenizer.decode(tokenizer.encode("ab abdΩ"), unknown="?") == "ab ab" + (
            "d?" if "d" in alphabet else "??"[: 1 + (kind != "unigram")]
        )


@pytest.mark.long
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_bytes_stand_for_characters_outside_the_vocabulary(kind):
    tokenizer = trained_tokenizer(kind, TEXTS, 500, character_coverage=0.9, byte_fallback=True)
    assert len(tokenizer.fallback_bytes) == 256
    assert tokenizer.vocab_size <= 500

    @given(st.text(max_size=30).filter(lambda text: "\ufffd" not in text))
    @example("<0x41> <0x0A>Ω <s>")
    def check(text):
        ids = tokenizer.encode(text)
        assert min(ids, default=4) >= len(SPECIAL_TOKENS)
        assert tokenizer.decode(ids) == text
        stream = TextStream(tokenizer)
        assert "".join([*map(stream.feed, ids), stream.close()]) == text

    check()
    first = min(tokenizer.fallback_bytes)
    assert [i - first for i in tokenizer.encode("Ω")] == list("Ω".encode())
    with pytest.raises(ConfigError, match="a vocabulary with these characters needs at least 2"):
        trained_tokenizer(kind, TEXTS, 262, character_coverage=0.9, byte_fallback=True)


def test_marks_belong_to_words():
    """Hindi's vowels are combining marks: GPT-2's pattern would split words at each of them."""
    tokenizer = trained_tokenizer("bpe", ["हिन्दी में", "हिन्दी"] * 50, 100, character_coverage=1.0)
    assert len(tokenizer.encode("हिन्दी")) == 1


def test_directions_are_drawn_for_the_tokenizer_by_temperature():
    """By hand: 10^4 : 10^2 : 1 examples are 100 : 10 : 1 at T = 2."""
    counts = balanced_counts({"a": 10_000, "b": 100, "c": 1}, 111, 2.0)
    assert counts == {"a": 100, "b": 10, "c": 1}
    assert balanced_counts({"a": 10_000, "b": 100, "c": 1}, 222, 2.0) == {"a": 200, "b": 20, "c": 2}
    assert balanced_counts({"a": 70, "b": 30}, 1000, 1.0) == {"a": 70, "b": 30}
    sizes = {"a": 7, "b": 5, "c": 3}
    uneven, weights = balanced_counts(sizes, 10, 3.0), {name: size ** (1 / 3) for name, size in sizes.items()}
    assert sum(uneven.values()) == 10
    assert all(abs(uneven[name] - 10 * weights[name] / sum(weights.values())) < 1 for name in sizes)


@pytest.mark.parametrize("order", ["by direction", "mixed"])
def test_a_stream_of_directions_is_sampled_as_a_sequence_is(order):
    """By hand: at T = 1e6, 40 and 5 examples are 10 : 10, so that each of the 5 is read twice."""
    examples = [{"source": f"{n}", "direction": "en-de" if n < 40 else "en-fr"} for n in range(45)]
    if order == "mixed":
        examples = [examples[i] for i in np.random.default_rng(0).permutation(45)]

    class Stream:
        def __iter__(self):
            return iter(examples)

    files = {"source": "parallel_lines", "train": ("a.{lang}",), "validation": ("b.{lang}",)}
    cfg = DataConfig(**files, directions=("en-de", "en-fr"), tokenizer_examples=20, tokenizer_temperature=1e6)
    sampled = [int(example["source"]) for example in _sample_balanced(cfg, examples)]
    assert [int(example["source"]) for example in _sample_balanced(cfg, Stream())] == sampled
    assert sorted(sampled)[10:] == sorted([*range(40, 45)] * 2)
    german = sorted(number for number in sampled if number < 40)
    assert len({*german}) == 10
    assert order == "mixed" or [number // 4 for number in german] == [*range(10)]


def test_one_direction_is_sampled_as_pairs_without_one():
    pairs = [{"source": f"{n}", "target": "t"} for n in range(40)]
    cfg = DataConfig(tokenizer_examples=7)
    sampled = _sample_balanced(cfg, [pair | {"direction": "en-de"} for pair in pairs])
    assert [example["source"] for example in sampled] == [example["source"] for example in _sample(pairs, 7)]
